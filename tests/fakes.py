"""A runner without a model: deterministic tokens, scripted drafts, and a symbolic copy of the KV.

Every slot remembers what it was computed from: the trunk's slot a digest of the tokens up to its position,
module m's slot a digest of the tokens up to p+m+1, a block of recurrent state its position and a digest of
the tokens before. So each step can check that whatever the scheduler lets a request read (hits, forks,
received blocks, checkpoints, what a window kept) is exactly what that request needs.
"""

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from common.block_hash import BlockHasher
from common.engine.batch import RequestOutput, RunnerOutput, ScheduledBatch, ScheduledRequest
from common.engine.engine import Engine
from common.engine.rules import SchedulerConfig
from common.engine.scheduler import Scheduler
from common.engine.speculation import multi_module
from common.engine.stopping import StopChecker
from common.kv_cache.layout import NULL_BLOCK, KVLayout, RecurrentLayer, build_layout
from common.kv_cache.manager import KVCacheManager
from common.request import Request, SamplingParams

VOCAB = 50
ROW = b"rows"  # a carry row's stand-in: one float32

DraftRule = Callable[[str, int, int], int]
"""(request id, position, the token that will come there) -> the draft."""


def right(request_id: str, position: int, token: int) -> int:
    return token


def wrong_at(positions: Collection[int]) -> DraftRule:
    """Right everywhere but at these positions."""
    return lambda request_id, position, token: token + 1 if position in positions else token


def sometimes_right(seed: int, rate: float) -> DraftRule:
    def rule(request_id: str, position: int, token: int) -> int:
        # A new opinion every time: what is proposed for a position may change between steps.
        return token if generator.random() < rate else (token + 1) % VOCAB

    generator = random.Random(seed)
    return rule


def chain(tokens: Sequence[int]) -> list[int]:
    """A digest of every prefix: element i stands for tokens 0..i."""
    digests: list[int] = []
    last = 17
    for token in tokens:
        last = hash((last, token))
        digests.append(last)
    return digests


def next_token(tokens: Sequence[int], seed: int | None = None) -> int:
    """What the fake model says after ``tokens``; sequences of one prompt differ by their seed."""
    return hash((chain(tokens)[-1], seed or 0)) % VOCAB


def continuation(tokens: Sequence[int], count: int, seed: int | None = None) -> list[int]:
    known = list(tokens)
    for _ in range(count):
        known.append(next_token(known, seed))
    return known[len(tokens) :]


@dataclass(frozen=True)
class Slot:
    """``modules[m]`` None: never written."""

    trunk: int
    modules: tuple[int | None, ...]


