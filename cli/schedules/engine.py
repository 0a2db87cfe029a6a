"""One engine under a schedule: its drafts follow a script, its requests are checked as they end."""

import random
from collections.abc import Mapping

from cli.schedules.bare_engine import make_engine
from cli.schedules.checks import Checks
from cli.schedules.draw import Ask, Budget, Schedule
from cli.schedules.random_models import Weights
from common.engine.batch import RunnerOutput, ScheduledBatch, StepOutput
from common.engine.drafter import Choice
from common.engine.model_runner_protocol import Runner
from common.request import Request, RequestState

AUDITED = 0.12  # share of steps after which a running request is compared as well


class SeenRunner:
    """A Runner around another that keeps the batch of the last step."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.batch = ScheduledBatch(())

    def run(self, batch: ScheduledBatch) -> RunnerOutput:
        self.batch = batch
        return self._runner.run(batch)

    def carry_rows(self, request_id: str, at_most: int | None = None) -> bytes | None:
        return self._runner.carry_rows(request_id, at_most)


class ScheduleEngine:
    """``asks`` are the schedule's by request id; ids of further sequences have a "#"."""

    def __init__(
        self,
        weights: Weights,
        schedule: Schedule,
        budget: Budget,
        asks: Mapping[str, Ask],
        rng: random.Random,
        checks: Checks,
        choose: Choice | None = None,
    ) -> None:
        shape = schedule.shape
        self.engine, self.storage = make_engine(
            weights.trunk,
            weights.modules,
            num_blocks=shape.num_blocks,
            block_size=shape.block_size,
            state_block_size=shape.state_block_size,
            budget=budget.tokens,
            threshold=budget.threshold,
            max_num_seqs=shape.max_num_seqs,
            max_model_len=shape.max_model_len,
            prefix_caching=shape.prefix_caching,
            drop_last_block=shape.plain_hashes,
            method=schedule.method,
            choose=choose,
        )
        for g in range(len(self.storage.layout.groups)):
            self.storage.rows(g).fill_(7.0)  # what nobody wrote must not be taken for something
        self._asks = asks
        self._rng = rng
        self._checks = checks
        self._counts = checks.outcome.counts
        self._vocab_size = weights.trunk.config.vocab_size
        self._runner = SeenRunner(self.engine.runner)
        self.engine.runner = self._runner
        self.engine.scheduler.on_finish = self._ends
        self._preempted: set[str] = set()
        self._stepped: set[str] = set()

    @property
    def has_work(self) -> bool:
        return self.engine.has_work

    def step(self) -> StepOutput:
        """One step, its checks, and what the schedule does to the drafts of it."""
        scheduler = self.engine.scheduler
        before = {r.request_id: (r, r.num_preemptions, len(r.drafts)) for r in scheduler.requests.running}
        output = self.engine.step()
        self.engine.check_invariants()
        for request, preemptions, num_drafts in before.values():
            if request.num_preemptions > preemptions:
                self._counts[f"preemptions with {num_drafts} drafts in flight"] += 1
                self._preempted.add(request.request_id)
        for entry in self._runner.batch.entries:
            self._stepped.add(entry.request_id)
            assert entry.end <= scheduler.limit, f"{entry.request_id} goes past the longest sequence"
            if entry.samples:
                self._counts[f"steps that verified {len(entry.drafts)} drafts"] += 1
            if entry.request_id in self._preempted:
                self._preempted.discard(entry.request_id)
                self._counts["resumed " + ("with a hit" if entry.start else "from the beginning")] += 1
        stepped = [r for r in scheduler.requests.running if r.request_id in self._stepped]
        if stepped and self._rng.random() < AUDITED:
            request = self._rng.choice(stepped)
            self.audit(request)
            ask = self._ask(request)
            if ask.pattern.right is None:
                self._checks.drafts(request)
        for request in scheduler.requests.running:
            self._change_drafts(request)
        return output

    def audit(self, request: Request) -> None:
        """Compares a request that is in no step; one that was only forked has no blocks of its own yet."""
        if request.request_id in self._stepped:
            self._checks.blocks(self.storage, request)

    def release_held(self) -> None:
        for request in list(self.engine.scheduler.requests.values()):
            if request.state is RequestState.HELD:
                self.engine.release(request.request_id)

    def is_whole(self) -> bool:
        """Nobody is there and every block is free."""
        pools = self.engine.scheduler.kv.pools
        return not self.engine.scheduler.requests and all(p.num_free == p.num_blocks - 1 for p in pools)

    def _ask(self, request: Request) -> Ask:
        return self._asks[request.request_id.partition("#")[0]]

    def _change_drafts(self, request: Request) -> None:
        """Depth and validity of drafts are anybody's: fewer may be verified, and some be no tokens."""
        ask, rng = self._ask(request), self._rng
        if not request.drafts:
            return
        drafts = list(request.drafts)
        if rng.random() < ask.pattern.cut:
            del drafts[rng.randint(0, len(drafts)) :]
        if drafts and rng.random() < ask.pattern.invalid:
            drafts[rng.randrange(len(drafts))] = rng.choice((-1, self._vocab_size))
            self._counts["invalid drafts"] += 1
        request.drafts = tuple(drafts)

    def _ends(self, request: Request) -> None:
        """Called by the scheduler just before the blocks go."""
        self._checks.blocks(self.storage, request)
        if request.stop_at is not None:
            self._counts["hits on P"] += request.num_cached_tokens > 0
            self._checks.ended(request)  # token L, where P sampled it
            return
        ask, reason = self._ask(request), request.finish_reason
        if request.num_cached_tokens and "#" not in request.request_id:
            self._counts[f"hits, {ask.source} prompt"] += 1
        self._counts["sequences forked"] += "#" in request.request_id
        self._counts["accepted drafts"] += request.spec.num_accepted
        self._counts["rejected drafts"] += request.spec.num_draft_tokens - request.spec.num_accepted
        self._checks.ended(request)
        if reason is not None:
            self._checks.end(request, reason, self.engine.scheduler.limit)
