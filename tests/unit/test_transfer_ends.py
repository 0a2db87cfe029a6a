"""How transfers end, step by step, over an in-process transport that a test can freeze or damage."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from common.errors import TransferFailed
from common.metrics import NODE_METRICS, Metrics
from kv_transfer import fetching
from kv_transfer.config import TransferConfig
from kv_transfer.geometry import GroupMap
from kv_transfer.metrics import TransferMetrics, publish
from kv_transfer.plan import Chunk
from kv_transfer.receiver import KvReceiver
from kv_transfer.sender import KvSender
from kv_transfer.serving import Offer
from tests.fakes_transfer import (
    BLOCK_SIZE,
    FakeNetwork,
    FakeTransport,
    fill,
    holds_pattern,
    make_pools,
)

BASE = TransferConfig(
    chunk_bytes=2 * 8192,
    window_chunks=2,
    heartbeat_s=0.05,
    suspect_s=5.0,
    dead_s=10.0,
    connect_timeout_s=5.0,
    fetch_timeout_s=5.0,
)
FOUR = {0: {p: p for p in range(4)}}  # two chunks of group 0


@dataclass
class Pair:
    network: FakeNetwork
    sender: KvSender
    receiver: KvReceiver
    released: list[tuple[str, str]]

    def compute(self, transfer_id: str, seed: int, num_blocks: int) -> None:
        blocks = {0: {p: p for p in range(num_blocks)}}
        fill(self.sender.pools, seed, blocks)
        assert self.sender.extend(transfer_id, blocks, num_blocks * BLOCK_SIZE)


@asynccontextmanager
async def pair(**changes: Any) -> AsyncIterator[Pair]:
    network = FakeNetwork()
    config = TransferConfig(**{**{f: getattr(BASE, f) for f in BASE.__dataclass_fields__}, **changes})
    released: list[tuple[str, str]] = []
    sender = KvSender(
        make_pools(16),
        "fp",
        config,
        lambda name, reason: released.append((name, reason)),
        transports={"fake": FakeTransport(network)},
    )
    await sender.start("127.0.0.1")
    receiver = KvReceiver(make_pools(16), "fp", config, transports={"fake": FakeTransport(network)})
    try:
        yield Pair(network, sender, receiver, released)
    finally:
        await receiver.close()
        await sender.close()


def run(story: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await story

    asyncio.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


def test_blocks_stay_held_while_a_send_reads_them() -> None:
    async def story() -> None:
        async with pair() as p:
            p.network.frozen = True
            ticket = p.sender.offer("a")
            fetch = asyncio.create_task(p.receiver.fetch(ticket, FOUR, 64))
            # the probe of the lane must get through
            p.network.frozen = False
            await until(lambda: p.sender.metrics.transfers_started == 1)
            p.network.frozen = True
            p.compute("a", 1, 4)
            assert p.sender.metrics.chunks_sent == 2
            # 1. Our own node gives up: the hold is over in name, not in fact.
            p.sender.cancel("a", "aborted by the client")
            assert p.released == []
            await asyncio.sleep(0.1)
            assert (p.released, p.sender.num_held) == ([], 1)
            # 2. The sends end: now the blocks are free, once.
            p.network.frozen = False
            with pytest.raises(TransferFailed, match="aborted by the client"):
                await fetch
            await until(lambda: p.released == [("a", "aborted by the client")])
            assert p.sender.num_held == 0

    run(story())


def test_sends_that_never_end_are_ended_by_closing_the_lane() -> None:
    async def story() -> None:
        async with pair() as p:
            fetch = asyncio.create_task(p.receiver.fetch(p.sender.offer("a"), FOUR, 64))
            await until(lambda: p.sender.metrics.transfers_started == 1)
            p.network.frozen = True
            p.compute("a", 1, 4)
            fetch.cancel()
            with pytest.raises(asyncio.CancelledError):
                await fetch
            await until(lambda: len(p.released) == 1)
            assert p.receiver.metrics.fences_forced + p.sender.metrics.fences_forced >= 1
            assert p.receiver.quarantined == {}
            # the pair recovers with a new session
            p.network.frozen = False
            ticket = p.sender.offer("b")
            p.compute("b", 2, 1)
            p.sender.finish("b", b"c")
            await p.receiver.fetch(ticket, {0: {0: 9}}, 16)
            assert holds_pattern(p.receiver.pools, 2, 0, 0, 9)

    run(story())


def test_a_lease_that_ends_between_two_chunks_stops_the_transfer() -> None:
    async def story() -> None:
        async with pair(heartbeat_s=2.0) as p:  # too slow to renew
            progress: list[int] = []
            fetch = asyncio.create_task(
                p.receiver.fetch(p.sender.offer("a", lease_s=0.3), FOUR, 64, progress.append)
            )
            await until(lambda: p.sender.metrics.transfers_started == 1)
            p.compute("a", 1, 2)
            await until(lambda: progress == [32])
            with pytest.raises(TransferFailed, match="lease_expired") as caught:
                await fetch
            assert caught.value.final_upto == 32
            assert p.released == [("a", "lease_expired")]
            assert not p.sender.extend("a", FOUR, 64)  # too late, and harmless
            assert not p.sender.finish("a", b"")

    run(story())


def test_heartbeats_of_a_waiting_reader_renew_the_lease() -> None:
    async def story() -> None:
        async with pair() as p:
            fetch = asyncio.create_task(p.receiver.fetch(p.sender.offer("a", lease_s=0.2), FOUR, 64))
            await asyncio.sleep(0.6)
            p.compute("a", 1, 4)
            p.sender.finish("a", b"row")
            assert (await fetch).carry == b"row"

    run(story())


def test_a_damaged_chunk_is_refused_and_its_blocks_are_named() -> None:
    async def story() -> None:
        async with pair() as p:
            progress: list[int] = []
            fetch = asyncio.create_task(p.receiver.fetch(p.sender.offer("a"), FOUR, 64, progress.append))
            await until(lambda: p.sender.metrics.transfers_started == 1)
            p.compute("a", 1, 2)
            await until(lambda: progress == [32])
            p.network.damage_next = True
            p.compute("a", 1, 4)
            with pytest.raises(
                TransferFailed, match=r"group 0, block positions 2 to 3, arrived damaged"
            ) as caught:
                await fetch
            assert caught.value.final_upto == 32
            assert p.receiver.metrics.failures["checksum"] == 1

    run(story())


def test_dropped_before_it_was_offered() -> None:
    async def story() -> None:
        async with pair() as p:
            ticket = p.sender.offer("seed")  # only to learn the address
            early = type(ticket)(transfer_id="x", engine_id="", host=ticket.host, port=ticket.port)
            await p.receiver.drop(early)
            await asyncio.sleep(0.05)
            p.sender.offer("x")
            assert p.released == []  # never from inside offer()
            await until(lambda: p.released == [("x", "dropped by the reader")])
            assert not p.sender.extend("x", FOUR, 64)

    run(story())


def test_two_readers_one_hold() -> None:
    async def story() -> None:
        async with pair(fetch_timeout_s=0.5) as p:
            ticket = p.sender.offer("a")
            first = asyncio.create_task(p.receiver.fetch(ticket, FOUR, 64))
            await until(lambda: p.sender.metrics.transfers_started == 1)
            other = KvReceiver(
                make_pools(16), "fp", p.receiver.config, transports={"fake": FakeTransport(p.network)}
            )
            # the second is told to wait, and its giving up does not end the first one's hold
            second = asyncio.create_task(other.fetch(ticket, FOUR, 64))
            await until(lambda: other.metrics.retries >= 1)
            second.cancel()
            with pytest.raises(asyncio.CancelledError):
                await second
            p.compute("a", 1, 4)
            p.sender.finish("a", b"mine")
            assert (await first).carry == b"mine"
            await other.close()

    run(story())


def test_a_failing_progress_callback_fails_its_own_transfer_only() -> None:
    async def story() -> None:
        async with pair() as p:

            def broken(upto: int) -> None:
                raise RuntimeError(f"no room for {upto}")

            ticket, good = p.sender.offer("a"), p.sender.offer("b")
            bad = asyncio.create_task(p.receiver.fetch(ticket, FOUR, 64, broken))
            fine = asyncio.create_task(p.receiver.fetch(good, {0: {p: p + 8 for p in range(4)}}, 64))
            await until(lambda: p.sender.metrics.transfers_started == 2)
            for name in ("a", "b"):
                p.compute(name, 1, 4)
                p.sender.finish(name, b"")
            with pytest.raises(TransferFailed, match="no room for"):
                await bad
            await fine
            assert all(holds_pattern(p.receiver.pools, 1, 0, q, q + 8) for q in range(4))

    run(story())


def test_closing_either_end_fails_what_runs() -> None:
    async def story() -> None:
        async with pair() as p:
            fetch = asyncio.create_task(p.receiver.fetch(p.sender.offer("a"), FOUR, 64))
            await until(lambda: p.sender.metrics.transfers_started == 1)
            await p.sender.close()
            with pytest.raises(TransferFailed, match=r"closed|peer_lost"):
                await fetch
            assert p.released == [("a", "closed")]
        async with pair() as p:
            fetch = asyncio.create_task(p.receiver.fetch(p.sender.offer("a"), FOUR, 64))
            await until(lambda: p.sender.metrics.transfers_started == 1)
            await p.receiver.close()
            with pytest.raises(TransferFailed, match="shutting down"):
                await fetch
            await until(lambda: len(p.released) == 1)
            with pytest.raises(TransferFailed, match="shutting down"):
                await p.receiver.fetch(p.sender.offer("b"), FOUR, 64)

    run(story())


async def transfer_works(p: Pair, transfer_id: str, seed: int) -> None:
    ticket = p.sender.offer(transfer_id)
    p.compute(transfer_id, seed, 1)
    p.sender.finish(transfer_id, b"c")
    await p.receiver.fetch(ticket, {0: {0: 9}}, 16)
    assert holds_pattern(p.receiver.pools, seed, 0, 0, 9)


def test_a_lane_that_breaks_while_the_peer_still_talks_is_replaced() -> None:
    async def story() -> None:
        async with pair() as p:
            await transfer_works(p, "a", 1)
            (transport,) = p.receiver.transports.values()
            assert isinstance(transport, FakeTransport)
            await transport.lanes[0].fence(1.0)  # say a firewall forgot the idle connection
            with pytest.raises(TransferFailed, match="peer_lost: receiving chunk 0 failed: closed"):
                await transfer_works(p, "b", 2)
            await transfer_works(p, "c", 3)
            await until(lambda: p.receiver.metrics.sessions_open == p.sender.metrics.sessions_open == 1)
            assert [name for name, _ in p.released] == ["a", "b", "c"]

    run(story())


@pytest.mark.parametrize("post", ["recv", "send"])
def test_an_unexpected_error_ends_the_session_and_not_the_pair(post: str) -> None:
    async def story() -> None:
        async with pair() as p:
            await transfer_works(p, "a", 1)
            fetch = asyncio.create_task(p.receiver.fetch(p.sender.offer("b"), FOUR, 64))
            await until(lambda: p.sender.metrics.transfers_started == 2)
            await asyncio.sleep(0.05)
            ticket = p.sender.offer("c")
            p.compute("c", 3, 4)
            p.network.bug = post
            async with asyncio.timeout(2.0):
                with pytest.raises(TransferFailed, match=r"internal|closed the connection"):
                    await p.receiver.fetch(ticket, FOUR, 64)
                with pytest.raises(TransferFailed, match=r"internal|closed the connection"):
                    await fetch
            await until(lambda: p.sender.num_held == 0)
            await transfer_works(p, "d", 4)
            assert p.receiver.metrics.sessions_open == 1

    run(story())


def test_a_prompt_that_nobody_sends_to_the_prefill_node_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story() -> None:
        monkeypatch.setattr(fetching, "_UNKNOWN_GRACE_S", 0.3)
        async with pair() as p:
            ticket = msgspec.structs.replace(p.sender.offer("other"), transfer_id="a", generation=0)
            async with asyncio.timeout(2.0):
                with pytest.raises(TransferFailed, match="unknown: the prefill node was not asked"):
                    await p.receiver.fetch(ticket, FOUR, 64)
            assert p.receiver.metrics.failures["unknown"] == 1

    run(story())


def test_a_finished_prompt_is_looked_through_once_however_many_chunks_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    passes: list[int] = []
    look = Offer.first_missing

    def counted(self: Offer, chunks: tuple[Chunk, ...], maps: Sequence[GroupMap]) -> str | None:
        passes.append(len(chunks))
        return look(self, chunks, maps)

    async def story() -> None:
        monkeypatch.setattr(Offer, "first_missing", counted)
        async with pair(chunk_bytes=8192) as p:
            ticket = p.sender.offer("a")
            p.compute("a", 1, 16)
            p.sender.finish("a", b"row")
            result = await p.receiver.fetch(ticket, {0: {q: q for q in range(16)}}, 256)
            assert result.carry == b"row"
            assert passes == [16]

    run(story())


# ---- what operators see ---------------------------------------------------------------------------------


class Published:
    """The KV transfer's series of a node; ``moved``: by how much each changed since it was last asked."""

    def __init__(self, counted: TransferMetrics) -> None:
        self._metrics = Metrics(NODE_METRICS, model_name="m")
        self._metrics.before_render = lambda: publish(counted, self._metrics)
        self._last: dict[str, float] = {}

    def moved(self) -> dict[str, float]:
        text = self._metrics.render().decode()
        now = {
            name + labels: float(value)
            for name, labels, value in re.findall(r"^baton_kv_transfer_(\w+)(\S*) (\S+)$", text, re.M)
            if not name.endswith("_created")
        }
        by = {series: value - self._last.get(series, 0) for series, value in now.items()}
        self._last = now
        return {series: change for series, change in by.items() if change}


