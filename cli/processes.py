"""Child processes of a supervisor: started in groups of their own, watched, stopped within a deadline.

A child belongs to its supervisor in both directions: `stop_all` ends it, and should the supervisor die
without getting there, the kernel kills the child (see `cli.main`). What a child writes goes to its log file,
and with `echo` also to stderr with the child's name in front.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO


class Child:
    """One `baton` process. ``words`` is its command line after `baton`."""

    def __init__(self, name: str, words: Sequence[str], log: Path) -> None:
        self.name = name
        self.words = tuple(words)
        self.log = log
        self._popen: subprocess.Popen[bytes] | None = None

    def start(self, environ: Mapping[str, str], *, echo: bool = False) -> None:
        """Starts it; its group id is its pid: a Ctrl-C in the terminal reaches the supervisor only."""
        with self.log.open("wb") as log:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "cli.main", *self.words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if echo else log,
                stderr=subprocess.STDOUT,
                env={**environ, "BATON_SUPERVISOR_PID": str(os.getpid()), "PYTHONUNBUFFERED": "1"},
                process_group=0,
            )
        if self._popen.stdout is not None:
            threading.Thread(target=self._copy_output, args=(self._popen.stdout,), daemon=True).start()

    def _copy_output(self, stream: IO[bytes]) -> None:
        with self.log.open("ab") as log:
            for line in stream:
                log.write(line)
                log.flush()
                sys.stderr.write(f"{self.name} | {line.decode(errors='replace')}")

    @property
    def pid(self) -> int | None:
        return None if self._popen is None else self._popen.pid

    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return None if self._popen is None else self._popen.poll()

    def signal(self, number: int) -> None:
        """Sends ``number`` to the whole group, also when its leader has already gone."""
        if self._popen is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._popen.pid, number)

    def wait(self, deadline_s: float) -> bool:
        """Waits until ``deadline_s`` on the monotonic clock; whether it has ended."""
        if self._popen is None:
            return True
        try:
            self._popen.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def last_lines(self, count: int = 12) -> list[str]:
        try:
            return self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-count:]
        except OSError:
            return []

    def how_it_ended(self) -> str:
        """For a person: the exit code or signal, and the end of the log, which says why."""
        code = self.exit_code()
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code is not None and code < 0
            else f"ended with {code}"
        )
        tail = "".join(f"\n    {line}" for line in self.last_lines())
        return f"{self.name} {how}; the end of its log ({self.log}):{tail or ' empty'}"


def stop_all(children: Iterable[Child], *, grace_s: float, kill_wait_s: float = 1.0) -> list[str]:
    """SIGTERM to every group, SIGKILL to what is left after ``grace_s``; names of those it took that for."""
    alive = [child for child in children if child.exit_code() is None and child.pid is not None]
    for child in alive:
        child.signal(signal.SIGTERM)
    deadline_s = time.monotonic() + grace_s
    killed = [child.name for child in alive if not child.wait(deadline_s)]
    for child in alive:
        child.signal(signal.SIGKILL)  # the whole group: helpers of a leader that ended in time as well
    deadline_s = time.monotonic() + kill_wait_s
    for child in alive:
        child.wait(deadline_s)
    return killed
