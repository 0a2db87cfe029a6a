"""Transfers between nodes whose blocks differ in size and whose ranks hold different heads, through the real
sender and receiver over an in-process transport."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from common.errors import IncompatiblePeer, TransferFailed
from kv_transfer.config import TransferConfig
from kv_transfer.geometry import sources
from kv_transfer.plan import KvPools
from kv_transfer.receiver import KvReceiver
from kv_transfer.sender import KvSender
from tests.fakes_sharded import CUT, STATE_BYTES, check, compute, ids_of, make_pools
from tests.fakes_transfer import FakeNetwork, FakeTransport

CONFIG = TransferConfig(chunk_bytes=4096, window_chunks=3, heartbeat_s=0.05, fetch_timeout_s=10.0)


class Prefill:
    """A rank of P that computes the prompt's first ``CUT`` positions."""

    def __init__(
        self, network: FakeNetwork, block_size: int, num_heads: int, rank: int = 0, size: int = 1
    ) -> None:
        self.released: list[str] = []
        self.sender = KvSender(
            make_pools(block_size, num_heads, rank, size), "fp", CONFIG,
            lambda name, reason: self.released.append(reason),
            engine_id=f"P{rank}", transports={"fake": FakeTransport(network)},
        )  # fmt: skip

    def compute(self, upto: int, *, first: int = 0, leave_out: int = -1) -> None:
        """Blocks that end in positions first+1 .. upto, and the partial one in which the prompt ends."""
        placed = compute(self.sender.pools, upto, first=first, leave_out=leave_out)
        self.sender.pools.groups[2].array_NB[5] = np.arange(STATE_BYTES)
        state = {2: {2: 5}} if upto == CUT else {}
        assert self.sender.extend("t", {0: placed, 1: placed, **state}, upto)


@asynccontextmanager
async def prefills(
    block_size: int, num_heads: int, size: int, network: FakeNetwork
) -> AsyncIterator[list[Prefill]]:
    nodes = [Prefill(network, block_size, num_heads, rank, size) for rank in range(size)]
    async with AsyncExitStack() as stack:
        for node in nodes:
            await node.sender.start("127.0.0.1")
            stack.push_async_callback(node.sender.close)
        yield nodes


@asynccontextmanager
async def decode(network: FakeNetwork, pools: KvPools, chunk_bytes: int = 4096) -> AsyncIterator[KvReceiver]:
    config = replace(CONFIG, chunk_bytes=chunk_bytes)
    receiver = KvReceiver(pools, "fp", config, transports={"fake": FakeTransport(network)})
    try:
        yield receiver
    finally:
        await receiver.close()


