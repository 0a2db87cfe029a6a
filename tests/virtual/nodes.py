"""A prefill and a decode node around the real KvSender and KvReceiver: who owns which block, and no engine.

They follow `prefill_node/node.py` and `decode_node/node.py` in what they call and in when they free.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from common.errors import IncompatiblePeer, TransferFailed
from common.kv_ticket import KVTicket
from kv_transfer.config import TransferConfig
from kv_transfer.receiver import FetchResult, KvReceiver
from kv_transfer.sender import KvSender
from tests.virtual.lanes import FakeTransport
from tests.virtual.memory import BLOCK_SIZES, Memory, mark_of
from tests.virtual.world import World

PORT = 7000
CARRY_MARK = b"carry of "
NUM_BLOCKS = 48


@dataclass(frozen=True)
class Plan:
    """One transfer. Times in seconds from the start of the history."""

    number: int
    num_blocks: int  # of 16 tokens
    short_tokens: int  # the cut lies so far before the last block's end
    skip: frozenset[int]  # block positions that D has already, by tokens / 16
    ask_at: float
    offer_at: float
    piece: int  # blocks that become final at once
    piece_s: float
    ending: str = "finish"  # finish | cancel | stall | lose
    want_nothing: bool = False
    drop: bool = False  # D turns it away before admission
    aborts: tuple[float, ...] = ()  # seconds after `ask_at` at which D is told to abort
    cancel_at: float | None = None  # P is told to abort
    again: bool = False  # D fetches once more under the same id if the first ends badly, P offers again

    @property
    def name(self) -> str:
        return f"t{self.number}"

    @property
    def cut(self) -> int:
        return self.num_blocks * 16 - self.short_tokens

    def positions(self) -> dict[int, list[int]]:
        """Per group the block positions up to the cut."""
        return {g: list(range(-(-self.cut // size))) for g, size in enumerate(BLOCK_SIZES)}

    def wanted(self) -> dict[int, list[int]]:
        if self.want_nothing:
            return {0: [], 1: []}
        return {
            g: [p for p in positions if p * BLOCK_SIZES[g] // 16 not in self.skip]
            for g, positions in self.positions().items()
        }


class PrefillNode:
    def __init__(self, world: World, name: str, host: str, config: TransferConfig) -> None:
        self.process = world.start(name, host)
        self.memory = Memory(world.fabric, 2 * NUM_BLOCKS, world.random)
        self.config = config
        self.released: Counter[str] = Counter()
        self.offered: Counter[str] = Counter()
        self.sender: KvSender
        self._world = world
        self._owned: dict[str, tuple[str, dict[int, list[int]]]] = {}
        self.ready = False
        self.process.spawn(self._start())

    async def _start(self) -> None:
        self._lanes = FakeTransport(self.process)
        self.sender = KvSender(
            self.memory.pools,
            "fp",
            self.config,
            self._on_released,
            engine_id=self.process.host,
            transports={"fake": self._lanes},
            incarnation=self.process.name,
        )
        await self.sender.start(self.process.host, PORT)
        self.ready = True

    def ticket(self, name: str) -> KVTicket:
        """As the router writes it, before anybody has heard of the prompt."""
        return KVTicket(
            transfer_id=name,
            engine_id=self.process.host,
            host=self.process.host,
            port=PORT,
            incarnation=self.process.name,
        )

    async def prefill(self, plan: Plan) -> None:
        """Computes a prompt piece by piece and offers what is final."""
        name = plan.name
        if not self.ready or self.sender.find(name) is not None:
            return
        owner = f"{name}/{self.offered[name]}"
        generation = self.sender.offer(name).generation
        self.offered[name] += 1
        self._world.tell(f"{self.process.name} offers {name}, generation {generation}")
        positions = plan.positions()
        taken = self.memory.take({g: len(p) for g, p in positions.items()}, owner)
        if taken is None:
            self.sender.cancel(name, "no room on this node")
            return
        self._owned[name] = (owner, taken)
        end = 0
        while end < plan.num_blocks * 16:
            await asyncio.sleep(plan.piece_s)
            if self._owned.get(name, ("", {}))[0] != owner:
                return  # released meanwhile: the engine has ended the request
            start, end = end, min(end + plan.piece * 16, plan.num_blocks * 16)
            blocks: dict[int, dict[int, int]] = {}
            for g, size in enumerate(BLOCK_SIZES):
                last = plan.ending == "lose" and end == plan.num_blocks * 16
                blocks[g] = {
                    p: taken[g][p]
                    for p in positions[g]
                    if start < (p + 1) * size <= end or (end == plan.num_blocks * 16 and (p + 1) * size > end)
                    if not (last and p == positions[g][-1])
                }
                for p, block in blocks[g].items():
                    self.memory.fill(g, block, plan.number, generation, p)
            if not self.sender.extend(name, blocks, min(end, plan.cut)):
                return
        if plan.ending in ("finish", "lose"):
            self.sender.finish(name, carry_of(plan.number, generation), b"extra")
        elif plan.ending == "cancel":
            self.sender.cancel(name, "aborted by the router")

    async def abort(self, name: str) -> None:
        if self.ready:
            self.sender.cancel(name, "aborted by the router")

    def _on_released(self, name: str, reason: str) -> None:
        self.released[name] += 1
        self._world.tell(f"{self.process.name} has {name} back: {reason}")
        owner, taken = self._owned.pop(name, ("", {}))
        for g, ids in taken.items():
            self.memory.give_back(g, ids, owner)

    def check_send(self, view: memoryview) -> None:
        """I1, and the check of generation and lease that is due at every chunk."""
        mark = mark_of(view)
        if mark is None:
            return
        offer = self.sender.find(f"t{mark[0]}")
        where = f"{self.process.name} sends {mark}"
        if offer is None:
            self._world.problem(f"{where}, which is not held")
        elif offer.generation != mark[1]:
            self._world.problem(f"{where} of an earlier generation than {offer.generation}")
        elif self._world.now >= offer.deadline:
            self._world.problem(f"{where} though its lease ended at {offer.deadline:.4f}")

    async def close(self) -> None:
        await self.sender.close()


@dataclass
class Ended:
    """How a fetch ended, and when."""

    name: str
    what: str  # committed | failed | cancelled | refused | dropped
    reason: str
    seconds: float


class DecodeNode:
    def __init__(self, world: World, name: str, host: str, config: TransferConfig) -> None:
        self.process = world.start(name, host)
        self.memory = Memory(world.fabric, NUM_BLOCKS, world.random)
        self.config = config
        self.asked: Counter[str] = Counter()
        self.ended: list[Ended] = []
        self.receiver: KvReceiver
        self._world = world
        self._fetches: dict[str, asyncio.Task[None]] = {}
        self.quarantined: dict[tuple[int, int], str] = {}
        self.ready = False
        self.process.spawn(self._start())

    async def _start(self) -> None:
        self.receiver = KvReceiver(
            self.memory.pools,
            "fp",
            self.config,
            engine_id=self.process.host,
            transports={"fake": FakeTransport(self.process)},
            on_quiet=self._on_quiet,
        )
        self.ready = True

    def _on_quiet(self, blocks: Mapping[int, tuple[int, ...]]) -> None:
        for g, ids in blocks.items():
            for block in ids:
                self.memory.give_back(g, [block], self.quarantined.pop((g, block)))

    async def decode(self, plan: Plan, ticket: KVTicket) -> None:
        """Reserves everything, fetches, looks at what came, and gives the blocks back after a while."""
        name, started = plan.name, self._world.now
        if not self.ready or name in self._fetches:
            return
        self.asked[name] += 1
        owner = f"{name}/{self.asked[name]}"
        wanted = plan.wanted()
        if plan.drop:
            await self.receiver.drop(ticket)
            self._end(name, "dropped", "", started)
            return
        taken = self.memory.take({g: len(p) for g, p in wanted.items()}, owner)
        if taken is None:
            await self.receiver.drop(ticket)
            self._end(name, "refused", "no room", started)
            return
        want = {g: dict(zip(positions, taken[g], strict=True)) for g, positions in wanted.items()}
        task = asyncio.current_task()
        assert task is not None
        self._fetches[name] = task
        await self._fetch(plan, ticket, want, owner, started)
        del self._fetches[name]

    async def _fetch(
        self, plan: Plan, ticket: KVTicket, want: dict[int, dict[int, int]], owner: str, started: float
    ) -> None:
        name = plan.name
        progress: list[int] = []

        def on_progress(upto: int) -> None:
            progress.append(upto)
            self._check(plan, want, upto, f"after on_progress({upto})")

        quarantined: dict[int, tuple[int, ...]] = {}
        try:
            result = await self.receiver.fetch(ticket, want, plan.cut, on_progress)
        except TransferFailed as error:
            self._check(plan, want, error.final_upto, f"kept after {error.reason}")
            quarantined = error.quarantined
            what, reason = "failed", error.reason
            if error.final_upto != (progress[-1] if progress else 0):
                self._world.problem(f"{name}: final_upto {error.final_upto}, reported {progress}")
        except IncompatiblePeer as error:
            what, reason = "failed", error.message
        except asyncio.CancelledError:
            what, reason = "cancelled", ""
        else:
            what, reason = "committed", ""
            self._check_result(plan, want, result, progress)
        if progress != sorted(set(progress)):
            self._world.problem(f"{name}: progress goes {progress}")
        self._end(name, what, reason, started)
        for g, placed in want.items():
            stuck = set(quarantined.get(g, ()))
            self.quarantined |= {(g, block): owner for block in stuck}
            self.memory.give_back(g, [b for b in placed.values() if b not in stuck], owner)

    def _check(self, plan: Plan, want: dict[int, dict[int, int]], upto: int, when: str) -> int | None:
        """Every wanted block below ``upto`` is this transfer's, all of one generation. I3."""
        generation: int | None = None
        for g, placed in want.items():
            for position, block in placed.items():
                if position * BLOCK_SIZES[g] >= upto:
                    continue
                if (position + 1) * BLOCK_SIZES[g] > upto and upto < plan.cut:
                    continue
                mark = self.memory.holds(g, block)
                if generation is None and not isinstance(mark, str):
                    generation = mark[1]
                if mark != (plan.number, generation, g, position):
                    where = f"{self.process.name}: group {g}, position {position} of {plan.name}"
                    self._world.problem(f"{where} holds {mark} {when}")
        return generation

    def _check_result(
        self, plan: Plan, want: dict[int, dict[int, int]], result: FetchResult, progress: list[int]
    ) -> None:
        generation = self._check(plan, want, plan.cut, "at commit")
        good = {carry_of(plan.number, g) for g in ([generation] if generation else range(1, 100))}
        if result.carry not in good or result.extra != b"extra":
            self._world.problem(f"{plan.name} committed with carry {result.carry!r}, extra {result.extra!r}")
        if not progress or progress[-1] != plan.cut:
            self._world.problem(f"{plan.name} committed at {plan.cut} and reported {progress}")

    def _end(self, name: str, what: str, reason: str, started: float) -> None:
        self.ended.append(Ended(name, what, reason, self._world.now - started))
        self._world.tell(f"{self.process.name}: {name} {what} {reason}")

    async def abort(self, name: str) -> None:
        task = self._fetches.get(name)
        if task is not None:
            task.cancel()

    def ended_as(self, name: str) -> list[Ended]:
        return [end for end in self.ended if end.name == name]

    @property
    def num_fetching(self) -> int:
        return len(self._fetches)

    async def close(self) -> None:
        await self.receiver.close()


def carry_of(number: int, generation: int) -> bytes:
    return CARRY_MARK + f"{number}/{generation}".encode()
