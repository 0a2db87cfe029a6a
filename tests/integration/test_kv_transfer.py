"""KV transfer between two real processes, over UCX (shared memory and TCP, as UCX chooses) and over plain
TCP.

The decode side runs here, so that its memory can be watched; the prefill side is a child process.
"""

import asyncio
import json
import os
import resource
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.errors import IncompatiblePeer, TransferFailed
from common.kv_ticket import KVTicket
from kv_transfer.config import TransferConfig
from kv_transfer.receiver import KvReceiver
from kv_transfer.sender import KvSender
from tests.fakes_transfer import BLOCK_SIZE, holds_pattern, make_pools

ROOT = Path(__file__).resolve().parents[2]
NUM_BLOCKS = 64
BLOCK_BYTES = (65536, 4096)
BIG_BLOCK = 4 * 1024 * 1024  # 16 of them make one chunk of 64 MiB: long enough to be caught in flight
BIG: dict[str, Any] = {"num_blocks": 33, "block_bytes": (BIG_BLOCK,), "chunk_bytes": 16 * BIG_BLOCK}
GUARD = 0xA5
QUICK: dict[str, Any] = {
    "heartbeat_s": 0.2,
    "suspect_s": 1.0,
    "dead_s": 3.0,
    "connect_timeout_s": 20.0,
    "fetch_timeout_s": 45.0,  # longer than a busy machine needs: silence ends a fetch first
    "chunk_bytes": 512 * 1024,
}


def _ucx_problem() -> str | None:
    try:
        import ucxx  # noqa: F401
    except ImportError as error:
        return f"the UCX binding cannot be imported: {error}"
    return None


