"""Drafts by lookup: where the last tokens occurred before, what followed there is proposed.

Prompt lookup decoding: no model, no KV, lookahead 0. Longer matches win over later ones. A sampled request's
drafts are certain choices, so q is 1 on each of them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from common.engine.batch import ScheduledRequest
from common.engine.drafter import Choice, Drafts, Verified
from common.engine.sampler import DraftDistribution
from common.engine.speculation import Speculation, lookup

LONGEST, SHORTEST = 4, 2


class NgramIndex:
    """Where every n-gram of a growing token list ended last, except at its very end."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._last: dict[tuple[int, ...], int] = {}  # n-gram -> position after it

    def propose(self, known: Sequence[int], count: int) -> list[int]:
        """Up to ``count`` tokens that followed the longest earlier match of the end of ``known``."""
        for position in range(len(self._tokens), len(known)):
            # The n-grams that end before this position become earlier ones now.
            for n in range(SHORTEST, LONGEST + 1):
                if position >= n:
                    self._last[tuple(known[position - n : position])] = position
            self._tokens.append(known[position])
        for n in range(min(LONGEST, len(known)), SHORTEST - 1, -1):
            start = self._last.get(tuple(known[-n:]))
            if start is not None:
                return list(known[start : start + count])
        return []


class NgramDrafter:
    """Implements `Drafter`."""

    def __init__(self, num_drafts: int, vocab_size: int, choose: Choice | None = None) -> None:
        self.speculation: Speculation = lookup(num_drafts)
        self._vocab_size = vocab_size
        self._choose = choose
        self._indices: dict[str, NgramIndex] = {}

    def run(
        self, entries: Sequence[ScheduledRequest], verified: Sequence[Verified], hidden: Sequence[Tensor]
    ) -> list[Drafts]:
        return [self._draft(e, v) if e.samples else Drafts() for e, v in zip(entries, verified, strict=True)]

    def forget(self, request_id: str) -> None:
        self._indices.pop(request_id, None)

    def carry_rows(self, request_id: str, at_most: int | None = None) -> bytes | None:
        return None

    def distribution(self, drafts: Drafts) -> DraftDistribution | None:
        return DraftDistribution(torch.stack(drafts.log_q), None) if drafts.log_q else None

    def _draft(self, entry: ScheduledRequest, verified: Verified) -> Drafts:
        known = [*entry.known, *verified.tokens]
        index = self._indices.setdefault(entry.request_id, NgramIndex())
        ids = index.propose(known, self.speculation.num_drafts)
        if self._choose is not None:
            ids = [self._choose(entry.request_id, len(known) + i, token) for i, token in enumerate(ids)]
        if entry.sampling.fixed:
            return Drafts(ids)
        return Drafts(ids, [self._certain(token) for token in ids])

    def _certain(self, token: int) -> Tensor:
        log_q = torch.full((self._vocab_size,), float("-inf"))
        if 0 <= token < self._vocab_size:
            log_q[token] = 0.0
        return log_q