class FakeRunner:
    """Implements `Runner`. ``batches`` are the steps it was given."""

    def __init__(self, layout: KVLayout, num_modules: int, draft_rule: DraftRule = right) -> None:
        self.layout = layout
        self.num_modules = num_modules
        self.draft_rule = draft_rule
        self.batches: list[ScheduledBatch] = []
        self.kv: KVCacheManager | None = None  # set: writes to registered blocks are caught
        self._slots: list[dict[tuple[int, int], Slot]] = [{} for _ in layout.kv_groups]
        self._states: dict[int, tuple[int, int]] = {}  # block -> (positions it stands after, digest)
        self._carry_rows: dict[str, int] = {}

    def run(self, batch: ScheduledBatch) -> RunnerOutput:
        self.batches.append(batch)
        for request_id in batch.forgotten:
            self._carry_rows.pop(request_id, None)
        for copy in batch.copies:
            slots, size = self._slots[copy.group], self.layout.groups[copy.group].block_size
            for offset in range(size):
                if (copy.source, offset) in slots:
                    slots[copy.destination, offset] = slots[copy.source, offset]
        for entry in batch.entries:  # all reads first: nobody may count on what this very step writes
            self._check_reads(entry)
        self._check_writes(batch)
        return RunnerOutput(tuple(self._run_one(entry) for entry in batch.entries))

    def carry_rows(self, request_id: str, at_most: int | None = None) -> bytes | None:
        rows = self._carry_rows.get(request_id, 0)
        return ROW * (rows if at_most is None else min(rows, at_most)) or None

    def receive(self, blocks: Mapping[int, Mapping[int, int]], tokens: Sequence[int], upto: int) -> None:
        """What a transfer would write: positions below ``upto`` of a prompt, unknown tokens left out."""
        digests = chain(tokens)
        for g, placed in blocks.items():
            size = self.layout.groups[g].block_size
            for i, block in placed.items():
                if g == len(self._slots):  # its running state at ``upto``, or a checkpoint before
                    after = min((i + 1) * size, upto)
                    self._states[block] = (after, digests[after - 1] if after else 0)
                    continue
                for p in range(i * size, min(upto, (i + 1) * size)):
                    self._slots[g][block, p % size] = Slot(digests[p], self._exact(digests, p))

    def _exact(self, digests: Sequence[int], p: int) -> tuple[int | None, ...]:
        reads = range(p + 1, p + 1 + self.num_modules)
        return tuple(digests[r] if r < len(digests) else None for r in reads)

    def _first_row(self, start: int, exact_upto: int) -> int:
        return max(0, min(start, exact_upto + 1 - self.num_modules))

    def _check_reads(self, entry: ScheduledRequest) -> None:
        assert entry.num_new >= 1, f"{entry.request_id} has nothing to compute"
        assert entry.start + entry.num_new <= len(entry.known)
        digests = chain(entry.known)
        first_row = self._first_row(entry.start, len(entry.known) - 1)
        carry = entry.handover_carry
        rows = self._carry_rows.get(entry.request_id, 0) if carry is None else len(carry) // len(ROW)
        assert entry.start - first_row <= rows, f"{entry.request_id} starts without its carry"
        self._check_state(entry, digests)
        for g, group in enumerate(self.layout.kv_groups):
            modules = [layer - self.layout.num_layers for layer in group.layers]
            if any(m < 0 for m in modules):
                for p in _seen(entry.start, group.window):
                    assert self._at(g, entry, p).trunk == digests[p], f"{entry.request_id}: trunk slot {p}"
            for m in (m for m in modules if m >= 0):
                for p in _seen(first_row, group.window):
                    found = self._at(g, entry, p).modules[m]
                    assert found == digests[p + m + 1], f"{entry.request_id}: module {m} slot {p}"

    def _at(self, g: int, entry: ScheduledRequest, p: int) -> Slot:
        size = self.layout.groups[g].block_size
        block = entry.tables[g][p // size]
        assert block != NULL_BLOCK, f"{entry.request_id} needs position {p} of group {g}, which is gone"
        return self._slots[g][block, p % size]

    def _check_state(self, entry: ScheduledRequest, digests: Sequence[int]) -> None:
        state, start = self.layout.state_group, entry.start
        if state is not None and start:
            block = entry.tables[-1][(start - 1) // state.block_size]
            found = self._states.get(block)
            assert found == (start, digests[start - 1]), f"{entry.request_id}: state at {start} is {found}"

    def _write_states(self, entry: ScheduledRequest, digests: Sequence[int], end: int) -> None:
        """The running state after ``end`` positions, and the checkpoints that were passed."""
        state = self.layout.state_group
        if state is None:
            return
        size = state.block_size
        for after in (*range((entry.start // size + 1) * size, end, size), end):
            self._states[entry.tables[-1][(after - 1) // size]] = (after, digests[after - 1])

    def _check_writes(self, batch: ScheduledBatch) -> None:
        for g, group in enumerate(self.layout.groups):
            size = group.block_size
            writer: dict[int, str] = {}
            registered = set(self.kv.pools[g].registered().values()) if self.kv is not None else set()
            for entry in batch.entries:
                for i in range(entry.start // size, (entry.end - 1) // size + 1):
                    block = entry.tables[g][i]
                    assert block != NULL_BLOCK, f"{entry.request_id} has no block for {i * size}"
                    assert block not in registered, f"{entry.request_id} writes to a registered block"
                    assert writer.setdefault(block, entry.request_id) == entry.request_id

    def _run_one(self, entry: ScheduledRequest) -> RequestOutput:
        n, start, known = self.num_modules, entry.start, list(entry.known)
        before = len(known) - 1
        seed = entry.sampling.seed
        self._write_trunk(entry, [*known, *entry.drafts])
        tokens: list[int] = []
        if entry.samples:
            for draft in (*entry.drafts, None):
                tokens.append(next_token([*known, *tokens], seed))
                if draft != tokens[-1]:
                    break
        accepted = max(0, len(tokens) - 1)
        known += tokens
        end = start + entry.num_new + accepted
        self._write_states(entry, chain(known), end)
        rows = end - self._first_row(start, before + accepted)
        rows += self._carry_rows.get(entry.request_id, 0)
        self._carry_rows[entry.request_id] = min(max(0, n - 1), rows)
        drafts: tuple[int, ...] = ()
        if entry.samples:
            coming = continuation(known, n, seed)
            drafts = tuple(
                self.draft_rule(entry.request_id, len(known) + m, token) for m, token in enumerate(coming)
            )
        self._write_modules(entry, chain([*known, *drafts]), before + accepted, end)
        return RequestOutput(tuple(tokens), accepted, drafts)

    def _write_trunk(self, entry: ScheduledRequest, tokens: Sequence[int]) -> None:
        digests = chain(tokens)
        for g, slots in enumerate(self._slots):
            size = self.layout.groups[g].block_size
            for p in range(entry.start, entry.end):
                empty: tuple[int | None, ...] = (None,) * self.num_modules
                slots[entry.tables[g][p // size], p % size] = Slot(digests[p], empty)

    def _write_modules(
        self, entry: ScheduledRequest, digests: Sequence[int], exact_upto: int, end: int
    ) -> None:
        """Rows F .. end-1 after the step, as 02-exactness 1 says; ``digests`` are of all known tokens
        and the new drafts (a slot written from one is right once that draft is accepted)."""
        for g, slots in enumerate(self._slots):
            size = self.layout.groups[g].block_size
            if self.layout.groups[g].layers[-1] < self.layout.num_layers:
                continue  # no module here
            for p in range(self._first_row(entry.start, exact_upto), end):
                where = (entry.tables[g][p // size], p % size)
                values = list(slots[where].modules)
                for m in range(self.num_modules):
                    reads = p + m + 1
                    if p < entry.start and reads <= exact_upto:
                        continue
                    if reads < len(digests):
                        values[m] = digests[reads]
                slots[where] = Slot(slots[where].trunk, tuple(values))


def _seen(position: int, window: int | None) -> range:
    """Positions before ``position`` that it attends to."""
    return range(0 if window is None else max(0, position - window + 1), position)


def make_fake_engine(
    num_modules: int = 0,
    *,
    windows: Sequence[int | None] = (None,),
    module_windows: Sequence[int | None] | None = None,
    num_blocks: int = 64,
    block_size: int = 4,
    budget: int = 64,
    threshold: int = 0,
    max_num_seqs: int = 16,
    max_model_len: int = 200,
    prefix_caching: bool = True,
    draft_rule: DraftRule = right,
    stop_checker: Callable[[Request], StopChecker] = StopChecker,
    state_block_size: int = 0,
) -> tuple[Engine, FakeRunner]:
    """``num_blocks`` usable blocks a group; ``windows`` of the trunk's layers; with ``state_block_size`` it
    has a recurrent layer more."""
    if module_windows is None:
        module_windows = (None,) * num_modules
    layout = build_layout(
        windows,
        module_windows,
        block_size=block_size,
        num_kv_heads=1,
        head_dim=1,
        dtype="float32",
        recurrent_layers=(RecurrentLayer(len(windows), (1, 1)),) if state_block_size else (),
        state_block_size=state_block_size,
    )
    sizes = [num_blocks + 1] * len(layout.groups)
    kv = KVCacheManager(layout, sizes, BlockHasher(block_size, num_modules), prefix_caching)
    config = SchedulerConfig(budget, max_num_seqs, max_model_len, multi_module(num_modules), threshold)
    runner = FakeRunner(layout, num_modules, draft_rule)
    runner.kv = kv
    return Engine(Scheduler(config, kv, stop_checker), runner), runner


def make_kv(
    num_modules: int = 0,
    *,
    windows: Sequence[int | None] = (None,),
    module_windows: Sequence[int | None] | None = None,
    num_blocks: int = 64,
    block_size: int = 4,
    state_block_size: int = 0,
) -> KVCacheManager:
    engine, _ = make_fake_engine(
        num_modules,
        windows=windows,
        module_windows=module_windows,
        num_blocks=num_blocks,
        block_size=block_size,
        state_block_size=state_block_size,
    )
    return engine.scheduler.kv


def fake_request(
    tokens: Sequence[int],
    max_tokens: int = 8,
    *,
    request_id: str = "r",
    seed: int | None = None,
    stop_at: int | None = None,
    hold_blocks: bool = False,
    num_sequences: int = 1,
    priority: int = 0,
    arrival: float = 0.0,
    stop_token_ids: tuple[int, ...] = (),
) -> Request:
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=0.0, seed=seed, stop_token_ids=stop_token_ids
    )
    return Request(
        request_id,
        list(tokens),
        sampling,
        stop_at=stop_at,
        hold_blocks=hold_blocks,
        num_sequences=num_sequences,
        priority=priority,
        arrival_time_s=arrival,
    )


def outputs_of(request: Request) -> list[int]:
    return request.token_ids[request.num_prompt_tokens :]


def is_whole(engine: Engine) -> bool:
    """No request left, every block free."""
    scheduler = engine.scheduler
    return not scheduler.requests and all(p.num_free == p.num_blocks - 1 for p in scheduler.kv.pools)
