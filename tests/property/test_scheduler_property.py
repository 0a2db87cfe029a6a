"""The scheduler under random requests, aborts, small pools, hand-overs, forks and holds, on a fake runner.

The fake checks every read against what the slot was computed from; here the tokens are compared with what
the fake's function says, `check_invariants()` runs after every step, and in the end the pool is whole.
"""

import random
from dataclasses import dataclass, field

import pytest

from common.engine.engine import Engine
from common.engine.first_token import FirstToken
from common.errors import CapacityError, PromptTooLong
from common.kv_events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored
from common.request import FinishReason, Request, RequestState
from router.policy import cut_of
from tests.fakes import (
    ROW,
    VOCAB,
    FakeRunner,
    continuation,
    fake_request,
    is_whole,
    make_fake_engine,
    sometimes_right,
)

MAX_STEPS = 3000


@dataclass
class World:
    """One run: an engine, what was asked of it, and what its events say the cache holds."""

    rng: random.Random
    engine: Engine
    runner: FakeRunner
    num_modules: int
    originals: list[Request] = field(default_factory=list)
    receiving: dict[str, int] = field(default_factory=dict)  # request id -> cut
    quarantined: list[tuple[int, int]] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)
    ended: dict[str, FinishReason] = field(default_factory=dict)
    emitted: dict[str, list[int]] = field(default_factory=dict)
    announced: list[set[BlockHash]] = field(default_factory=list)
    cached: list[set[BlockHash]] = field(default_factory=list)
    count: int = 0

    def prompt(self) -> list[int]:
        """Few different beginnings, so that prompts share prefixes and blocks."""
        base = continuation([self.rng.randrange(3)], 40)
        tokens = base[: self.rng.randint(1, 40)]
        tokens += [self.rng.randrange(VOCAB) for _ in range(self.rng.choice((0, 0, 1, 2, 5)))]
        if self.originals and self.rng.random() < 0.3:  # a further turn
            tokens = [*self.rng.choice(self.originals).token_ids, *tokens][:48]
        return tokens

    def new_request(self) -> Request:
        self.count += 1
        rng = self.rng
        num_sequences = rng.choice((1, 1, 1, 2, 3))
        request = fake_request(
            self.prompt(),
            rng.randint(1, 20),
            request_id=f"r{self.count}",
            seed=rng.choice((None, 100 * self.count)) if num_sequences == 1 else 100 * self.count,
            num_sequences=num_sequences,
            priority=rng.choice((0, 0, 1)),
            arrival=float(self.count),
            stop_token_ids=(rng.randrange(VOCAB),) if rng.random() < 0.3 else (),
        )
        self.originals.append(request)
        return request

    def act(self) -> None:
        kinds = (self.add, self.add, self.hold, self.reserve, self.reserve, self.arrive, self.arrive)
        self.rng.choice((*kinds, self.abort, self.release))()
        self.engine.check_invariants()

    def add(self) -> None:
        request = self.new_request()
        try:
            self.engine.add(request)
        except PromptTooLong:
            self.originals.remove(request)

    def hold(self) -> None:
        """A prefill to its cut, or a decode whose blocks are kept."""
        request = self.new_request()
        request.num_sequences, request.hold_blocks = 1, True
        if self.rng.random() < 0.8:
            request.stop_at = self.cut_of(request) or request.num_tokens
        self.originals.remove(request)
        try:
            self.engine.add(request)
        except PromptTooLong:
            return

    def cut_of(self, request: Request) -> int | None:
        """That of either hand-over."""
        carry = request.num_sequences == 1 and self.rng.random() < 0.4
        return request.num_tokens if carry else cut_of(request.num_tokens, self.num_modules)

    def reserve(self) -> None:
        request = self.new_request()
        cut = self.cut_of(request)
        try:
            if cut is None:
                self.engine.add(request)
                return
            free = [p.num_free for p in self.engine.scheduler.kv.pools]
            self.engine.reserve(request, cut)
            self.receiving[request.request_id] = cut
        except PromptTooLong:
            self.originals.remove(request)
        except CapacityError:
            assert free == [p.num_free for p in self.engine.scheduler.kv.pools]
            self.originals.remove(request)

    def arrive(self) -> None:
        """The KV of one reservation arrives: whole, without its carry rows (or token L), or a part of it."""
        if not self.receiving:
            return
        request_id = self.rng.choice(sorted(self.receiving))
        cut = self.receiving.pop(request_id)
        request = self.engine.scheduler.requests.get(request_id)
        wanted = self.engine.wanted(request_id, cut)
        how = self.rng.choice(("carry", "carry", "bare", "failed"))
        if request is None:
            assert wanted == {}
        elif how == "failed":
            arrived = self.rng.randint(0, cut)
            self.runner.receive(wanted, request.token_ids, arrived)
            stuck: dict[int, tuple[int, ...]] = {}
            if self.rng.random() < 0.3:
                late = [(g, i, b) for g, placed in wanted.items() for i, b in placed.items()]
                groups = self.engine.scheduler.kv.groups
                late = [(g, i, b) for g, i, b in late if (i + 1) * groups[g].block_size > arrived][:1]
                stuck = {g: (b,) for g, _, b in late}
                self.quarantined += [(g, b) for g, _, b in late]
            self.engine.kv_failed(request_id, arrived, stuck)
            return
        else:
            first = self.first_token(request, cut)
            ahead = () if first is None else (first.token_id, *first.drafts)  # P's modules have read them
            self.runner.receive(wanted, [*request.token_ids, *ahead], cut)
            rows = 1 if first is None else self.num_modules - 1
            carry = ROW * min(rows, self.num_modules - 1, cut) if how == "carry" else b""
            self.engine.kv_arrived(request_id, cut, carry or None, first)
            return
        self.engine.kv_arrived(request_id, cut, None)

    def first_token(self, request: Request, cut: int) -> FirstToken | None:
        """What P sends in a `carry` hand-over, if its word can be read."""
        if cut < request.num_tokens or self.rng.random() < 0.1:
            return None
        token, *coming = continuation(request.token_ids, 1 + self.num_modules, request.sampling.seed)
        drafts = (self.runner.draft_rule(request.request_id, cut + 1 + m, t) for m, t in enumerate(coming))
        return FirstToken(token, tuple(drafts))

    def abort(self) -> None:
        ids = sorted(self.engine.scheduler.requests)
        if ids and self.rng.random() < 0.4:
            victim = self.rng.choice(ids)
            assert self.engine.abort(victim)
            self.aborted.add(victim)
        assert not self.engine.abort("nobody")

    def release(self) -> None:
        held = [r for r in self.engine.scheduler.requests.values() if r.state is RequestState.HELD]
        if held:
            self.engine.release(self.rng.choice(held).request_id)
        self.engine.release("nobody")

    def end_quarantine(self) -> None:
        for g, block in self.quarantined:
            self.engine.scheduler.kv.pools[g].release_quarantine((block,))
        self.quarantined = []

    def step(self) -> None:
        output = self.engine.step()
        self.engine.check_invariants()
        batch = self.runner.batches[-1]
        budget = self.engine.scheduler.config.max_num_batched_tokens
        assert sum(e.end - e.start for e in batch.entries) <= budget
        scheduled = {e.request_id for e in batch.entries}
        assert not scheduled & set(output.preempted), "preempted and served in one step"
        for update in output.updates:
            assert update.request_id not in self.ended
            self.emitted.setdefault(update.request_id, []).extend(update.new_tokens)
            if update.finish_reason is not None:
                self.ended[update.request_id] = update.finish_reason
                assert update.summary is not None
                if update.finish_reason is FinishReason.ERROR:
                    assert self.quarantined, "given up although no block is missing from the pool"
        self.follow_events()

    def follow_events(self) -> None:
        groups = self.engine.scheduler.kv.groups
        self.announced = self.announced or [set() for _ in groups]
        self.cached = self.cached or [set() for _ in groups]
        for event in self.engine.take_events():
            match event:
                case BlockStored():
                    g = event.group_idx or 0
                    parent = event.parent_block_hash
                    if groups[0].keeps_all:  # else a hand-over's first blocks are no node's to announce
                        assert parent is None or any(parent in seen for seen in self.announced)
                    assert not self.cached[g] & set(event.block_hashes), "announced twice"
                    assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                    self.announced[g] |= set(event.block_hashes)
                    self.cached[g] |= set(event.block_hashes)
                case BlockRemoved():
                    assert set(event.block_hashes) <= self.cached[event.group_idx or 0]
                    self.cached[event.group_idx or 0] -= set(event.block_hashes)
                case AllBlocksCleared():
                    self.cached = [set() for _ in groups]
        for pool, cached in zip(self.engine.scheduler.kv.pools, self.cached, strict=True):
            assert {int.from_bytes(d[-8:], "big") for d in pool.registered()} == cached

    def finish(self) -> None:
        """No new requests: everything ends, and the pool is whole."""
        self.end_quarantine()
        for _ in range(MAX_STEPS):
            while self.receiving:
                self.arrive()
            self.end_quarantine()
            self.release()
            if not self.engine.has_work:
                held = any(r.state is RequestState.HELD for r in self.engine.scheduler.requests.values())
                if not held:
                    break
            else:
                self.step()
        self.follow_events()
        assert is_whole(self.engine), self.engine.scheduler.requests

    def check_tokens(self) -> None:
        for request in self.originals:
            assert request.state is RequestState.FINISHED
            if request.request_id in self.aborted:
                assert request.finish_reason is FinishReason.ABORT
            prompt = request.token_ids[: request.num_prompt_tokens]
            for index in range(4):
                name = request.request_id if index == 0 else f"{request.request_id}#{index}"
                emitted = self.emitted.get(name, [])
                seed = None if request.sampling.seed is None else request.sampling.seed + index
                truth = continuation(prompt, request.sampling.max_tokens, seed)
                stops = [i for i, t in enumerate(truth) if t in request.sampling.stop_token_ids]
                truth = truth[: stops[0] + 1] if stops else truth
                if self.ended.get(name) is FinishReason.ERROR:
                    assert emitted == truth[: len(emitted)]
                elif name in self.ended:
                    limit = self.engine.scheduler.limit
                    assert emitted == truth[: limit - len(prompt)], name
                else:  # aborted on the way, or never began
                    assert emitted == truth[: len(emitted)]
                    assert not emitted or name in self.aborted