def run(story: Awaitable[None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await story

    asyncio.run(bounded())


@pytest.mark.parametrize(
    ("num_heads", "p_size", "d_size"), [(8, 1, 1), (8, 1, 2), (8, 4, 2), (2, 2, 1), (2, 4, 4), (1, 4, 2)]
)
@pytest.mark.parametrize(("p_block", "d_block"), [(16, 32), (32, 16), (16, 16)])
def test_every_rank_gets_its_heads_from_blocks_of_another_size(
    p_block: int, d_block: int, num_heads: int, p_size: int, d_size: int
) -> None:
    async def story() -> None:
        network = FakeNetwork(seed=num_heads)
        async with prefills(p_block, num_heads, p_size, network) as nodes:
            for rank in range(d_size):
                pools = make_pools(d_block, num_heads, rank, d_size)
                ids = {p: b for p, b in ids_of(d_block, 1).items() if p > 0}  # the first block is a hit
                want = {0: ids, 1: ids, 2: {2: 6}}
                async with decode(network, pools) as receiver:
                    asked = [nodes[r] for r in sources(num_heads, p_size, rank, d_size)]
                    progress: list[list[int]] = [[] for _ in asked]
                    fetches = [
                        asyncio.create_task(receiver.fetch(node.sender.offer("t"), want, CUT, seen.append))
                        for node, seen in zip(asked, progress, strict=True)
                    ]
                    for node in asked:  # D's block may wait for a later step of P
                        node.compute(80)
                    await asyncio.sleep(0.01)
                    for node in asked:
                        node.compute(CUT, first=80)
                        node.sender.finish("t", b"row")
                    results = await asyncio.gather(*fetches)
                    assert [result.carry for result in results] == [b"row"] * len(asked)
                    kv_bytes = sum(len(ids) * pool.block_bytes for pool in pools.groups[:2])
                    assert sum(result.num_bytes for result in results) == kv_bytes + STATE_BYTES * len(asked)
                    assert all(seen[-1] == CUT and seen == sorted(set(seen)) for seen in progress)
                    check(pools, want)
                    assert (pools.groups[2].array_NB[6] == np.arange(STATE_BYTES)).all()
                for node in asked:
                    assert node.released.pop() == "committed"

    run(story())


@pytest.mark.parametrize(("p_block", "d_block"), [(16, 32), (32, 16)])
def test_blocks_arrive_as_soon_as_both_sizes_are_final(p_block: int, d_block: int) -> None:
    async def story() -> None:
        network = FakeNetwork()
        async with prefills(p_block, 2, 1, network) as (node,):
            pools = make_pools(d_block, 2)
            want = {0: ids_of(d_block, 1), 1: ids_of(d_block, 1)}
            progress: list[int] = []
            async with decode(network, pools, chunk_bytes=1) as receiver:
                fetch = asyncio.create_task(
                    receiver.fetch(node.sender.offer("t"), want, CUT, progress.append)
                )
                whole_blocks = 112 // p_block * p_block
                node.compute(whole_blocks)
                async with asyncio.timeout(5):
                    while not progress or progress[-1] < whole_blocks // d_block * d_block:
                        await asyncio.sleep(0.001)
                await asyncio.sleep(0.01)
                assert progress[-1] == whole_blocks // d_block * d_block == 96
                node.compute(CUT, first=whole_blocks)
                assert not fetch.done()  # P has not said yet that this is the end
                node.sender.finish("t", b"row")
                await fetch
            check(pools, want)

    run(story())


def test_a_block_that_is_not_whole_on_the_prefill_node_fails_by_name() -> None:
    """Zeros in place of half a block would be found by its hash one day."""

    async def story() -> None:
        network = FakeNetwork()
        async with prefills(16, 2, 1, network) as (node,), decode(network, make_pools(32, 2)) as receiver:
            ticket = node.sender.offer("t")
            node.compute(CUT, leave_out=4)
            node.sender.finish("t", b"row")
            with pytest.raises(TransferFailed, match="not hold the wanted block at position 4 of group 0"):
                await receiver.fetch(ticket, {0: {2: 1, 3: 2}}, CUT)

    run(story())


@pytest.mark.parametrize(
    ("theirs", "why"),
    [
        (make_pools(24, 2), "KV group 0: block_size is 16 and 24; one must be a multiple of the other"),
        (make_pools(16, 4), "KV group 0: num_kv_heads is 2 and 4"),
        (make_pools(16, 2, rank=3, size=4), "rank 0 of 2 has no KV head that it gives to rank 3 of 4"),
    ],
)
def test_a_pair_that_cannot_be_mapped_is_refused_by_name(theirs: KvPools, why: str) -> None:
    async def story() -> None:
        network = FakeNetwork()
        async with prefills(16, 2, 2, network) as (node, _), decode(network, theirs) as receiver:
            with pytest.raises(IncompatiblePeer, match=why):
                await receiver.fetch(node.sender.offer("t"), {}, CUT)
            assert node.sender.num_held == 1

    run(story())


def test_another_layout_version_is_refused_by_name() -> None:
    async def story() -> None:
        network = FakeNetwork()
        async with prefills(16, 2, 1, network) as (node,), decode(network, make_pools(16, 2)) as receiver:
            ours = {"kv_dtype": "float32", "kv_layout_version": "1", "model": "m"}
            node.sender.fingerprint = msgspec.json.encode(ours).decode()
            receiver.fingerprint = msgspec.json.encode({**ours, "kv_layout_version": "2"}).decode()
            with pytest.raises(IncompatiblePeer) as refused:
                await receiver.fetch(node.sender.offer("t"), {}, CUT)
            assert refused.value.message.endswith("differ: kv_layout_version is '1' and '2'")

    run(story())
