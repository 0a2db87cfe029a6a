"""Processes on a virtual clock: deterministic, without waiting, and with the faults that processes have.

Each process has an asyncio event loop of its own, so real code runs unchanged; a world runs the loops in
turns that a seeded random source picks. When nobody has anything to do, the clock jumps to the next timer.

    kill    nothing of the process runs any more, not even a `finally`; `silent`: its host goes too
    stop    as SIGSTOP: what arrives waits; timers that ran out fire when it goes on, behind what arrived
    cut     bytes from one host to another wait until the cut is healed, and so do connections
"""

import heapq
import itertools
import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVarTuple

from tests.virtual.loop import ProcessLoop

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
