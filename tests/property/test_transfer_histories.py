"""Random histories of transfers and faults on a virtual clock: outcomes, bytes, pools and invariants.

`tests/virtual/history.py` says what a history is and what must hold after it; this runs many, and shows that
they would find what they are there to find. A failure names a seed and a profile:
`python -m tests.virtual.history SEED PROFILE` tells its story.
"""

import subprocess
import sys
from collections import Counter

import pytest

from tests.virtual.history import PROFILES, run_history
from tests.virtual.mutants import MUTANTS

PER_PROFILE = 500  # times six profiles: 3,000 histories, about 50 s of one core
SLOW_PER_PROFILE = 5_000

# what must have happened, and how often at least in 500 histories; else the test would look at nothing
EXPECTED = {
    "calm": {"committed": 500, "cancelled": 100, "failed: gone": 50, "dropped": 50, "leases expired": 50},
    "deaths": {"kill_p": 100, "kill_d": 100, "failed: peer_lost": 50, "failed: connect": 20},
    "cuts": {"cut": 500, "failed: connect": 50, "peers suspected": 50, "failed: peer_lost": 20},
    "pauses": {"stop_p": 100, "stop_d": 100, "leases expired": 200, "failed: timeout": 20},
    "lanes": {
        "late pieces": 20,
        "quarantined": 5,
        "fences by force": 30,
        "damaged": 20,
        "failed: checksum": 10,
    },
    "everything": {"frames duplicated": 200, "unexpected messages": 200, "failed: peer_lost": 50},
}


def run_many(profile: str, first: int, count: int) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in range(first, first + count):
        history = run_history(seed, profile)
        assert not history.world.problems, (
            f"history {seed} {profile}:\n"
            + "\n".join(history.world.problems)
            + "\n\n"
            + "\n".join(history.world.story)
        )
        seen += history.seen.events + history.seen.outcomes
        seen += Counter({f"failed: {reason}": n for reason, n in history.seen.reasons.items()})
    return seen


@pytest.mark.parametrize("profile", PROFILES)
def test_whatever_happens_nothing_is_lost_corrupt_or_leaked(profile: str) -> None:
    seen = run_many(profile, 0, PER_PROFILE)
    rare = {what: seen[what] for what, least in EXPECTED[profile].items() if seen[what] < least}
    assert not rare, f"hardly ever happened: {rare}"


@pytest.mark.slow
@pytest.mark.parametrize("profile", PROFILES)
def test_many_more_histories(profile: str) -> None:
    run_many(profile, PER_PROFILE, SLOW_PER_PROFILE)


def test_a_history_is_the_same_every_time() -> None:
    first, second = (run_history(7, "everything") for _ in range(2))
    assert first.world.story == second.world.story
    assert first.world.now == second.world.now


@pytest.mark.parametrize("name", MUTANTS)
def test_histories_find_a_broken_line(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.virtual.mutants", name],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
