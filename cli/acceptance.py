"""What speculation did, as a response's `usage.baton` tells it, added up and printed.

Counters count what was verified: per-position rates divide by the steps that verified that position, the
acceptance length is 1 + accepted / drafts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any


@dataclass(frozen=True)
class Acceptance:
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    accepted_per_pos: tuple[int, ...] = ()
    verified_per_pos: tuple[int, ...] = ()

    @classmethod
    def from_usage(cls, usage: Mapping[str, Any]) -> "Acceptance":
        """Reads `usage.baton`; zeros where the server sends none."""
        figures = usage.get("baton") or {}
        return cls(
            num_drafts=int(figures.get("num_drafts", 0)),
            num_draft_tokens=int(figures.get("num_draft_tokens", 0)),
            num_accepted=int(figures.get("num_accepted", 0)),
            accepted_per_pos=tuple(figures.get("accepted_per_pos", ())),
            verified_per_pos=tuple(figures.get("verified_per_pos", ())),
        )

    def __add__(self, other: "Acceptance") -> "Acceptance":
        return Acceptance(
            self.num_drafts + other.num_drafts,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted + other.num_accepted,
            _added(self.accepted_per_pos, other.accepted_per_pos),
            _added(self.verified_per_pos, other.verified_per_pos),
        )

    @property
    def length(self) -> float:
        """Tokens per verified step, the bonus token included."""
        return 1.0 + self.num_accepted / self.num_drafts if self.num_drafts else 1.0

    @property
    def rate_per_pos(self) -> tuple[float, ...]:
        """Share of verifications that accepted the draft at each position (and so all before it)."""
        return tuple(a / v for a, v in zip(self.accepted_per_pos, self.verified_per_pos, strict=True) if v)

    def describe(self) -> str:
        if not self.num_drafts:
            return "no drafts were verified"
        per_position = " / ".join(f"{rate:.2f}" for rate in self.rate_per_pos)
        return (
            f"{self.num_drafts} drafts of {self.num_draft_tokens} tokens, {self.num_accepted} accepted; "
            f"acceptance length {self.length:.2f}, per position {per_position}"
        )


def _added(a: Sequence[int], b: Sequence[int]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip_longest(a, b, fillvalue=0))