def make_world(seed: int, recurrent: bool) -> World:
    rng = random.Random(seed)
    n = rng.choice((0, 1, 2, 4, 8))
    windows = rng.choice(((None,), (None, 6), (5,), (None, 3, 9)))
    layer_kinds = sorted(set(windows), key=lambda w: w or 0)
    module_windows = [rng.choice(layer_kinds)] * n
    if n and rng.random() < 0.2:
        module_windows = [7] * n
    num_blocks, block_size = rng.choice((14, 18, 26, 60)), rng.choice((1, 2, 4))
    engine, runner = make_fake_engine(
        n,
        windows=windows,
        module_windows=module_windows,
        num_blocks=num_blocks,
        block_size=block_size,
        state_block_size=block_size * rng.choice((1, 2, 3)) if recurrent else 0,
        budget=rng.choice((n + 1, n + 3, 16, 64)),
        threshold=rng.choice((0, 0, n + 1)),
        max_num_seqs=rng.choice((1, 2, 4, 8)),
        prefix_caching=rng.random() < 0.9,
        draft_rule=sometimes_right(seed, rng.choice((0.0, 0.5, 0.8, 1.0))),
    )
    return World(rng, engine, runner, n)


def run_world(seed: int, recurrent: bool = False) -> World:
    world = make_world(seed, recurrent)
    for _ in range(world.rng.randint(5, 60)):
        world.act()
        if world.rng.random() < 0.1 and world.engine.scheduler.kv.prefix_caching:
            world.engine.scheduler.kv.reset_prefix_cache()
        for _ in range(world.rng.choice((0, 1, 1, 3))):
            world.step()
    world.finish()
    world.check_tokens()
    return world


