"""Whatever the tokens and however they arrive: the pieces together are the decoded whole."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from common.tokenizer import Tokenizer
from tests.builders_tokenizer import byte_level_tokenizer, piece_tokenizer

BYTE_LEVEL = Tokenizer(byte_level_tokenizer())
PIECES = Tokenizer(piece_tokenizer())


def runs(items: list[int], cuts: list[int]) -> list[list[int]]:
    """The list cut at the given places (modulo its length)."""
    places = sorted({cut % (len(items) + 1) for cut in cuts} | {0, len(items)})
    return [items[a:b] for a, b in pairwise(places)]


@given(
    ids=st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=40),
    cuts=st.lists(st.integers(0, 100), max_size=10),
    skip=st.booleans(),
)
def test_any_byte_level_tokens(ids: list[int], cuts: list[int], skip: bool) -> None:
    stream = BYTE_LEVEL.detokenizer(skip_special_tokens=skip)
    pieces = [stream.push(run) for run in runs(ids, cuts)]
    assert "".join([*pieces, stream.flush()]) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@given(text=st.text(max_size=30), cuts=st.lists(st.integers(0, 100), max_size=10))
def test_any_text_through_pieces_with_byte_fallback(text: str, cuts: list[int]) -> None:
    ids = PIECES.encode(text)
    stream = PIECES.detokenizer()
    pieces = [stream.push(run) for run in runs(ids, cuts)]
    assert "".join([*pieces, stream.flush()]) == PIECES.decode(ids)


@given(text=st.text(max_size=30))
def test_no_piece_of_whole_text_holds_half_a_character(text: str) -> None:
    stream = BYTE_LEVEL.detokenizer(skip_special_tokens=False)
    pieces = [stream.push([i]) for i in BYTE_LEVEL.encode(text)]
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert "".join(pieces) == text
