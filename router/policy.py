"""Where a request goes: pure functions of what the router knows about its nodes.

The decode node comes first: the one that holds the longest prefix of the prompt, unless it is much busier
than another. Then the prefill node, by the same rule - or none, when so little is missing on the decode
node that moving KV would cost more than computing it. The cut is that of the hand-over: the prompt's end for
`carry`, a few tokens before it for `backoff`.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Candidate:
    """A live node as the policy sees it.

    ``load`` counts requests: those it reported, plus those sent to it since. ``cached_tokens`` is the
    prefix of this prompt that its cache holds.
    """

    node_id: str
    load: int
    cached_tokens: int = 0
    free_blocks: int = 0


@dataclass(frozen=True)
class Placement:
    """``prefill`` None: the decode node computes the whole prompt. ``cut``: positions that P computes."""

    decode: Candidate
    prefill: Candidate | None
    cut: int


def rank(candidates: Sequence[Candidate], busy_tolerance: int) -> list[Candidate]:
    """Best first: longest prefix among nodes at most ``busy_tolerance`` requests busier than the idlest,
    then the busier ones by load. Equal nodes go by load, room and name."""
    if not candidates:
        return []
    idlest = min(c.load for c in candidates)

    def cost(c: Candidate) -> tuple[bool, int, int, int, str]:
        too_busy = c.load > idlest + busy_tolerance
        return (too_busy, 0 if too_busy else -c.cached_tokens, c.load, -c.free_blocks, c.node_id)

    return sorted(candidates, key=cost)


def cut_of(num_prompt_tokens: int, num_modules: int) -> int | None:
    """C = L - max(1, N-1), the positions that a prefill node computes; None if nothing is left for it.

    The decode node computes at least one position, for the logits of the first new token, and the last
    N-1 so that every slot below the cut is exact (but one, which the carry row settles).
    """
    backoff = max(1, num_modules - 1)
    return num_prompt_tokens - backoff if num_prompt_tokens > backoff else None


def place(
    num_prompt_tokens: int,
    num_modules: int,
    decode: Candidate,
    prefill_candidates: Sequence[Candidate],
    *,
    busy_tolerance: int,
    min_remote_prefill_tokens: int,
    computes_alone: bool = False,
    carry: bool = False,
) -> Placement:
    """Decides whether ``decode`` gets help, and from whom. ``computes_alone``: it is an aggregated node;
    ``carry``: the prefill node computes the whole prompt."""
    cut = num_prompt_tokens if carry else cut_of(num_prompt_tokens, num_modules)
    ranked = rank(prefill_candidates, busy_tolerance)
    missing = num_prompt_tokens - decode.cached_tokens
    if computes_alone or not ranked or cut is None or missing < min_remote_prefill_tokens:
        return Placement(decode, None, 0)
    if decode.cached_tokens >= cut:
        return Placement(decode, None, 0)
    return Placement(decode, ranked[0], cut)