BLOCK_BYTES = 8192
CONNECTED = {"sessions": 1.0, 'lanes_total{transport="fake"}': 1.0}


def test_a_good_transfer_moves_these_series_and_no_others() -> None:
    async def story() -> None:
        async with pair() as p:
            prefill, decode = Published(p.sender.metrics), Published(p.receiver.metrics)
            assert (prefill.moved(), decode.moved()) == ({}, {})
            ticket = p.sender.offer("a")
            assert prefill.moved() == {"leases": 1}
            fetch = asyncio.create_task(p.receiver.fetch(ticket, FOUR, 64))
            p.compute("a", 1, 4)
            p.sender.finish("a", b"carry")
            result = await fetch
            await until(lambda: p.released == [("a", "committed")])
            ended = {"attempts_total": 1, "commits_total": 1}
            assert prefill.moved() == {
                "leases": -1, 'chunks_total{direction="sent"}': 2, "sent_bytes_total": 4 * BLOCK_BYTES,
            } | ended | CONNECTED  # fmt: skip
            assert decode.moved() == {
                'chunks_total{direction="received"}': 2, "received_bytes_total": 4 * BLOCK_BYTES,
                'seconds_total{phase="waiting"}': result.seconds_waiting,
                'seconds_total{phase="moving"}': result.seconds_moving,
            } | ended | CONNECTED  # fmt: skip

    run(story())


