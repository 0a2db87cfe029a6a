"""Processes on a virtual clock: deterministic, without waiting, and with the faults that processes have.

Each process has an asyncio event loop of its own, so real code runs unchanged; a world runs the loops in
turns that a seeded random source picks. When nobody has anything to do, the clock jumps to the next timer.

    kill    nothing of the process runs any more, not even a `finally`; `silent`: its host goes too
    stop    as SIGSTOP: what arrives waits; timers that ran out fire when it goes on, behind what arrived
    cut     bytes from one host to another wait until the cut is healed, and so do connections
"""

import asyncio
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVarTuple

Ts = TypeVarTuple("Ts")


class Process:
    """``host`` is where it lives: a later process may live there too, under another ``name``."""

    def __init__(self, world: "World", name: str, host: str) -> None:
        self.world = world
        self.name = name
        self.host = host
        self.alive = True
        self.silent = False  # died with its host: nobody answers for it
        self.stopped = False
        self.loop = ProcessLoop(self)  # type: ignore[abstract]  # the rest raises NotImplementedError

    @property
    def running(self) -> bool:
        return self.alive and not self.stopped

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Starts a task, as a message from outside would. A dead process hears nothing."""
        if self.alive:
            self.loop.deliver(self.loop.create_task, work)
        else:
            work.close()

    def __repr__(self) -> str:
        return f"<{self.name}>"


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
    """What asyncio needs of a loop. Networking is the world's."""

    def __init__(self, process: Process) -> None:
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


class World:
    """``problems``: broken contracts and lost exceptions; a history asserts that there are none."""

    def __init__(self, seed: int) -> None:
        from tests.virtual.lanes import Fabric
        from tests.virtual.sockets import Network

        self.now = 0.0
        self.random = random.Random(seed)
        self.problems: list[str] = []
        self.story: list[str] = []
        self.processes: list[Process] = []  # alive
        self._dead: list[Process] = []
        self.network = Network(self)
        self.fabric = Fabric(self)
        self._events: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self.numbers = itertools.count()
        self._order = itertools.count()
        self._cuts: set[tuple[str, str]] = set()
        self._num_steps = 0
        self._at_steps: list[tuple[int, int, Callable[[], object]]] = []
        self._blocked: list[tuple[Callable[..., object], tuple[Any, ...]]] = []

    # --- time ---

    def after(self, delay_s: float, act: Callable[[*Ts], object], *args: *Ts) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), act, args))

    def at_step(self, number: int, act: Callable[[], object]) -> None:
        """Calls behind the so-manyth step: a frame written, a request posted, a piece that moved."""
        heapq.heappush(self._at_steps, (number, next(self._order), act))

    def count_step(self) -> None:
        self._num_steps += 1
        while self._at_steps and self._at_steps[0][0] <= self._num_steps:
            self.after(0.0, heapq.heappop(self._at_steps)[2])

    def when_changed(self, act: Callable[[*Ts], object], *args: *Ts) -> None:
        """Calls once, after the next change of a process or a link."""
        self._blocked.append((act, args))

    def _changed(self) -> None:
        blocked, self._blocked = self._blocked, []
        for act, args in blocked:
            self.after(self.latency_s(), act, *args)

    def latency_s(self) -> float:
        return self.random.uniform(0.0001, 0.004)

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Lets time pass until the condition holds (True) or ``limit_s`` more has passed."""
        deadline = self.now + limit_s
        while not until():
            if not self._step(deadline):
                return until()
        return True

    def pass_time(self, seconds: float) -> None:
        self.run(lambda: False, seconds)

    def _step(self, deadline: float) -> bool:
        now = self.now
        first = self._events[0][0] if self._events else deadline
        ready: list[Process] = []
        for process in self.processes:
            if process.stopped:
                continue
            time = process.loop.next_time()
            if time is not None:
                if time <= now:
                    ready.append(process)
                elif time < first:
                    first = time
        if ready:
            chosen = ready[0] if len(ready) == 1 else ready[int(self.random.random() * len(ready))]
            chosen.loop.turn()
            return True
        if first >= deadline:
            self.now = deadline
            return False
        self.now = max(now, first)
        while self._events and self._events[0][0] <= self.now:
            _, _, act, args = heapq.heappop(self._events)
            act(*args)
        return True

    # --- processes ---

    def start(self, name: str, host: str) -> Process:
        process = Process(self, name, host)
        self.processes.append(process)
        return process

    def kill(self, process: Process, *, silent: bool = False) -> None:
        if not process.alive:
            return
        self.tell(f"{process.name} is killed{' with its host' if silent else ''}")
        process.alive = False
        process.silent = silent
        process.stopped = False
        self.processes.remove(process)
        self.network.killed(process)
        self.fabric.killed(process)
        self._changed()
        self._dead.append(process)

    def host_is_back(self, host: str) -> None:
        """Its kernel answers again for whoever died with it: with resets."""
        for process in self._dead:
            if process.host == host:
                process.silent = False
        self._changed()

    def stop(self, process: Process) -> None:
        if process.alive and not process.stopped:
            self.tell(f"{process.name} is stopped")
            process.stopped = True

    def resume(self, process: Process) -> None:
        if process.stopped:
            self.tell(f"{process.name} goes on")
            process.stopped = False
            self._changed()

    # --- links, one direction each ---

    def cut(self, source: str, target: str) -> None:
        self.tell(f"cut {source} -> {target}")
        self._cuts.add((source, target))

    def heal(self, source: str, target: str) -> None:
        if (source, target) in self._cuts:
            self.tell(f"healed {source} -> {target}")
            self._cuts.discard((source, target))
            self._changed()

    def open(self, source: Process, target: Process) -> bool:
        return (source.host, target.host) not in self._cuts

    def calm(self) -> None:
        """No fault from now on."""
        for source, target in sorted(self._cuts):
            self.heal(source, target)
        for process in list(self.processes):
            self.resume(process)

    # --- what is seen ---

    def tell(self, what: str) -> None:
        self.story.append(f"{self.now:9.4f}  {what}")

    def problem(self, what: str) -> None:
        self.tell(f"PROBLEM {what}")
        self.problems.append(what)

    def end(self) -> None:
        self.network.end()
        for process in self._dead + self.processes:
            process.alive = False
            process.loop.unwind()
