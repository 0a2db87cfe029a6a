"""The engine's thread: calls between steps, failure, stop, late calls, and no spinning."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import pytest

from common.engine.batch import RunnerOutput, ScheduledBatch, StepOutput
from common.engine.engine import Engine
from common.engine.loop import EngineLoop
from common.errors import BatonError
from common.kv_events import AllBlocksCleared, KVEvent
from common.request import RequestState
from tests.fakes import continuation, fake_request, make_fake_engine, outputs_of

WAIT_S = 5.0


class Watched:
    """An engine with a loop, and what the loop told."""

    def __init__(self, num_blocks: int = 64) -> None:
        self.engine, self.runner = make_fake_engine(2, num_blocks=num_blocks)
        self.steps: list[StepOutput] = []
        self.events: list[KVEvent] = []
        self.failures: list[BaseException] = []
        self.finished = threading.Event()
        self.failed = threading.Event()
        self.loop = EngineLoop(self.engine, self.on_step, self.on_failure)

    def on_step(self, output: StepOutput, events: Sequence[KVEvent]) -> None:
        self.steps.append(output)
        self.events += events
        if any(u.finish_reason is not None for u in output.updates):
            self.finished.set()

    def on_failure(self, error: BaseException) -> None:
        self.failures.append(error)
        self.failed.set()

    def before_each_run(self, action: Callable[[ScheduledBatch], None]) -> None:
        run = self.engine.runner.run

        def wrapped(batch: ScheduledBatch) -> RunnerOutput:
            action(batch)
            return run(batch)

        self.engine.runner.run = wrapped  # type: ignore[method-assign]


@pytest.fixture
def watched() -> Iterator[Watched]:
    it = Watched()
    yield it
    it.loop.stop()


def test_a_request_runs_to_its_end(watched: Watched) -> None:
    request = fake_request(range(10), 7)
    watched.loop.start()
    watched.loop.call(lambda engine: engine.add(request)).result(WAIT_S)
    assert watched.finished.wait(WAIT_S)
    assert outputs_of(request) == continuation(range(10), 7)
    assert [t for s in watched.steps for u in s.updates for t in u.new_tokens] == outputs_of(request)
    assert watched.events


def test_calls_run_on_the_engines_thread_between_steps(watched: Watched) -> None:
    inside, stepping, go = [], threading.Event(), threading.Event()
    threads = set()

    def slow(batch: ScheduledBatch) -> None:
        threads.add(threading.current_thread())
        inside.append(True)
        stepping.set()
        assert go.wait(WAIT_S)
        inside.pop()

    watched.before_each_run(slow)
    watched.loop.start()
    watched.loop.call(lambda engine: engine.add(fake_request(range(10), 20))).result(WAIT_S)
    assert stepping.wait(WAIT_S)

    def look(engine: Engine) -> tuple[bool, threading.Thread]:
        return bool(inside), threading.current_thread()

    future = watched.loop.call(look)
    time.sleep(0.05)
    assert not future.done(), "a call must not run while a step runs"
    go.set()
    during_step, thread = future.result(WAIT_S)
    assert not during_step
    assert threads == {thread}
    assert thread is not threading.current_thread()


def test_an_error_in_a_call_is_the_callers_alone(watched: Watched) -> None:
    watched.loop.start()
    with pytest.raises(ZeroDivisionError):
        watched.loop.call(lambda engine: 1 // 0).result(WAIT_S)
    assert watched.loop.call(lambda engine: 42).result(WAIT_S) == 42
    assert not watched.failures


def test_a_cancelled_call_is_not_carried_out(watched: Watched) -> None:
    ran = []
    future = watched.loop.call(lambda engine: ran.append(1))  # the loop does not run yet
    assert future.cancel()
    watched.loop.start()
    watched.loop.call(lambda engine: None).result(WAIT_S)
    assert not ran


def test_an_error_in_a_step_ends_the_loop_and_answers_everybody(watched: Watched) -> None:
    late: list[Future[int]] = []

    def break_down(batch: ScheduledBatch) -> None:
        late.append(watched.loop.call(lambda engine: 1))  # waits in the inbox while the step fails
        raise RuntimeError("a kernel broke")

    watched.before_each_run(break_down)
    watched.loop.start()
    watched.loop.call(lambda engine: engine.add(fake_request(range(5)))).result(WAIT_S)
    assert watched.failed.wait(WAIT_S)
    assert [str(e) for e in watched.failures] == ["a kernel broke"]
    for future in (late[0], watched.loop.call(lambda engine: 2)):
        with pytest.raises(BatonError, match="the engine has stopped"):
            future.result(WAIT_S)


def test_stop_ends_the_thread_and_later_calls_are_refused(watched: Watched) -> None:
    watched.loop.start()
    watched.loop.call(lambda engine: engine.add(fake_request(range(5), 100))).result(WAIT_S)
    watched.loop.stop()
    watched.loop.stop()
    assert not any(t.name == "engine" for t in threading.enumerate())
    with pytest.raises(BatonError, match="the engine has stopped"):
        watched.loop.call(lambda engine: 1).result(WAIT_S)


def test_calls_that_race_with_stop_are_all_answered() -> None:
    for _ in range(30):
        it = Watched()
        it.loop.start()
        futures: list[Future[int]] = []
        begun = threading.Event()

        def caller(
            it: Watched = it, futures: list[Future[int]] = futures, begun: threading.Event = begun
        ) -> None:
            for _ in range(300):
                futures.append(it.loop.call(lambda engine: 1))
                begun.set()

        thread = threading.Thread(target=caller)
        thread.start()
        begun.wait(WAIT_S)
        it.loop.stop()
        thread.join()
        for future in futures:
            assert future.exception(WAIT_S) is None or isinstance(future.exception(), BatonError)


def test_a_stalled_engine_sleeps_until_a_call_frees_blocks() -> None:
    """A held prefill owns the pool: the next one waits without spinning, and starts with the release."""
    it = Watched(num_blocks=5)
    held = fake_request(range(20), request_id="held", stop_at=18, hold_blocks=True)
    waiting = fake_request(range(100, 112), 3, request_id="waiting")
    runs: list[int] = []
    it.before_each_run(lambda batch: runs.append(len(batch.entries)))
    it.loop.start()
    try:
        it.loop.call(lambda engine: engine.add(held)).result(WAIT_S)
        assert it.finished.wait(WAIT_S)
        it.loop.call(lambda engine: engine.add(waiting)).result(WAIT_S)
        runs.clear()
        time.sleep(0.25)
        assert len(runs) <= 2, f"{len(runs)} empty steps in a quarter of a second"
        assert waiting.state is RequestState.WAITING
        it.finished.clear()
        it.loop.call(lambda engine: engine.release("held")).result(WAIT_S)
        assert it.finished.wait(0.25), "a call wakes the loop at once"
    finally:
        it.loop.stop()
    assert outputs_of(waiting) == continuation(range(100, 112), 3)


def test_an_idle_engine_does_not_step(watched: Watched) -> None:
    runs: list[int] = []
    watched.before_each_run(lambda batch: runs.append(1))
    watched.loop.start()
    time.sleep(0.1)
    watched.loop.call(lambda engine: None).result(WAIT_S)
    assert not runs
    assert not watched.steps


def test_a_reset_of_the_idle_cache_is_told_at_once(watched: Watched) -> None:
    watched.loop.start()
    watched.loop.call(lambda e: e.add(fake_request(range(20), 4))).result(WAIT_S)
    assert watched.finished.wait(WAIT_S)
    watched.loop.call(lambda e: e.reset_prefix_cache()).result(WAIT_S)
    deadline = time.monotonic() + WAIT_S
    while AllBlocksCleared() not in watched.events and time.monotonic() < deadline:
        time.sleep(0.005)
    assert watched.events[-1] == AllBlocksCleared()
