"""The text of one choice: token ids in, text that may be sent out, with the log-probabilities it belongs to.

Tokens go one by one through the incremental detokenizer and the stop strings, as they do on the node, so
both end the answer at the same place. A token's log-probability is released when all of its text is out:
what a stop string holds back or cuts off does not leak through it.
"""

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from common.request import SamplingParams, TokenLogprob
from common.stop_strings import StopMatcher
from common.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScoredToken:
    """A token of the answer; ``offset`` is where its text begins, in characters."""

    token_id: int
    offset: int
    logprob: TokenLogprob


@dataclass(frozen=True)
class Delta:
    """What one choice adds. ``finish_reason`` is set on its last delta."""

    index: int
    text: str
    scored: tuple[ScoredToken, ...] = ()
    finish_reason: str | None = None


class ChoiceText:
    def __init__(self, index: int, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self.index = index
        self.finished = False
        self._detokenizer = tokenizer.detokenizer()
        self._matcher = StopMatcher(sampling.stop)
        self._min_tokens = sampling.min_tokens
        # A token that ends the answer has no text in it.
        ends = sampling.stop_token_ids if sampling.ignore_eos else (
            *sampling.stop_token_ids, *tokenizer.eos_token_ids
        )  # fmt: skip
        self._end_ids = frozenset(ends)
        self._num_tokens = 0
        self._num_characters = 0  # detokenized so far, held back or not
        self._pending: deque[tuple[int, ScoredToken]] = deque()  # with the end of the token's text

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None) -> Delta | None:
        """The next tokens; None if nothing may be sent yet."""
        text = ""
        for position, token_id in enumerate(token_ids):
            start = self._num_characters
            self._num_tokens += 1
            may_end = self._num_tokens >= self._min_tokens
            if not (may_end and token_id in self._end_ids):
                text += self._take(self._detokenizer.push([token_id]), check=may_end)
            if logprobs is not None:
                scored_token = ScoredToken(token_id, start, logprobs[position])
                self._pending.append((self._num_characters, scored_token))
        scored = self._release()
        return Delta(self.index, text, scored) if text or scored else None

    def finish(self, reason: str, stop_string: str | None) -> Delta:
        """The node ended the sequence for ``reason``."""
        self.finished = True
        text = self._take(self._detokenizer.flush(), check=True)
        if self._matcher.matched is None:
            if stop_string is None:
                text += self._matcher.flush()
            else:
                logger.warning("the node stopped at %r, which the text does not contain", stop_string)
        if self._matcher.matched is None:
            scored = tuple(token for _, token in self._pending)
        else:
            scored, reason = self._release(), "stop"
        self._pending.clear()
        return Delta(self.index, text, scored, reason)

    def _take(self, piece: str, *, check: bool) -> str:
        self._num_characters += len(piece)
        return self._matcher.push(piece, check=check)

    def _release(self) -> tuple[ScoredToken, ...]:
        released = []
        while self._pending and self._pending[0][0] <= self._matcher.num_emitted:
            released.append(self._pending.popleft()[1])
        return tuple(released)
