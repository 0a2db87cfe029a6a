"""Stop strings: nothing from the stop string on is emitted, however the text is split."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.stop_strings import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    emitted = ""
    for piece in pieces:
        emitted += matcher.push(piece)
        assert matcher.num_emitted == len(emitted)
    return emitted + matcher.flush(), matcher.matched


@pytest.mark.parametrize(
    ("stops", "pieces", "emitted", "matched"),
    [
        ([], ["anything", " goes"], "anything goes", None),
        (["END"], ["the EN", "D is near"], "the ", "END"),
        (["END"], ["the EN", "ough"], "the ENough", None),
        (["END"], ["E", "N", "D"], "", "END"),
        (["END"], ["EEEND"], "EE", "END"),
        (["aab"], ["aa", "ab"], "a", "aab"),  # the held text begins a later match
        (["abc", "b"], ["abc"], "a", "b"),  # completes first
        (["bc", "abc"], ["xabc"], "x", "abc"),  # same end: the longest
        (["\n\n"], ["line\n", "\nnext"], "line", "\n\n"),
        (["ab"], ["x a"], "x a", None),  # held at the end, released by flush
    ],
)
def test_cases(stops: list[str], pieces: list[str], emitted: str, matched: str | None) -> None:
    assert run(stops, pieces) == (emitted, matched)


def test_unchecked_text_passes_and_cannot_complete_a_later_match() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("END", check=False) == "END"
    assert matcher.push("EN", check=False) == "EN"
    assert matcher.push("D") == "D"
    assert matcher.push(" END") == " "
    assert matcher.matched == "END"
    assert matcher.push("more") == ""
    assert matcher.flush() == ""


texts = st.text(alphabet="ab\n", max_size=30)


@given(st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=4), st.lists(texts, max_size=8))
def test_any_split_gives_what_character_by_character_gives(stops: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    by_pieces = run(stops, pieces)
    assert by_pieces == run(stops, list(text))
    emitted, matched = by_pieces
    if matched is None:
        assert emitted == text
        assert not any(stop in text for stop in stops)
    else:
        assert text.startswith(emitted + matched)
        assert not any(stop in emitted for stop in stops)


@given(
    st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(texts, max_size=6),
)
def test_nothing_is_taken_back(stops: list[str], pieces: list[str]) -> None:
    """What was emitted at any moment is a prefix of the final answer."""
    final, _ = run(stops, pieces)
    matcher = StopMatcher(stops)
    so_far = ""
    for piece in pieces:
        so_far += matcher.push(piece)
        assert final.startswith(so_far)