def test_a_failed_transfer_moves_these_series_and_tells_its_story_in_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story() -> None:
        caplog.set_level(logging.INFO, logger="kv_transfer")
        async with pair() as p:
            prefill, decode = Published(p.sender.metrics), Published(p.receiver.metrics)
            ticket = p.sender.offer("a")
            fetch = asyncio.create_task(p.receiver.fetch(ticket, FOUR, 64))
            p.compute("a", 1, 2)
            await until(lambda: p.receiver.metrics.chunks_received == 1)
            p.sender.cancel("a", "aborted by the client")
            with pytest.raises(TransferFailed, match="aborted by the client"):
                await fetch
            await until(lambda: p.released == [("a", "aborted by the client")])
            assert prefill.moved() == {
                "attempts_total": 1, 'chunks_total{direction="sent"}': 1,
                "sent_bytes_total": 2 * BLOCK_BYTES, 'failures_total{reason="cancel"}': 1,
            } | CONNECTED  # fmt: skip
            assert decode.moved() == {
                "attempts_total": 1, 'chunks_total{direction="received"}': 1,
                "received_bytes_total": 2 * BLOCK_BYTES, 'failures_total{reason="refused"}': 1,
            } | CONNECTED  # fmt: skip
            (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
            assert re.fullmatch(
                rf"transfer a from 127\.0\.0\.1:{ticket.port}, attempt 1, failed in RECEIVING after 0\.\d+ s "
                rf"\(0\.\d+ s moving, fence 0\.\d+ s\), 1 of 2 chunks and {2 * BLOCK_BYTES} bytes "
                r"\(positions < 32 kept, 0 blocks in quarantine\): refused: aborted by the client",
                line,
            ), line
            assert (
                "transfer a: hold ends (CANCEL: aborted by the client) in SENDING, positions < 32 computed, "
                "1 of 2 chunks sent"
            ) in caplog.messages

    run(story())


def test_a_lease_that_ends_moves_from_live_to_expired() -> None:
    async def story() -> None:
        async with pair() as p:
            prefill = Published(p.sender.metrics)
            p.sender.offer("a", lease_s=0.05)
            p.sender.offer("b")
            assert prefill.moved() == {"leases": 2}
            await until(lambda: p.released == [("a", "lease_expired")])
            assert prefill.moved() == {
                "leases": -1, "leases_expired_total": 1, 'failures_total{reason="expire"}': 1,
            }  # fmt: skip

    run(story())


def test_every_figure_has_a_series_of_its_own() -> None:
    counted = TransferMetrics()
    published = Published(counted)
    published.moved()
    for i, name in enumerate(vars(counted)):
        value: Any = getattr(counted, name)
        if isinstance(value, dict):
            value["x"] = 2
        else:
            setattr(counted, name, value + i + 1)
        assert len(published.moved()) == 1, name
