"""When a sequence ends on its own: end-of-sequence, stop ids and stop strings, token by token.

Called for every token before it counts, so a stop inside an accepted run drops what follows it.
"""

from collections.abc import Callable, Collection, Sequence

from common.detokenizer import IncrementalDetokenizer
from common.request import FinishReason, Request
from common.stop_strings import StopMatcher


class StopChecker:
    """Checks one sequence. ``make_detokenizer`` is called only where stop strings are asked for."""

    def __init__(
        self,
        request: Request,
        eos_token_ids: Collection[int] = (),
        make_detokenizer: Callable[[], IncrementalDetokenizer] | None = None,
    ) -> None:
        sampling = request.sampling
        self._request = request
        self._ends = frozenset((*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)))
        self._matcher = StopMatcher(sampling.stop)
        self._detokenizer = make_detokenizer() if sampling.stop and make_detokenizer else None
        # A continued stream (fail-over) starts with outputs: their text may begin a match.
        outputs = request.token_ids[request.num_prompt_tokens :]
        for count, token in enumerate(outputs, start=1):
            self._match(token, count)

    @property
    def stop_string(self) -> str | None:
        return self._matcher.matched

    def check(self, token: int) -> FinishReason | None:
        """Whether ``token``, just appended to the request, ends it."""
        count = self._request.num_output_tokens
        self._match(token, count)
        if count < self._request.sampling.min_tokens:
            return None
        if self._matcher.matched is not None or token in self._ends:
            return FinishReason.STOP
        return None

    def append(self, tokens: Sequence[int], limit: int) -> tuple[tuple[int, ...], FinishReason | None]:
        """Appends ``tokens`` to the request up to the first that ends it; nothing past it is kept.

        ``limit`` is the longest sequence the engine holds.
        """
        request = self._request
        for i, token in enumerate(tokens):
            request.token_ids.append(token)
            reason = self.check(token)
            if reason is None and (
                request.num_output_tokens >= request.sampling.max_tokens or request.num_tokens >= limit
            ):
                reason = FinishReason.LENGTH
            if reason is not None:
                request.stop_string = self.stop_string
                return tuple(tokens[: i + 1]), reason
        return tuple(tokens), None

    def _match(self, token: int, count: int) -> None:
        if self._detokenizer is not None:
            piece = self._detokenizer.push((token,))
            self._matcher.push(piece, check=count >= self._request.sampling.min_tokens)
