"""What crosses at a node's seams: messages, engine steps and transfers, over real sockets and a fake engine.

The test is the router: it holds the real hub and opens legs by hand.
"""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager

import httpx
import pytest

from common.config import NodeOptions
from common.engine.batch import RunnerOutput, ScheduledBatch
from common.engine.engine import Engine
from common.engine.first_token import decode_first_token
from common.errors import ConfigError, TransferFailed
from common.kv_ticket import KVTicket
from common.messages import Abort, Accepted, DecodeRequest, Finished, PrefillRequest, Refused, TokenChunk
from common.metrics import ROUTER_METRICS, Metrics
from common.request import SamplingParams
from decode_node.config import DecodeConfig, DecodeOptions
from decode_node.node import GIVEN_UP, DecodeNode
from kv_transfer.config import TransferConfig
from kv_transfer.receiver import FetchResult, KvReceiver
from prefill_node.config import PrefillConfig
from prefill_node.node import PrefillNode
from router.node_hub import Leg, NodeHub
from router.registry import Node
from tests.fakes import ROW, continuation, is_whole
from tests.fakes_built import NUM_MODULES, fake_built

TRANSFER = TransferConfig(transport="tcp")
WAIT_S = 5.0


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


def make_hub() -> tuple[NodeHub, str]:
    hub = NodeHub(
        router_id="r",
        heartbeat_timeout_s=WAIT_S,
        refusal=lambda register: None,
        metrics=Metrics(ROUTER_METRICS, model_name="m"),
        on_join=lambda node: None,
        on_leave=lambda node: None,
        on_heartbeat=lambda node: None,
    )
    return hub, f"tcp://127.0.0.1:{hub.start('127.0.0.1', 0)}"


@asynccontextmanager
async def prefill_node() -> AsyncIterator[tuple[NodeHub, Node, PrefillNode]]:
    hub, address = make_hub()
    options = NodeOptions(node_id="p", router=address, drain_timeout_s=1.0)
    it = PrefillNode(PrefillConfig(transfer=TRANSFER, node=options), fake_built())
    serving = asyncio.create_task(it.serve())
    try:
        await eventually(lambda: "p" in hub.nodes)
        yield hub, hub.nodes["p"], it
    finally:
        it.runtime.service.stop()
        await serving
        await hub.close()


@asynccontextmanager
async def decode_node(
    transfer: TransferConfig = TRANSFER, policy: str = "recompute", **options: int
) -> AsyncIterator[tuple[NodeHub, Node, DecodeNode]]:
    hub, address = make_hub()
    named = NodeOptions(node_id="d", router=address, drain_timeout_s=1.0)
    config = DecodeConfig(DecodeOptions(on_transfer_failure=policy), transfer=transfer, node=named)
    it = DecodeNode(config, fake_built(**options))
    serving = asyncio.create_task(it.serve())
    try:
        await eventually(lambda: "d" in hub.nodes)
        yield hub, hub.nodes["d"], it
    finally:
        it.runtime.service.stop()
        await serving
        await hub.close()


@contextmanager
def standing_still(node: DecodeNode | PrefillNode) -> Iterator[None]:
    """The engine is in a long step; calls wait."""
    go = threading.Event()
    node.runtime.loop.call(lambda engine: go.wait(WAIT_S))
    try:
        yield
    finally:
        go.set()


class StuckReceiver(KvReceiver):
    """Every transfer breaks, and one destination block may still be written to."""

    def __init__(self, like: KvReceiver) -> None:
        super().__init__(like.pools, like.fingerprint, like.config, on_quiet=like._on_quiet)
        self.go = asyncio.Event()
        self.broken: set[str] = set()
        self.block = 0

    async def fetch(
        self,
        ticket: KVTicket,
        want: Mapping[int, Mapping[int, int]],
        cut: int,
        on_progress: Callable[[int], None] | None = None,
    ) -> FetchResult:
        await self.go.wait()
        self.broken.add(ticket.transfer_id)
        self.block = want[0][2]
        raise TransferFailed("lane", final_upto=0, quarantined={0: [self.block]})

    def end(self) -> None:
        """The block is quiet after all."""
        assert self._on_quiet is not None
        self._on_quiet({0: (self.block,)})


