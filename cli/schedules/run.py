"""Runs a schedule, on one engine or through hand-overs between two, and says what was not exact."""

import random
from collections import Counter
from collections.abc import Iterable

from cli.schedules.checks import Checks, Outcome
from cli.schedules.draw import Ask, Schedule, draw
from cli.schedules.engine import ScheduleEngine
from cli.schedules.pair import Transfers
from cli.schedules.random_models import Weights
from cli.schedules.texts import Texts
from common.engine.drafter import Choice
from common.request import Request, RequestState

MAX_STEPS = 3000


def run_schedules(weights: Weights, texts: Texts, seeds: Iterable[int], *, pair: bool) -> Outcome:
    """Draws and runs one schedule a seed."""
    total = Outcome()
    for seed in seeds:
        total.add(run_schedule(weights, texts, draw(seed, weights.num_modules, texts, pair=pair)))
    return total


def run_schedule(weights: Weights, texts: Texts, schedule: Schedule) -> Outcome:
    """A rule of the engine that does not hold any more (an assertion) is a problem like any other."""
    outcome = Outcome(counts=Counter({"schedules": 1, "plain hashes": schedule.shape.plain_hashes}))
    try:
        _Run(weights, texts, schedule, outcome).all()
    except AssertionError as error:
        outcome.problems.append(f"assertion: {error}")
    where = f"{weights.name}, {'pair' if schedule.prefill else 'aggregated'}, schedule {schedule.seed}"
    outcome.problems = [f"{where}: {problem}" for problem in outcome.problems]
    return outcome


class _Run:
    def __init__(self, weights: Weights, texts: Texts, schedule: Schedule, outcome: Outcome) -> None:
        self._schedule = schedule
        self._outcome = outcome
        self._rng = rng = random.Random(schedule.seed)
        self._asks = {f"s{i}": ask for i, ask in enumerate(schedule.asks)}
        checks = Checks(weights, schedule.method, outcome)
        choose = _script(self._asks, texts, schedule.num_drafts, weights.trunk.config.vocab_size, rng)
        args = (self._asks, rng, checks)
        self._main = ScheduleEngine(weights, schedule, schedule.budget, *args, choose)
        self._transfers: Transfers | None = None
        if schedule.prefill is not None:
            prefill = ScheduleEngine(weights, schedule, schedule.prefill, *args)
            self._transfers = Transfers(prefill, self._main, schedule.method.num_modules, outcome.counts)
        self._requests: dict[str, Request] = {}
        self._aborts: dict[str, int] = {}  # request id -> steps left until it is aborted

    def all(self) -> None:
        for i, (request_id, ask) in enumerate(self._asks.items()):
            self._begin(request_id, ask, float(i))
            for _ in range(ask.pause):
                self._tick()
        for _ in range(MAX_STEPS):
            if not self._tick():
                break
            if self._rng.random() < 0.3:
                self._main.release_held()
        self._main.release_held()
        for request in self._requests.values():
            assert request.state is RequestState.FINISHED, f"{request!r} never ended"
        for engine in self._engines:
            assert engine.is_whole(), "blocks are owned by nobody"

    @property
    def _engines(self) -> list[ScheduleEngine]:
        return [self._main] if self._transfers is None else [self._transfers.prefill, self._main]

    def _begin(self, request_id: str, ask: Ask, arrival: float) -> None:
        request = Request(
            request_id,
            list(ask.prompt),
            ask.sampling,
            hold_blocks=ask.hold_blocks,
            priority=ask.priority,
            num_sequences=ask.num_sequences,
            arrival_time_s=arrival,
        )
        self._requests[request_id] = request
        if ask.abort_after is not None:
            self._aborts[request_id] = ask.abort_after
        handed_over = (
            self._transfers is not None
            and ask.hand_over is not None
            and self._transfers.begin(request, ask.hand_over)
        )
        if not handed_over:
            self._main.engine.add(request)

    def _tick(self) -> bool:
        """One step of whoever has work and whose turn it is; False when nobody has."""
        busy = [engine for engine in self._engines if engine.has_work]
        if not busy:
            return False
        engine = self._rng.choice(busy)
        output = engine.step()
        if self._transfers is not None and engine is self._transfers.prefill:
            self._transfers.stepped(output)
        for request_id in list(self._aborts):
            self._aborts[request_id] -= 1
            if self._aborts[request_id] < 0:
                del self._aborts[request_id]
                self._abort(request_id)
        return True

    def _abort(self, request_id: str) -> None:
        for request in list(self._main.engine.scheduler.requests.values()):
            if request.request_id.partition("#")[0] != request_id:
                continue
            self._outcome.counts[f"aborts while {request.state.value}"] += 1
            if request.state is RequestState.RUNNING:
                self._main.audit(request)
            if self._transfers is not None:
                self._transfers.abort(request.request_id)
            self._main.engine.abort(request.request_id)
            self._main.engine.check_invariants()


def _script(
    asks: dict[str, Ask], texts: Texts, num_drafts: int, vocab_size: int, rng: random.Random
) -> Choice:
    """Drafts as the asks' patterns want them."""
    scripts = {
        request_id: [*ask.prompt, *texts.after(ask.prompt, ask.sampling.max_tokens + num_drafts)]
        for request_id, ask in asks.items()
        if ask.pattern.right is not None
    }

    def choose(request_id: str, position: int, token: int) -> int:
        script = scripts.get(request_id)
        if script is None or position >= len(script):
            return token
        right = asks[request_id].pattern.right
        if right is not None and rng.random() < right:
            return script[position]
        return (script[position] + rng.randrange(1, vocab_size)) % vocab_size

    return choose