@pytest.mark.parametrize("chunk", range(8))
def test_random_runs_end_with_the_right_tokens_and_a_whole_pool(chunk: int) -> None:
    for seed in range(chunk * 20, chunk * 20 + 20):
        run_world(seed)


@pytest.mark.parametrize("chunk", range(8))
def test_random_runs_with_recurrent_state(chunk: int) -> None:
    for seed in range(chunk * 20, chunk * 20 + 20):
        run_world(seed, recurrent=True)


@pytest.mark.slow
@pytest.mark.parametrize("recurrent", [False, True])
def test_many_random_runs(recurrent: bool) -> None:
    for seed in range(1000, 4000):
        run_world(seed, recurrent)


@pytest.mark.parametrize("recurrent", [False, True])
def test_the_runs_cover_what_they_are_for(recurrent: bool) -> None:
    """The generator reaches preemption, hits, forks, failures and accepted runs: else it proves little."""
    worlds = [run_world(seed, recurrent) for seed in range(200, 230)]
    requests = [r for w in worlds for r in w.originals]
    assert sum(r.num_preemptions for r in requests) > 10
    assert sum(r.num_cached_tokens > 0 for r in requests) > 20
    assert sum("#" in name for w in worlds for name in w.emitted) > 20
    assert sum(w.engine.stats.num_accepted for w in worlds) > 100
    assert sum(w.engine.stats.num_draft_tokens - w.engine.stats.num_accepted for w in worlds) > 100
    for world in worlds:
        stats = world.engine.stats
        assert sum(stats.accepted_per_pos) == stats.num_accepted
        assert sum(stats.verified_per_pos) == stats.num_draft_tokens
