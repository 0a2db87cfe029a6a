"""Random schedules are exact: tokens, draft KV, states and drafts are those of one uninterrupted run.

At least 2,000 in all, over three kinds of models and N in {0, 1, 2, 4, 8}, on one engine and through the
hand-over. That the harness would see a broken rule is shown in `test_mutations`.
"""

from collections import Counter
from functools import cache

import pytest
import torch

from cli.schedules.checks import Outcome
from cli.schedules.random_models import KINDS, random_weights
from cli.schedules.run import run_schedules
from cli.schedules.texts import Texts

SEEDS = {0: 100, 1: 100, 2: 90, 4: 80, 8: 60}  # N: schedules, as many aggregated as through the hand-over
HYBRID_SEEDS = {0: 40, 1: 30, 2: 30, 4: 30, 8: 20}  # their passes cost three times as much
SLOW_SEEDS = range(1000, 1300)
CASES = [(kind, n, pair) for kind in KINDS for n in SEEDS for pair in (False, True)]


@cache
def texts(kind: str) -> Texts:
    return Texts(random_weights(kind, 0).trunk)


def run(kind: str, n: int, pair: bool, seeds: range) -> Outcome:
    """One thread: the tensors are tiny."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return run_schedules(random_weights(kind, n), texts(kind), seeds, pair=pair)
    finally:
        torch.set_num_threads(threads)


@cache
def outcome(kind: str, n: int, pair: bool) -> Outcome:
    return run(kind, n, pair, range((HYBRID_SEEDS if kind == "hybrid" else SEEDS)[n]))


@pytest.mark.parametrize(("kind", "n", "pair"), CASES)
def test_random_schedules_are_exact(kind: str, n: int, pair: bool) -> None:
    found = outcome(kind, n, pair)
    assert not found.problems
    assert found.max_kv_diff < 1e-4
    assert found.counts["near-ties"] <= found.counts["tokens compared"] / 1000


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "n", "pair"), CASES)
def test_many_random_schedules_are_exact(kind: str, n: int, pair: bool) -> None:
    assert not run(kind, n, pair, SLOW_SEEDS).problems


def test_the_schedules_reach_what_they_are_for() -> None:
    """All together, and for each N what depends on N."""
    total = Outcome()
    for n in SEEDS:
        counts: Counter[str] = Counter()
        for kind in KINDS:
            for pair in (False, True):
                found = outcome(kind, n, pair)
                total.add(found)
                counts += found.counts
        for num_drafts in range(n + 1):
            assert counts[f"steps that verified {num_drafts} drafts"] > 0, (n, num_drafts)
        assert counts[f"preemptions with {n} drafts in flight"] > 0, n
    assert total.counts["schedules"] >= 2000
    expected = {
        "hand-overs by back-off": 500, "hand-overs by carry": 300, "answers ended on P": 20,
        "hand-overs, row lost": 100, "broken transfers": 50, "hits on P": 100,
        "hits, repeat prompt": 100, "hits, foreign prompt": 100, "hits, shared prompt": 100,
        "hits, turn prompt": 100, "resumed with a hit": 50, "resumed from the beginning": 50,
        "preemptions with 0 drafts in flight": 30, "preemptions with 3 drafts in flight": 5,
        "accepted drafts": 5000, "rejected drafts": 5000, "invalid drafts": 100, "drafts compared": 500,
        "plain hashes": 100, "sequences forked": 50, "aborts while running": 50, "aborts while waiting": 20,
        "aborts while receiving_kv": 10, "aborts while ready": 5, "aborts while held": 5,
    }  # fmt: skip
    missing = {name: total.counts[name] for name, least in expected.items() if total.counts[name] < least}
    assert not missing
