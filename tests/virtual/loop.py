"""The event loop of one virtual process: what asyncio needs of one; networking is the world's."""

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.virtual.world import Process


class _Future(asyncio.Future[Any]):
    """Hashed by a number, not by its address: asyncio keeps sets, whose order must be the same every time."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class _Task(asyncio.Task[Any]):
    def __init__(self, number: int, coro: Coroutine[Any, Any, Any], **options: Any) -> None:
        self._number = number  # before the base registers it in a set
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number


class ProcessLoop(asyncio.AbstractEventLoop):
    """Runs only in :meth:`turn`, which the world calls."""

    def __init__(self, process: "Process") -> None:
        self._process = process
        self._world = process.world
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[asyncio.TimerHandle] = []
        self._closed = False

    # --- asyncio's side ---

    def time(self) -> float:
        return self._world.now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._world.now + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It stays in the heap until its time comes."""

    def create_future(self) -> "asyncio.Future[Any]":
        future = _Future(loop=self)
        future.number = next(self._world.numbers)
        return future

    def create_task(  # type: ignore[override]
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Context | None = None
    ) -> "asyncio.Task[Any]":
        number = next(self._world.numbers)
        return _Task(number, coro, loop=self, name=name or f"task-{number}", context=context)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self._closed

    def is_closed(self) -> bool:
        return self._closed

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Nothing may fall to the floor: an exception that nobody awaits is a problem of the history."""
        if self._process.alive:
            self._world.problem(f"{self._process.name}: {context['message']}: {context.get('exception')!r}")

    async def create_connection(self, *args: Any, **options: Any) -> Any:
        factory, host, port = args
        return await self._world.network.connect(self._process, factory, host, port)

    async def create_server(self, *args: Any, **options: Any) -> Any:
        factory, host, port = args
        return self._world.network.listen(self._process, factory, host, port)

    # --- the world's side ---

    def deliver(self, callback: Callable[..., object], *args: Any) -> None:
        """Something from outside: it waits while the process is stopped, and is lost on a dead one."""
        if self._process.alive:
            self.call_soon(callback, *args)

    def next_time(self) -> float | None:
        """When it has something to do; None: never, unless something arrives."""
        if self._ready:
            return self._world.now
        while self._timers and self._timers[0].cancelled():
            heapq.heappop(self._timers)
        return self._timers[0].when() if self._timers else None

    def turn(self) -> None:
        """What asyncio does in one iteration: arrivals first, then timers; callbacks made now come next."""
        while self._timers and self._timers[0].when() <= self._world.now:
            timer = heapq.heappop(self._timers)
            if not timer.cancelled():
                self._ready.append(timer)
        asyncio._set_running_loop(self)
        try:
            for _ in range(len(self._ready)):
                handle = self._ready.popleft()
                if not handle.cancelled():
                    handle._run()
        finally:
            asyncio._set_running_loop(None)

    def num_timers(self) -> int:
        return sum(not timer.cancelled() for timer in self._timers)

    def tasks(self) -> "set[asyncio.Task[Any]]":
        return asyncio.all_tasks(self)

    def unwind(self) -> None:
        """Ends the coroutines of a dead process, unseen by the world: memory of this interpreter only."""
        for _ in range(100):
            for task in self.tasks():
                task.cancel()
            self._timers, due = [], self._timers
            self._ready.extend(timer for timer in due if not timer.cancelled())
            if not self._ready and not self.tasks():
                break
            self.turn()
        self._closed = True
