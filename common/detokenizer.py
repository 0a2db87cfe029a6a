"""Ids -> text for a stream: pieces that never end in half a character and together are the decoded whole.

Byte-level tokenizers (nearly all of today's) stand for bytes one by one, so a table and an incremental
UTF-8 decoder are exact. For others a token's text may depend on its neighbours: a piece is then the
difference of two decodes that start at the same earlier token. Both cost a few table look-ups a token,
whatever the length of the sequence.
"""

import codecs
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# A character has at most four bytes, each at worst a token of its own: what is unfinished after that many
# never becomes a character and is given out as it is.
_MAX_HELD_TOKENS = 8


class IncrementalDetokenizer(Protocol):
    """Detokenizes one sequence."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Appends tokens; returns the text that is certain now, perhaps empty."""
        ...

    def flush(self) -> str:
        """Ends the sequence; returns what was held back, unfinished bytes as the replacement character."""
        ...


class ByteLevelDetokenizer:
    """For tokenizers whose decoder joins bytes."""

    def __init__(self, token_bytes: Callable[[int], bytes], skipped_ids: Collection[int]) -> None:
        """`token_bytes(id)` are the bytes of a token; `skipped_ids` give no text."""
        self._token_bytes = token_bytes
        self._skipped = skipped_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(
            b"".join([self._token_bytes(i) for i in token_ids if i not in self._skipped])
        )

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class WindowDetokenizer:
    """For any tokenizer whose text does not depend on tokens further back than the last piece."""

    def __init__(self, decode: Callable[[list[int]], str], skipped_ids: Collection[int]) -> None:
        """`decode(ids)` is the whole text of a few tokens, special ones included."""
        self._decode = decode
        self._skipped = skipped_ids
        self._window: list[int] = []  # the last piece's tokens, then those held back
        self._num_emitted = 0  # how many of the window's tokens have been given out
        self._emitted_text = ""  # their text, as the window's beginning

    def push(self, token_ids: Sequence[int]) -> str:
        return "".join([self._push_one(token_id) for token_id in token_ids if token_id not in self._skipped])

    def flush(self) -> str:
        piece = self._decode(self._window)[len(self._emitted_text) :]
        self._window, self._num_emitted, self._emitted_text = [], 0, ""
        return piece

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and len(self._window) - self._num_emitted < _MAX_HELD_TOKENS:
            return ""
        piece = text[len(self._emitted_text) :]
        del self._window[: self._num_emitted]  # the new piece's tokens are the next one's context
        self._num_emitted = len(self._window)
        self._emitted_text = self._decode(self._window)
        return piece


def byte_of_char() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
