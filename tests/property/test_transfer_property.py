"""Random histories of offer, ask, extend, finish, cancel, drop, damage and expiry over an in-process
transport.

Whatever the order: one outcome per fetch, right bytes, untouched neighbours, ``on_released`` once per offer.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import TransferFailed
from common.kv_ticket import KVTicket
from kv_transfer.config import TransferConfig
from kv_transfer.receiver import FetchResult, KvReceiver
from kv_transfer.sender import KvSender
from tests.fakes_transfer import BLOCK_SIZE, FakeNetwork, FakeTransport, fill, holds_pattern, make_pools

NUM_BLOCKS = 48
GUARD = 0xA5
CONFIG = TransferConfig(
    chunk_bytes=3 * 8192,
    window_chunks=2,
    heartbeat_s=0.05,
    suspect_s=5.0,
    dead_s=10.0,
    connect_timeout_s=5.0,
    fetch_timeout_s=5.0,
    lease_s=0.15,
)


@dataclass(frozen=True)
class Plan:
    """One transfer's history: delays in milliseconds before each act of P and of D."""

    num_positions: int
    skip: frozenset[int]  # positions that D has already
    want_nothing: bool
    offer_ms: int
    piece: int  # blocks per extend
    extend_ms: int
    ending: str  # finish | cancel | vanish | lose_block
    ask_ms: int
    d_act: str  # fetch | cancel | drop
    d_after_ms: int
    damage: bool
    order: int  # seed of block placement


plans = st.builds(
    Plan,
    num_positions=st.integers(1, 10),
    skip=st.frozensets(st.integers(0, 9), max_size=4),
    want_nothing=st.sampled_from([False, False, False, True]),
    offer_ms=st.integers(0, 8),
    piece=st.integers(1, 5),
    extend_ms=st.integers(0, 3),
    ending=st.sampled_from(["finish", "finish", "finish", "cancel", "vanish", "lose_block"]),
    ask_ms=st.integers(0, 8),
    d_act=st.sampled_from(["fetch", "fetch", "fetch", "cancel", "drop"]),
    d_after_ms=st.integers(0, 12),
    damage=st.sampled_from([False, False, False, True]),
    order=st.integers(0, 1000),
)


@dataclass
class Outcome:
    result: FetchResult | None = None
    error: TransferFailed | None = None
    cancelled: bool = False
    progress: list[int] = field(default_factory=list)


async def prefill(sender: KvSender, seed: int, plan: Plan, ids: list[int], offered: list[str]) -> None:
    name = f"t{seed}"
    await asyncio.sleep(plan.offer_ms / 1000)
    sender.offer(name)
    offered.append(name)
    positions = list(range(plan.num_positions))
    for start in range(0, len(positions), plan.piece):
        await asyncio.sleep(plan.extend_ms / 1000)
        part = positions[start : start + plan.piece]
        if plan.ending == "lose_block":
            part = [p for p in part if p != plan.num_positions - 1]
        blocks = {g: {p: ids[p] for p in part} for g in (0, 1)}
        fill(sender.pools, seed, blocks)
        sender.extend(name, blocks, min(start + plan.piece, plan.num_positions) * BLOCK_SIZE)
    if plan.ending in ("finish", "lose_block"):
        sender.finish(name, b"carry" + bytes([seed]), b"extra")
    elif plan.ending == "cancel":
        sender.cancel(name, "cancelled by the test")


async def decode(
    receiver: KvReceiver, network: FakeNetwork, ticket: KVTicket, plan: Plan, want: dict[int, dict[int, int]]
) -> Outcome:
    outcome = Outcome()
    await asyncio.sleep(plan.ask_ms / 1000)
    if plan.d_act == "drop":
        await receiver.drop(ticket)
        outcome.cancelled = True
        return outcome
    cut = plan.num_positions * BLOCK_SIZE - 3
    task = asyncio.create_task(receiver.fetch(ticket, want, cut, outcome.progress.append))
    if plan.damage:
        network.damage_next = True
    if plan.d_act == "cancel" or plan.ending == "vanish":  # P never ends: D must, or wait for its deadline
        await asyncio.sleep(plan.d_after_ms / 1000)
        task.cancel()
    try:
        outcome.result = await task
    except TransferFailed as error:
        outcome.error = error
    except asyncio.CancelledError:
        outcome.cancelled = True
    return outcome