def scenario(story: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(4 * WAIT_S):
            await story()

    asyncio.run(main())


def ticket_on(node: Node, transfer_id: str) -> KVTicket:
    address = node.register.transfer
    assert address is not None
    return KVTicket(
        transfer_id=transfer_id, engine_id=address.engine_id, host=address.host, port=address.port
    )


def prefill_of(
    node: Node, request_id: str, cut: int = 28, sampling: SamplingParams | None = None
) -> PrefillRequest:
    ticket = ticket_on(node, f"t-{request_id}")
    return PrefillRequest(request_id, list(range(30)), cut, ticket, sampling=sampling)


def decode_of(node: Node, request_id: str, ticket: KVTicket | None, cut: int, n: int = 1) -> DecodeRequest:
    sampling = SamplingParams(max_tokens=4, temperature=0.0)
    return DecodeRequest(request_id, list(range(30)), sampling, n, ticket, cut)


async def answer(leg: Leg) -> object:
    return await leg.answer(WAIT_S, "an answer")


def test_an_abort_right_behind_a_prefill_request_ends_it() -> None:
    async def story() -> None:
        async with prefill_node() as (hub, node, p):
            leg = hub.open(node, prefill_of(node, "a"))
            hub.send(node, Abort("a"))
            end = await answer(leg)
            while not isinstance(end, Finished):
                end = await answer(leg)
            assert end.reason == "abort"
            assert p.sender.num_held == 0
            assert await p.runtime.call(is_whole)

    scenario(story)


@pytest.mark.parametrize("why", ["draining", "cut", "too long"])
def test_a_refused_prefill_ends_the_wait_of_its_decode_node(why: str) -> None:
    async def story() -> None:
        async with prefill_node() as (hub, node, p):
            receiver = KvReceiver(p.sender.pools, p.sender.fingerprint, TRANSFER)
            message = prefill_of(node, "a", cut=31 if why == "cut" else 28)
            if why == "draining":
                p.runtime.drain()
            if why == "too long":
                message.token_ids.extend([1] * 300)
            early = asyncio.create_task(receiver.fetch(message.ticket, {0: {0: 1}}, 4))
            await eventually(lambda: receiver.metrics.retries > 0)  # asks before P has heard of it
            assert isinstance(await answer(hub.open(node, message)), Refused)
            async with asyncio.timeout(1.0):
                with pytest.raises(TransferFailed, match=r"gone|refused"):
                    await early
                with pytest.raises(TransferFailed, match="gone"):  # and one that asks later
                    await receiver.fetch(message.ticket, {0: {0: 1}}, 4)
            await receiver.close()
            assert p.sender.num_held == 0
            assert await p.runtime.call(is_whole)

    scenario(story)


def test_an_abort_that_crosses_a_broken_transfer_leaves_its_blocks_in_quarantine_until_they_are_quiet() -> (
    None
):
    async def story() -> None:
        async with decode_node() as (hub, node, d):
            d.receiver = stuck = StuckReceiver(d.receiver)
            ticket = KVTicket(transfer_id="t", engine_id="p", host="127.0.0.1", port=9)
            leg = hub.open(node, decode_of(node, "a", ticket, 28))
            assert isinstance(await answer(leg), Accepted)
            with standing_still(d):
                stuck.go.set()
                await eventually(lambda: "t" in stuck.broken)
                hub.send(node, Abort("a"))
                await eventually(lambda: d._decodes["a"].aborted)
                await asyncio.sleep(0.05)
            end = await answer(leg)
            assert isinstance(end, Finished)
            assert end.reason == "abort"
            pool = d.runtime.built.engine.scheduler.kv.pools[0]
            assert pool.num_free == pool.num_usable == pool.num_blocks - 2, "the stuck block came back"
            stuck.end()
            await eventually(lambda: pool.num_free == pool.num_usable == pool.num_blocks - 1)

    scenario(story)


# ---- a transfer that fails ------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_what_a_failed_transfer_means_to_its_request(policy: str) -> None:
    """P's engine stands still, so D gives up at its deadline."""
    hasty = TransferConfig(transport="tcp", fetch_timeout_s=0.2)

    async def story() -> None:
        async with prefill_node() as (p_hub, p_node, p), decode_node(hasty, policy) as (d_hub, d_node, d):
            with standing_still(p):
                prefill = prefill_of(p_node, "a")
                p_hub.open(p_node, prefill)
                leg = d_hub.open(d_node, decode_of(d_node, "a", prefill.ticket, 28))
                assert isinstance(await answer(leg), Accepted)
                answers = [await answer(leg)]
                while not isinstance(answers[-1], Finished):
                    answers.append(await answer(leg))
                await eventually(lambda: p.sender.num_held == 0)
            end = answers[-1]
            assert isinstance(end, Finished)
            if policy == "recompute":
                assert (end.reason, end.output_tokens) == ("length", 4)
            else:
                assert answers == [end], "nothing is computed"
                assert (end.reason, end.transfer_failed) == ("error", True)
                assert end.error is not None
                port = prefill.ticket.port
                assert f"KV transfer t-a from 127.0.0.1:{port} failed (timeout: not complete" in end.error
                assert "send the request again" in end.error
            await eventually(d._is_idle)
            assert await d.runtime.call(is_whole)
            await eventually(p._is_idle)
            assert await p.runtime.call(is_whole)

    scenario(story)


def test_nodes_publish_their_transfers() -> None:
    async def series(node: PrefillNode | DecodeNode) -> set[str]:
        async with httpx.AsyncClient() as client:
            return set((await client.get(f"{node.runtime.service.url}/metrics")).text.splitlines())

    async def story() -> None:
        async with prefill_node() as (p_hub, p_node, p), decode_node() as (d_hub, d_node, d):
            prefill = prefill_of(p_node, "a")
            leg = d_hub.open(d_node, decode_of(d_node, "a", prefill.ticket, 28))
            assert isinstance(await answer(leg), Accepted)
            with standing_still(d):  # a fake engine reads no KV that came over the wire
                p_hub.open(p_node, prefill)
                await eventually(lambda: d._transfers[0] == 1)
                await eventually(p._is_idle)
                num_bytes = float(d._transfers[2])
                assert num_bytes > 0
                both = {"baton_kv_transfer_commits_total 1.0", "baton_kv_transfer_sessions 1.0"}
                on_d, on_p = await series(d), await series(p)
                assert both | {f"baton_kv_transfer_received_bytes_total {num_bytes}"} <= on_d
                assert both | {f"baton_kv_transfer_sent_bytes_total {num_bytes}"} <= on_p
                d_hub.send(d_node, Abort("a"))
                await eventually(lambda: d._decodes["a"].aborted)
            await eventually(d._is_idle)

    scenario(story)


def test_a_request_that_fails_with_its_transfer_leaves_blocks_in_quarantine_until_they_are_quiet() -> None:
    async def story() -> None:
        async with decode_node(policy="fail") as (hub, node, d):
            d.receiver = stuck = StuckReceiver(d.receiver)
            ticket = KVTicket(transfer_id="t", engine_id="p", host="127.0.0.1", port=9)
            leg = hub.open(node, decode_of(node, "a", ticket, 28, n=2))
            assert isinstance(await answer(leg), Accepted)
            stuck.go.set()
            end = await answer(leg)
            assert isinstance(end, Finished)
            assert end.transfer_failed
            assert d._is_idle()
            pool = d.runtime.built.engine.scheduler.kv.pools[0]
            assert pool.num_free == pool.num_usable == pool.num_blocks - 2, "the stuck block came back"
            stuck.end()
            await eventually(lambda: pool.num_free == pool.num_usable == pool.num_blocks - 1)

    scenario(story)


def test_an_abort_that_crosses_a_failing_request_is_the_only_answer() -> None:
    async def story() -> None:
        async with decode_node(policy="fail") as (hub, node, d):
            d.receiver = stuck = StuckReceiver(d.receiver)
            ticket = KVTicket(transfer_id="t", engine_id="p", host="127.0.0.1", port=9)
            leg = hub.open(node, decode_of(node, "a", ticket, 28))
            assert isinstance(await answer(leg), Accepted)
            with standing_still(d):
                stuck.go.set()
                await eventually(lambda: "t" in stuck.broken)
                hub.send(node, Abort("a"))
                await eventually(lambda: d._decodes["a"].aborted)
            end = await answer(leg)
            assert isinstance(end, Finished)
            assert (end.reason, end.transfer_failed) == ("abort", False)
            await asyncio.sleep(0.05)
            assert leg.ended
            stuck.end()
            await eventually(d._is_idle)

    scenario(story)


# ---- what else crosses ----------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [0, 31])
def test_a_cut_outside_the_prompt_is_refused_and_the_door_stays_open(cut: int) -> None:
    async def story() -> None:
        async with decode_node() as (hub, node, d):
            ticket = KVTicket(transfer_id="t", engine_id="p", host="127.0.0.1", port=9)
            refused = await answer(hub.open(node, decode_of(node, "a", ticket, cut)))
            assert isinstance(refused, Refused)
            assert f"cut {cut} is not inside a prompt of 30 tokens" in refused.reason
            assert isinstance(await answer(hub.open(node, decode_of(node, "b", None, 0))), Accepted)
            await eventually(d._is_idle)
            assert await d.runtime.call(is_whole)

    scenario(story)


def test_room_that_one_of_several_sequences_leaves_lets_the_next_request_in() -> None:
    async def story() -> None:
        async with decode_node(max_num_seqs=2) as (hub, node, d):
            run = d.runtime.built.engine.runner.run

            def slow(batch: ScheduledBatch) -> RunnerOutput:
                time.sleep(0.02)
                return run(batch)

            d.runtime.built.engine.runner.run = slow  # type: ignore[method-assign]
            seed, token = next(
                (seed, token)
                for seed in range(100)
                for token in continuation(range(30), 6, seed + 1)
                if token not in continuation(range(30), 60, seed)
            )
            sampling = SamplingParams(max_tokens=60, temperature=0.0, seed=seed, stop_token_ids=(token,))
            both = hub.open(node, DecodeRequest("both", list(range(30)), sampling, 2))
            assert isinstance(await answer(both), Accepted)
            ticket = KVTicket(transfer_id="t", engine_id="p", host="127.0.0.1", port=9)
            waiting = hub.open(node, decode_of(node, "w", ticket, 28))
            assert isinstance(await answer(waiting), Accepted)
            assert not both.ended

    scenario(story)


def test_a_request_that_is_given_up_ends_with_an_error_that_says_why() -> None:
    async def story() -> None:
        def shrink(engine: Engine) -> None:
            for pool in engine.scheduler.kv.pools:
                for block in pool.allocate(pool.num_free)[0]:
                    pool.quarantine(block)

        async with decode_node(num_blocks=20) as (hub, node, d):
            sampling = SamplingParams(max_tokens=40, temperature=0.0)
            with standing_still(d):
                leg = hub.open(node, DecodeRequest("a", list(range(30)), sampling))
                await eventually(lambda: len(d._admission) == 1)
                await asyncio.sleep(0.05)  # the queue has asked the engine: what follows comes behind that
                d.runtime.loop.call(lambda engine: engine.step())  # admits it, with its prompt's blocks
                d.runtime.loop.call(shrink)
            end = await answer(leg)
            while not isinstance(end, Finished):
                end = await answer(leg)
            assert (end.reason, end.error) == ("error", GIVEN_UP)
            await eventually(d._is_idle)

    scenario(story)


def test_a_node_that_closes_with_prefills_on_it_fails_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with prefill_node() as (hub, node, p):
            assert isinstance(await answer(hub.open(node, prefill_of(node, "a"))), Accepted)
            await eventually(lambda: p._prefills["a"].summary is not None)  # held, for a D that never comes
            started_s = time.monotonic()
        assert time.monotonic() - started_s < WAIT_S, "the drain has its deadline"
        await asyncio.sleep(0.05)
        assert p._is_idle()
        assert not [record for record in caplog.records if record.exc_info]

    scenario(story)


def test_a_transfer_port_in_use_is_named() -> None:
    async def story() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            options = NodeOptions(transfer_port=port)
            node = PrefillNode(PrefillConfig(transfer=TRANSFER, node=options), fake_built())
            with pytest.raises(ConfigError, match=rf"port {port} on 127\.0\.0\.1 .* --transfer-port"):
                await node.serve()
            await node.sender.close()
            node.runtime.publisher.close()

    scenario(story)


def test_figures_that_cannot_be_had_are_told(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with decode_node() as (_, _, d):
            d.runtime.transfer_load = lambda: (1, 2)  # type: ignore[assignment, return-value]
            await eventually(lambda: "figures cannot be had" in caplog.text)

    scenario(story)


def test_a_node_that_closes_while_it_receives_fails_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with decode_node() as (hub, node, d):
            d.receiver = StuckReceiver(d.receiver)
            ticket = KVTicket(transfer_id="t", engine_id="p", host="127.0.0.1", port=9)
            leg = hub.open(node, decode_of(node, "a", ticket, 28))
            assert isinstance(await answer(leg), Accepted)
        d.receiver.go.set()  # the transfer ends after the engine
        await asyncio.sleep(0.05)
        assert not [record for record in caplog.records if record.exc_info]

    scenario(story)


# ---- hand-over `carry`: P samples the first token -------------------------------------------------------


def test_a_prefill_that_samples_tells_its_token_and_ships_it() -> None:
    async def story() -> None:
        async with prefill_node() as (hub, node, p):
            receiver = KvReceiver(p.sender.pools, p.sender.fingerprint, TRANSFER)
            message = prefill_of(node, "a", 30, SamplingParams(max_tokens=4, temperature=0.0))
            leg = hub.open(node, message)
            chunk = await answer(leg)
            while isinstance(chunk, Accepted):
                chunk = await answer(leg)
            (token,) = continuation(range(30), 1)
            assert chunk == TokenChunk("a", (token,))
            result = await receiver.fetch(message.ticket, {0: {0: 1}}, 30)
            first = decode_first_token(result.extra)
            assert first is not None
            assert (first.token_id, list(first.drafts)) == (
                token,
                continuation([*range(30), token], NUM_MODULES),
            )
            assert len(result.carry) == len(ROW) * (NUM_MODULES - 1)
            end = await answer(leg)
            while not isinstance(end, Finished):
                end = await answer(leg)
            assert end.reason == "cut"
            await receiver.close()
            assert await p.runtime.call(is_whole)

    scenario(story)


def test_a_prefill_whose_token_ends_the_answer_ships_nothing_and_ends_with_the_abort() -> None:
    async def story() -> None:
        async with prefill_node() as (hub, node, p), decode_node() as (other_hub, other, _):
            onward = other_hub.open(other, decode_of(node, "a", None, 0))
            message = prefill_of(node, "a", 30, SamplingParams(max_tokens=1, temperature=0.0))
            with hub.open(node, message, onward=onward) as leg:
                end = await answer(leg)
                while not isinstance(end, Finished):
                    end = await answer(leg)
                assert (end.reason, end.prompt_tokens, end.output_tokens) == ("length", 30, 1)
                assert not leg.ended
                assert p.sender.num_held == 1
            await eventually(lambda: p.sender.num_held == 0)  # leaving the leg has aborted it
            await eventually(p._is_idle)
            assert await p.runtime.call(is_whole)
            onward.__exit__(None, None, None)

    scenario(story)


@pytest.mark.parametrize(("cut", "sampling"), [(30, None), (28, SamplingParams())])
def test_a_prefill_needs_sampling_parameters_exactly_for_a_whole_prompt(
    cut: int, sampling: SamplingParams | None
) -> None:
    async def story() -> None:
        async with prefill_node() as (hub, node, p):
            refused = await answer(hub.open(node, prefill_of(node, "a", cut, sampling)))
            assert isinstance(refused, Refused)
            assert f"cut {cut} is none of a prompt of 30 tokens with" in refused.reason
            assert await p.runtime.call(is_whole)

    scenario(story)


def test_several_sequences_do_not_share_one_first_token() -> None:
    async def story() -> None:
        async with decode_node() as (hub, node, _):
            ticket = KVTicket(transfer_id="t", engine_id="p", host="127.0.0.1", port=9)
            refused = await answer(hub.open(node, decode_of(node, "a", ticket, 30, n=2)))
            assert isinstance(refused, Refused)
            assert "2 sequences cannot share the first token" in refused.reason

    scenario(story)
