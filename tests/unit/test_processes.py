"""A supervisor's children: stopped in time, killed when they resist, gone when the supervisor is gone."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.processes import Child, stop_all
from tests.up_process import is_running, state_of, wait_until_gone

ROOT = Path(__file__).resolve().parents[2]
RUNS_FOREVER = ("events", "--endpoint", "tcp://127.0.0.1:9")


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    made = Child("reader", RUNS_FOREVER, tmp_path / "reader.log")
    made.start(os.environ)
    yield made
    made.signal(signal.SIGKILL)
    assert made.wait(time.monotonic() + 5)


def test_child_has_a_group_of_its_own_and_ends_on_sigterm(child: Child) -> None:
    assert child.pid is not None
    assert os.getpgid(child.pid) == child.pid
    assert child.exit_code() is None
    assert stop_all([child], grace_s=5.0) == []
    assert child.exit_code() == -signal.SIGTERM
    assert "reader was killed by SIGTERM" in child.how_it_ended()


def test_child_that_does_not_react_is_killed_within_the_deadline(child: Child) -> None:
    assert child.pid is not None
    child.signal(signal.SIGSTOP)
    while state_of(child.pid) != "T":  # from then on it cannot handle SIGTERM
        time.sleep(0.01)
    started_s = time.monotonic()
    assert stop_all([child], grace_s=0.3) == ["reader"]
    assert time.monotonic() - started_s < 2.0
    assert child.exit_code() == -signal.SIGKILL


def test_report_of_a_child_has_its_exit_code_and_the_end_of_its_log(tmp_path: Path) -> None:
    child = Child("prefill-0", ("prefill", "--block-size=0"), tmp_path / "p.log")
    child.start(os.environ)
    assert child.wait(time.monotonic() + 30)
    report = child.how_it_ended()
    assert report.startswith("prefill-0 ended with 2; the end of its log")
    assert "--block-size: 0 is below the minimum of 1" in report


def test_verbose_output_goes_to_log_and_stderr(tmp_path: Path) -> None:
    code = (
        "import os, time, pathlib\n"
        "from cli.processes import Child\n"
        f"child = Child('one', ('--version',), pathlib.Path({str(tmp_path / 'one.log')!r}))\n"
        "child.start(os.environ, echo=True)\n"
        "child.wait(time.monotonic() + 30)\n"
        "time.sleep(0.3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr.startswith("one | baton ")
    assert (tmp_path / "one.log").read_text(encoding="utf-8").startswith("baton ")


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="the kernel's parent-death signal is Linux's"
)
def test_child_dies_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, time, pathlib\n"
        "from cli.processes import Child\n"
        f"child = Child('one', {RUNS_FOREVER!r}, pathlib.Path({str(tmp_path / 'one.log')!r}))\n"
        "child.start(os.environ)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    pid = int(supervisor.stdout.readline())
    time.sleep(0.5)
    assert is_running(pid)
    supervisor.kill()
    supervisor.communicate()
    assert wait_until_gone([pid], 5.0)