async def history(all_plans: list[Plan], seed: int) -> None:
    network = FakeNetwork(seed)
    transports = [FakeTransport(network), FakeTransport(network)]
    released: Counter[str] = Counter()
    sender = KvSender(
        make_pools(NUM_BLOCKS),
        "fp",
        CONFIG,
        lambda name, _: released.update([name]),
        engine_id="P",
        transports={"fake": transports[0]},
    )
    await sender.start("127.0.0.1")
    receiver = KvReceiver(make_pools(NUM_BLOCKS), "fp", CONFIG, transports={"fake": transports[1]})
    for pool in receiver.pools.groups:
        pool.array_NB[:] = GUARD
    ids = list(range(NUM_BLOCKS))
    network.random.shuffle(ids)
    offered: list[str] = []
    prefills: list[asyncio.Task[None]] = []
    decodes: list[asyncio.Task[Outcome]] = []
    wants: list[dict[int, dict[int, int]]] = []
    for i, plan in enumerate(all_plans):
        own = ids[i * 12 : i * 12 + plan.num_positions]
        if plan.order % 2:
            own.sort()
        positions = [] if plan.want_nothing else [p for p in range(plan.num_positions) if p not in plan.skip]
        want = {g: {p: own[p] for p in positions} for g in (0, 1)}
        wants.append(want)
        host, port = sender.address
        ticket = KVTicket(transfer_id=f"t{i}", engine_id="P", host=host, port=port)
        prefills.append(asyncio.create_task(prefill(sender, i, plan, own, offered)))
        decodes.append(asyncio.create_task(decode(receiver, network, ticket, plan, want)))
    outcomes = await asyncio.gather(*decodes)
    await asyncio.gather(*prefills)

    for i, (plan, outcome, want) in enumerate(zip(all_plans, outcomes, wants, strict=True)):
        assert sum((outcome.result is not None, outcome.error is not None, outcome.cancelled)) == 1
        assert outcome.progress == sorted(set(outcome.progress))
        kept = 0
        if outcome.result is not None:
            assert outcome.result.carry == b"carry" + bytes([i])
            assert plan.ending in ("finish", "lose_block")
            assert outcome.progress[-1] == plan.num_positions * BLOCK_SIZE - 3
            kept = plan.num_positions * BLOCK_SIZE
        elif outcome.error is not None:
            assert outcome.error.quarantined == {}
            kept = outcome.error.final_upto
        for group, placed in want.items():
            for position, block_id in placed.items():
                if (position + 1) * BLOCK_SIZE <= kept:
                    assert holds_pattern(receiver.pools, i, group, position, block_id), (i, group, position)
        if plan.d_act == "fetch" and plan.ending == "finish" and not any(p.damage for p in all_plans):
            assert outcome.result is not None, outcome.error
    used = {block_id for want in wants for placed in want.values() for block_id in placed.values()}
    for pool in receiver.pools.groups:
        for block_id in set(range(NUM_BLOCKS)) - used:
            assert (pool.array_NB[block_id] == GUARD).all(), "a block that nobody asked for was written"

    async with asyncio.timeout(5):
        while sender.num_held:  # commits on their way, leases that run out
            await asyncio.sleep(0.01)
    assert released == Counter(offered)
    assert receiver.quarantined == {}
    await receiver.close()
    await sender.close()
    assert released == Counter(offered)
    assert all(lane.num_pending == 0 for t in transports for lane in t.lanes)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(all_plans=st.lists(plans, min_size=1, max_size=4), seed=st.integers(0, 10_000))
def test_any_history_has_one_outcome_and_right_bytes(all_plans: list[Plan], seed: int) -> None:
    asyncio.run(history(all_plans, seed))
