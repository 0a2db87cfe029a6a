"""What `scripts/demo` runs once everything is installed: from start to a clean end, over TCP."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_demo_answers_shows_its_figures_and_leaves_nothing() -> None:
    words = ["demo", "--model", "baton-tiny", "--transport", "tcp", "--max-tokens", "24"]
    command = [sys.executable, "-m", "cli.main", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"\d+ output tokens; first token after \d+ ms, then [\d.]+ tokens/s", done.stdout)
    assert re.search(r"acceptance length \d\.\d\d, per position \d\.\d\d", done.stdout)
    assert re.search(r"\d\.\d\d MiB crossed over TCP: the KV blocks of \d+ prompt tokens", done.stdout)
    assert done.stderr.rstrip().endswith("demo: stopped; nothing is left running")
