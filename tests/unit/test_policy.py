"""Placement: longest prefix unless much busier; help only where it pays; the cut of the back-off."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.policy import Candidate, Placement, cut_of, place, rank

P = Candidate("p", load=0)


def names(ranked: list[Candidate]) -> str:
    return "".join(c.node_id for c in ranked)


def test_the_longest_prefix_wins_among_nodes_of_similar_load() -> None:
    candidates = [Candidate("a", 0, 16), Candidate("b", 2, 64), Candidate("c", 1, 32)]
    assert names(rank(candidates, busy_tolerance=4)) == "bca"


def test_a_much_busier_node_loses_its_claim() -> None:
    candidates = [Candidate("a", 0), Candidate("b", 5, 640), Candidate("c", 4, 16)]
    assert names(rank(candidates, busy_tolerance=4)) == "cab"


def test_one_hot_node_leaves_affinity_to_the_others() -> None:
    candidates = [Candidate("hot", 50, 64), Candidate("b", 1, 64), Candidate("a", 0, 0)]
    assert rank(candidates, busy_tolerance=4)[0].node_id == "b"


def test_equal_prefixes_go_to_the_idler_then_the_roomier_node() -> None:
    candidates = [Candidate("a", 1), Candidate("b", 0, free_blocks=5), Candidate("c", 0, free_blocks=9)]
    assert names(rank(candidates, busy_tolerance=4)) == "cba"
    assert rank([], busy_tolerance=4) == []


@given(
    st.lists(
        st.builds(Candidate, st.text("xyz", min_size=1), st.integers(0, 9), st.integers(0, 99)), min_size=1
    )
)
def test_the_first_is_never_much_busier_than_the_idlest(candidates: list[Candidate]) -> None:
    ranked = rank(candidates, busy_tolerance=2)
    assert sorted(map(repr, ranked)) == sorted(map(repr, candidates))
    assert ranked[0].load <= min(c.load for c in candidates) + 2


@pytest.mark.parametrize(
    ("prompt", "modules", "cut"),
    [(1, 0, None), (2, 0, 1), (2, 1, 1), (9, 2, 8), (3, 4, None), (4, 4, 1), (100, 4, 97), (100, 8, 93)],
)
def test_the_cut(prompt: int, modules: int, cut: int | None) -> None:
    assert cut_of(prompt, modules) == cut


def placed(
    prompt: int, cached: int = 0, *, prefill: tuple[Candidate, ...] = (P,), alone: bool = False
) -> Placement:
    return place(
        prompt, 4, Candidate("d", 0, cached), prefill,
        busy_tolerance=4, min_remote_prefill_tokens=32, computes_alone=alone,
    )  # fmt: skip


def test_help_where_it_pays() -> None:
    assert (placed(100).prefill, placed(100).cut) == (P, 97)
    assert placed(100, cached=68).prefill is P
    for nothing in (
        placed(100, cached=69),
        placed(31),
        placed(3),
        placed(100, prefill=()),
        placed(100, alone=True),
    ):
        assert (nothing.prefill, nothing.cut) == (None, 0)


def test_the_prefill_node_is_chosen_by_prefix_and_load() -> None:
    choices = (Candidate("idle", 0), Candidate("holds", 2, 48), Candidate("busy", 9, 96))
    best = placed(100, prefill=choices).prefill
    assert best is not None
    assert best.node_id == "holds"


def test_carry_leaves_nothing_of_the_prompt_to_the_decode_node() -> None:
    p, d = Candidate("p", 0), Candidate("d", 0)

    def placed(length: int, candidate: Candidate = d, *, carry: bool = True) -> Placement:
        return place(length, 4, candidate, [p], busy_tolerance=4, min_remote_prefill_tokens=2, carry=carry)

    assert placed(100) == Placement(d, p, 100)
    assert placed(100, carry=False) == Placement(d, p, 97)
    assert placed(3) == Placement(d, p, 3)  # too short for `backoff`
    assert placed(3, carry=False) == Placement(d, None, 0)
    warm = Candidate("d", 0, cached_tokens=99)
    assert placed(100, warm) == Placement(warm, None, 0)
