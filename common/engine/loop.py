"""Runs an engine on a thread of its own: calls go in through an inbox, results come out as callbacks.

Between two steps the thread carries out the calls that arrived, so nothing touches the engine while it
steps and the event loop never waits for it. An exception in a step ends the loop: `on_failure` hears it.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

from common.engine.batch import StepOutput
from common.engine.engine import Engine
from common.errors import EngineStopped
from common.kv_events import KVEvent

T = TypeVar("T")

IDLE_WAIT_S = 0.5  # longest sleep of an idle loop; a call wakes it at once


class EngineLoop:
    """``on_step(output, events)`` and ``on_failure(error)`` run on the engine's thread."""

    def __init__(
        self,
        engine: Engine,
        on_step: Callable[[StepOutput, Sequence[KVEvent]], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.engine = engine
        self._on_step = on_step
        self._on_failure = on_failure
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopped = False

    def start(self) -> None:
        self._thread.start()

    def call(self, function: Callable[[Engine], T]) -> "Future[T]":
        """Runs ``function(engine)`` between two steps; the future carries its result or error."""
        future: Future[T] = Future()

        def carry_out() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._stopped:
                    raise EngineStopped("the engine has stopped")
                future.set_result(function(self.engine))
            except BaseException as error:  # it belongs to the caller, whatever it is
                future.set_exception(error)

        self._inbox.put(carry_out)
        if self._stopped:  # the thread may have looked for late calls before this one came
            self._answer_late_calls()
        return future

    def stop(self, timeout_s: float = 5.0) -> None:
        """Ends the thread after the step in hand; False work is dropped. Idempotent."""
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while self._serve_inbox():
                output = self.engine.step() if self.engine.has_work else StepOutput()
                events = self.engine.take_events()
                if output.updates or output.preempted or events:
                    self._on_step(output, events)
                # A step that preempts admits nobody; the next one may.
                self._stalled = output.num_scheduled_tokens == 0 and not output.preempted
        except BaseException as error:
            self._on_failure(error)
        finally:
            self._stopped = True
            self._answer_late_calls()

    _stalled = False  # there is work, but nothing could be scheduled: wait for a call (a release, an abort)

    def _serve_inbox(self) -> bool:
        """Carries out what arrived; sleeps when there is nothing to do. False: stop."""
        if not self.engine.has_work or self._stalled:
            try:
                item = self._inbox.get(timeout=IDLE_WAIT_S)
            except queue.Empty:
                return True
            if item is None:
                return False
            item()
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return True
            if item is None:
                return False
            item()

    def _answer_late_calls(self) -> None:
        """Calls that came too late are answered all the same: with an error, the engine is not touched."""
        while True:
            try:
                item = self._inbox.get_nowait()
            except queue.Empty:
                return
            if item is not None:
                item()
