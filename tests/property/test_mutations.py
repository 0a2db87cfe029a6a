"""Every deliberate break of a rule is seen, and the list in docs/exactness.md is the one that runs."""

import os
import subprocess
import sys

from tests.mutation_run import ROOT
from tests.mutations import MUTATIONS, PAGE, updated

TIMEOUT_S = 900.0  # on a busy machine; two minutes on an idle one


def test_every_break_is_caught() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.mutations"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("caught ") == len(MUTATIONS) > 25


def test_the_page_lists_what_runs() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == updated(page), "run `python -m tests.mutations --markdown`"
