"""A `baton up` for tests: started, read until its ready line, stopped, and its processes looked up."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 120.0


class UpProcess:
    """Use as a context manager; nothing of it is left afterwards, whatever the test did."""

    def __init__(self, folder: Path, *words: str) -> None:
        self.stdout_file = folder / "up.out"
        self.stderr_file = folder / "up.err"
        self.run_dir = folder / "run"
        environ = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
        environ |= {name: os.environ[name] for name in ("BATON_CACHE",) if name in os.environ}
        command = [sys.executable, "-m", "cli.main", "up", "--port=0", f"--run-dir={self.run_dir}", *words]
        with self.stdout_file.open("wb") as out, self.stderr_file.open("wb") as err:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environ, stdout=out, stderr=err, process_group=0
            )

    def __enter__(self) -> "UpProcess":
        return self

    def __exit__(self, *_: object) -> None:
        pids = self.child_pids()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pid in pids.values():
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)

    @property
    def stdout(self) -> str:
        return self.stdout_file.read_text(encoding="utf-8")

    @property
    def stderr(self) -> str:
        return self.stderr_file.read_text(encoding="utf-8")

    def wait_ready(self) -> str:
        """The URL of the ready line."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self.stdout.endswith("\n"):
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.stderr}"
            assert time.monotonic() < deadline_s, f"not ready in time: {self.stderr}"
            time.sleep(0.05)
        found = re.search(r"http://\S+", self.stdout)
        assert found is not None
        return found[0]

    def wait_stderr(self, text: str, timeout_s: float) -> str:
        """All of stderr once ``text`` is in it."""
        deadline_s = time.monotonic() + timeout_s
        while text not in self.stderr:
            assert time.monotonic() < deadline_s, f"{text!r} is not in: {self.stderr}"
            time.sleep(0.05)
        return self.stderr

    def child_pids(self) -> dict[str, int]:
        """Name of each process of this `up` -> pid, found by its parent and its command line."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
                words = (folder / "cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if parent == self.process.pid and "cli.main" in words:
                named = [word.removeprefix("--node-id=") for word in words if word.startswith("--node-id=")]
                found[named[0] if named else words[words.index("cli.main") + 1]] = int(folder.name)
        return found


def state_of(pid: int) -> str:
    """The kernel's letter: R, S, T (stopped), Z (waiting to be reaped); empty when the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return ""


def is_running(pid: int) -> bool:
    return state_of(pid) not in ("", "Z")


def wait_until_gone(pids: "list[int]", timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while any(map(is_running, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return not any(map(is_running, pids))