@pytest.fixture(params=["ucx", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "ucx":
        from kv_transfer import ucx_environment

        ucx_environment.apply()
        problem = _ucx_problem()
        if problem is not None:
            pytest.skip(problem)
    return name


class Child:
    """A peer process: one command at a time, events (released, progress) on the side."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            message = json.loads(line)
            if "event" in message:
                self.events.put_nowait(message)
            else:
                self._answers.put_nowait(message["answer"])

    async def event(self, timeout_s: float = 15.0) -> dict[str, Any]:
        async with asyncio.timeout(timeout_s):
            return await self.events.get()

    async def call(self, op: str, **fields: object) -> Any:
        self.send(op, **fields)
        return await self.answer()

    async def answer(self) -> Any:
        async with asyncio.timeout(15.0):
            return await self._answers.get()

    def send(self, op: str, **fields: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"op": op, **fields}).encode() + b"\n")

    async def offer(self, transfer_id: str, **fields: object) -> KVTicket:
        return msgspec.convert(await self.call("offer", id=transfer_id, **fields), KVTicket)

    async def compute(self, transfer_id: str, seed: int, blocks: Mapping[int, Mapping[int, int]]) -> None:
        assert await self.call("extend", id=transfer_id, seed=seed, blocks=blocks)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        await self._reader


@asynccontextmanager
async def child(role: str, transport: str, **changes: Any) -> AsyncIterator[Child]:
    config = {**QUICK, "transport": transport}
    config["chunk_bytes"] = changes.pop("chunk_bytes", config["chunk_bytes"])
    settings = {
        "num_blocks": NUM_BLOCKS,
        "block_bytes": BLOCK_BYTES,
        "fingerprint": "layout-1",
        "engine_id": "P",
        "port": 0,
        "config": config,
        **changes,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.transfer_peer",
        role,
        json.dumps(settings),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    peer = Child(process)
    try:
        yield peer
    finally:
        await peer.end()


@asynccontextmanager
async def receiver_here(
    transport: str,
    num_blocks: int = NUM_BLOCKS,
    block_bytes: tuple[int, ...] = BLOCK_BYTES,
    fingerprint: str = "layout-1",
    **changes: Any,
) -> AsyncIterator[KvReceiver]:
    config = TransferConfig(**{**QUICK, "transport": transport, **changes})
    receiver = KvReceiver(make_pools(num_blocks, block_bytes), fingerprint, config)
    for group in receiver.pools.groups:
        group.array_NB[:] = GUARD
    try:
        yield receiver
    finally:
        await receiver.close()


Story = Callable[[], Awaitable[None]]


def run(story: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await story

    asyncio.run(bounded())


async def until(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.001)


def both(placed: Mapping[int, int]) -> dict[int, dict[int, int]]:
    return {0: dict(placed), 1: dict(placed)}


def snapshot(receiver: KvReceiver) -> list[bytes]:
    return [group.array_NB.tobytes() for group in receiver.pools.groups]


def test_blocks_arrive_in_place_with_progress_while_prefill_computes(transport: str) -> None:
    async def story() -> None:
        async with child("sender", transport) as prefill, receiver_here(transport) as receiver:
            assert (await prefill.event())["transports"] == [transport]
            # 1. D asks before P has computed anything; it holds positions 0 and 1 already.
            ticket = await prefill.offer("a")
            want = {0: {p: (7 * p) % 61 for p in range(2, 20)}, 1: {p: 40 - p for p in range(8, 20)}}
            progress: list[int] = []
            cut = 20 * BLOCK_SIZE - 3
            fetch = asyncio.create_task(receiver.fetch(ticket, want, cut, progress.append))
            # 2. P computes two chunks of the prompt; D sees the first before the second exists.
            await prefill.compute("a", 1, both({p: p + 5 for p in range(8)}))
            await until(lambda: bool(progress))
            assert progress == [8 * BLOCK_SIZE]
            assert all(holds_pattern(receiver.pools, 1, 0, p, want[0][p]) for p in range(2, 8))
            await prefill.compute("a", 1, both({p: 63 - p for p in range(8, 20)}))
            assert not fetch.done()
            # 3. The carry is last; then P's hold ends.
            assert await prefill.call("finish", id="a", carry="row")
            result = await fetch
            assert (result.carry, result.extra, result.transport) == (b"row", b"extra", transport)
            assert result.num_bytes == 18 * BLOCK_BYTES[0] + 12 * BLOCK_BYTES[1]
            assert progress[-1] == cut
            assert progress == sorted(set(progress))
            for group in (0, 1):
                for position, block_id in want[group].items():
                    assert holds_pattern(receiver.pools, 1, group, position, block_id)
                for block_id in set(range(NUM_BLOCKS)) - set(want[group].values()):
                    assert (receiver.pools.groups[group].array_NB[block_id] == GUARD).all()
            assert await prefill.event() == {"event": "released", "id": "a", "reason": "committed"}
            assert await prefill.call("held") == 0

    run(story())


def test_ask_before_offer_partial_want_and_full_hit(transport: str) -> None:
    async def story() -> None:
        async with child("sender", transport) as prefill, receiver_here(transport) as receiver:
            port = (await prefill.event())["port"]
            # 1. D knows only where P is; P has not heard of the transfer.
            early = KVTicket(transfer_id="early", engine_id="P", host="127.0.0.1", port=port)
            fetch = asyncio.create_task(receiver.fetch(early, {0: {3: 9}}, 4 * BLOCK_SIZE))
            await until(lambda: receiver.metrics.retries > 0)
            await prefill.offer("early")
            await prefill.compute("early", 2, both({p: p for p in range(4)}))
            await prefill.call("finish", id="early", carry="c")
            assert (await fetch).num_bytes == BLOCK_BYTES[0]
            assert holds_pattern(receiver.pools, 2, 0, 3, 9)
            # 2. D has every block: the carry still comes and P is told.
            ticket = await prefill.offer("hit")
            await prefill.compute("hit", 3, both({0: 0}))
            await prefill.call("finish", id="hit", carry="only this")
            progress: list[int] = []
            result = await receiver.fetch(ticket, {}, 16, progress.append)
            assert (result.carry, result.num_bytes, progress) == (b"only this", 0, [16])
            # 3. D refuses early: the hold ends at once.
            await receiver.drop(await prefill.offer("unwanted"))
            reasons = {e["id"]: e["reason"] for e in [await prefill.event() for _ in range(3)]}
            assert reasons == {"early": "committed", "hit": "committed", "unwanted": "dropped by the reader"}

    run(story())


def test_refusals_name_the_cause(transport: str) -> None:
    async def story() -> None:
        async with child("sender", transport) as prefill:
            await prefill.event()
            ticket = await prefill.offer("a", lease_s=30.0)
            # 1. Another layout: refused before the first byte, both named, nothing released.
            async with receiver_here(transport, fingerprint="layout-2") as other:
                with pytest.raises(IncompatiblePeer, match=r"has layout-1.*has layout-2"):
                    await other.fetch(ticket, {}, 16)
            async with receiver_here(transport, block_bytes=(65536, 2048)) as other:
                with pytest.raises(IncompatiblePeer, match="block_bytes"):
                    await other.fetch(ticket, {}, 16)
            async with receiver_here(transport) as receiver:
                # 2. A lease that ended: refused, never served from what the blocks hold now.
                stale = await prefill.offer("brief", lease_s=0.05)
                await prefill.compute("brief", 1, both({0: 0}))
                assert (await prefill.event())["reason"] == "lease_expired"
                await prefill.call("overwrite")
                with pytest.raises(TransferFailed, match="expired"):
                    await receiver.fetch(stale, both({0: 0}), 16)
                # 3. The same id offered anew: the old ticket is of another generation.
                fresh = await prefill.offer("brief", lease_s=30.0)
                assert fresh.generation != stale.generation
                with pytest.raises(TransferFailed, match="generation"):
                    await receiver.fetch(stale, both({0: 0}), 16)
                # 4. Another incarnation and another engine.
                with pytest.raises(TransferFailed, match="restarted"):
                    await receiver.fetch(msgspec.structs.replace(fresh, incarnation="older"), {}, 16)
                with pytest.raises(TransferFailed, match="is engine P, the ticket is of engine Q"):
                    await receiver.fetch(msgspec.structs.replace(fresh, engine_id="Q"), {}, 16)
                #    None of these refusals touched the hold itself.
                assert await prefill.call("held") == 2
                await receiver.drop(fresh)
                assert (await prefill.event())["reason"] == "dropped by the reader"
                # 5. A block that P never computed is named; P's own cancellation gives its reason.
                await prefill.compute("a", 1, both({0: 0, 1: 1}))
                await prefill.call("finish", id="a", carry="")
                with pytest.raises(TransferFailed, match="position 7 of group 1"):
                    await receiver.fetch(ticket, {1: {1: 1, 7: 2}}, 16)
                gone = await prefill.offer("gone")
                fetch = asyncio.create_task(receiver.fetch(gone, both({0: 0}), 16))
                await until(lambda: receiver.metrics.sessions_open == 1)
                await prefill.call("cancel", id="gone", reason="prompt too long")
                with pytest.raises(TransferFailed, match="prompt too long"):
                    await fetch
                assert receiver.quarantined == {}

    run(story())


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_prefill_dies_in_mid_transfer(transport: str, how: str) -> None:
    async def story() -> None:
        async with child("sender", transport, **BIG) as prefill, receiver_here(transport, **BIG) as receiver:
            await prefill.event()
            ticket = await prefill.offer("a")
            want = {0: {p: p for p in range(32)}}
            progress: list[int] = []
            fetch = asyncio.create_task(receiver.fetch(ticket, want, 32 * BLOCK_SIZE, progress.append))
            # 1. The first chunk arrives whole.
            await prefill.compute("a", 1, {0: {p: 31 - p for p in range(16)}})
            await until(lambda: bool(progress))
            # 2. The second is caught in flight.
            pool = receiver.pools.groups[0].array_NB
            prefill.send("extend", id="a", seed=1, blocks={0: {p: p for p in range(16, 32)}})
            await until(lambda: bool((pool[16:32, 0] != GUARD).any() or (pool[16:32, -1] != GUARD).any()))
            prefill.signal(signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            with pytest.raises(TransferFailed) as caught:
                await fetch
            # 3. What was final is kept, the rest is quiet, and nothing is in quarantine. (On a machine that
            #    held us up the second chunk may have been whole as well.)
            kept = caught.value.final_upto // BLOCK_SIZE
            assert kept in (16, 32)
            assert caught.value.quarantined == {}
            before = snapshot(receiver)
            if how == "stop":
                prefill.signal(signal.SIGCONT)
                assert (await prefill.event())["reason"].startswith(("peer_lost", "sending chunk"))
            await asyncio.sleep(0.5)
            assert snapshot(receiver) == before
            for position in range(kept):
                assert holds_pattern(receiver.pools, 1, 0, position, position)

    run(story())


def test_cancelled_receiver_leaves_quiet_memory_and_a_usable_session(transport: str) -> None:
    async def story() -> None:
        async with child("sender", transport, **BIG) as prefill, receiver_here(transport, **BIG) as receiver:
            await prefill.event()
            pool = receiver.pools.groups[0].array_NB
            ticket = await prefill.offer("a")
            want = {0: {p: p for p in range(32)}}
            fetch = asyncio.create_task(receiver.fetch(ticket, want, 32 * BLOCK_SIZE))
            prefill.send("extend", id="a", seed=1, blocks={0: {p: p for p in range(16)}})
            await until(lambda: bool((pool[:16, 0] != GUARD).any()))
            for _ in range(3):  # impatient callers change nothing
                fetch.cancel()
                await asyncio.sleep(0)
            with pytest.raises(asyncio.CancelledError):
                await fetch
            # the caller may now give the blocks to another request
            pool[:] = GUARD
            assert (await prefill.event())["event"] == "released"
            await prefill.answer()  # to "extend"
            await asyncio.sleep(0.5)
            assert bool((pool == GUARD).all())
            again = await prefill.offer("b")
            await prefill.compute("b", 2, {0: {0: 5}})
            await prefill.call("finish", id="b", carry="c")
            await receiver.fetch(again, {0: {0: 7}}, 16)
            assert holds_pattern(receiver.pools, 2, 0, 0, 7)
            assert receiver.metrics.fences_forced == 0

    run(story())


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_decode_dies_in_mid_transfer_and_prefill_gets_its_blocks_back(transport: str, how: str) -> None:
    async def story() -> None:
        released: list[tuple[str, str]] = []
        pools = make_pools(33, (BIG_BLOCK,))
        config = TransferConfig(**{**QUICK, "transport": transport})
        sender = KvSender(pools, "layout-1", config, lambda t, why: released.append((t, why)), engine_id="P")
        await sender.start("127.0.0.1")
        try:
            async with child("receiver", transport, **BIG) as decode:
                await decode.event()
                ticket = sender.offer("a")
                decode.send(
                    "fetch", ticket=msgspec.to_builtins(ticket), want={0: {p: p for p in range(32)}}, cut=512
                )
                await until(lambda: sender.metrics.transfers_started == 1)
                sender.extend("a", {0: {p: p for p in range(32)}}, 512)
                await until(lambda: sender.metrics.chunks_sent >= 1)
                assert released == []
                decode.signal(signal.SIGKILL if how == "kill" else signal.SIGSTOP)
                await until(lambda: bool(released))
                assert released[0][1].startswith(("peer_lost", "sending chunk"))
                assert sender.num_held == 0
        finally:
            await sender.close()
        assert len(released) == 1

    run(story())


def test_restart_on_the_same_port(transport: str) -> None:
    async def story() -> None:
        async with receiver_here(transport) as receiver:
            port = 0
            old: KVTicket | None = None
            for life in range(3):
                async with child("sender", transport, port=port) as prefill:
                    port = (await prefill.event())["port"]
                    if old is not None:
                        with pytest.raises(TransferFailed, match="restarted"):
                            await receiver.fetch(old, {}, 16)
                    ticket = old = await prefill.offer("same id")
                    await prefill.compute("same id", life, both({0: life}))
                    await prefill.call("finish", id="same id", carry=str(life))
                    result = await receiver.fetch(ticket, both({0: 30 + life}), 16)
                    assert result.carry == str(life).encode()
                    assert holds_pattern(receiver.pools, life, 0, 0, 30 + life)
                    if life == 1:
                        prefill.signal(signal.SIGKILL)

    run(story())


def test_garbage_on_the_control_port_harms_nobody(transport: str) -> None:
    async def story() -> None:
        async with child("sender", transport) as prefill, receiver_here(transport) as receiver:
            port = (await prefill.event())["port"]
            for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x02\x63\x80", b"\xff" * 64, b""):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(garbage)
                if garbage:
                    await asyncio.wait_for(reader.read(), 5)
                writer.close()
            ticket = await prefill.offer("a")
            await prefill.compute("a", 1, both({0: 1}))
            await prefill.call("finish", id="a", carry="fine")
            assert (await receiver.fetch(ticket, both({0: 2}), 16)).carry == b"fine"

    run(story())


def test_an_idle_pair_costs_nothing(transport: str) -> None:
    async def story() -> None:
        async with (
            child("sender", transport) as prefill,
            receiver_here(transport, heartbeat_s=0.9) as receiver,
        ):
            await prefill.event()
            ticket = await prefill.offer("a")
            await prefill.call("finish", id="a", carry="")
            with pytest.raises(TransferFailed, match="computed 0 positions"):
                await receiver.fetch(ticket, {}, 16)

            def child_cpu_s() -> float:
                fields = Path(f"/proc/{prefill.process.pid}/stat").read_text().rsplit(") ", 1)[1].split()
                return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

            def own_cpu_s() -> float:
                usage = resource.getrusage(resource.RUSAGE_SELF)
                return usage.ru_utime + usage.ru_stime

            await asyncio.sleep(0.5)
            before = child_cpu_s(), own_cpu_s()
            await asyncio.sleep(3.0)
            used = child_cpu_s() - before[0], own_cpu_s() - before[1]
            assert max(used) / 3.0 < 0.02, used

    run(story())


def test_auto_prefers_ucx_and_falls_back_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Without the binding: ``auto`` warns once and uses TCP, ``ucx`` refuses."""
    from kv_transfer import transport as choice

    async def story() -> None:
        import kv_transfer.ucx as ucx
        from kv_transfer.transport import TransportUnavailable

        class NoBinding:
            def __init__(self) -> None:
                raise ImportError("No module named 'ucxx'")

        original = ucx._Binding
        ucx._Binding = NoBinding  # type: ignore[assignment,misc]
        try:
            started = await choice.start_transports("auto", "127.0.0.1")
            assert list(started) == ["tcp"]
            await started["tcp"].close()
            with pytest.raises(TransportUnavailable, match=r"\[ucx\] extra"):
                await choice.start_transports("ucx", "127.0.0.1")
        finally:
            ucx._Binding = original  # type: ignore[misc]
        assert sum("falls back to TCP" in r.message for r in caplog.records) == 1

    run(story())
