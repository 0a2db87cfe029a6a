"""Stop strings over text that arrives in pieces: what may be emitted, and where the answer ends.

One rule for the node that generates and for the router that emits: the match that *completes* first
wins, and of those that complete at the same character the longest. So the outcome does not depend on how
the text was split into tokens. Text that may yet turn out to begin a stop string is held back.
"""

from collections.abc import Sequence


class StopMatcher:
    """Follows one sequence. ``matched`` is the stop string that ended it; nothing is emitted after.

    ``num_emitted`` counts characters released so far; it never passes the start of a match.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None
        self.num_emitted = 0

    def push(self, text: str, *, check: bool = True) -> str:
        """Takes the next piece; returns what may be emitted. ``check`` False lets stop strings that
        complete in this piece pass (fewer than ``min_tokens`` so far)."""
        if self.matched is not None:
            return ""
        if not self._stops or not check:
            return self._emit(self._held + text, "")
        text = self._held + text
        # A match cannot lie in the old text alone, so it ends inside the new piece.
        match = _first_completed(text, self._stops)
        if match is not None:
            self.matched = match[1]
            return self._emit(text[: match[0]], "")
        keep = _longest_open_prefix(text, self._stops)
        return self._emit(text[: len(text) - keep], text[len(text) - keep :])

    def flush(self) -> str:
        """The sequence ended otherwise: what was held back."""
        return self._emit(self._held, "")

    def _emit(self, text: str, held: str) -> str:
        self._held = held
        self.num_emitted += len(text)
        return text


def _first_completed(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """(start, stop string) of the match with the smallest end, then the smallest start."""
    best: tuple[int, int, str] | None = None
    for stop in stops:
        start = text.find(stop)
        if start >= 0:
            candidate = (start + len(stop), start, stop)
            best = candidate if best is None else min(best, candidate)
    return None if best is None else (best[1], best[2])


def _longest_open_prefix(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of ``text`` that begins some stop string."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest
