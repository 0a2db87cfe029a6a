"""Who holds which encoder outputs, in encoded positions; how much a step may encode. No torch, no tensors.

An admitted request has its widest window reserved: whatever others hold, it can always encode the span that
its next token needs, so no request waits for another's outputs. Room that nobody reserved is lent to whoever
comes first. Outputs belong to one request and go when no later step reads them, at the latest with it.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from common.engine.encoder_rules import encodings_for, is_done, spans_of, widest_window
from common.errors import InvalidRequest
from common.extra_keys import MultimodalItem
from common.request import Request

Encoding = tuple[str, MultimodalItem]
"""(request id, span)."""


@dataclass
class _Share:
    """``spans`` are those that later steps may read; ``held`` by offset, those of them that are encoded."""

    spans: tuple[MultimodalItem, ...]
    reserved: int
    held: dict[int, MultimodalItem] = field(default_factory=dict)

    @property
    def num_held(self) -> int:
        return sum(span.length for span in self.held.values())

    @property
    def claim(self) -> int:
        return max(self.reserved, self.num_held)


class EncoderCache:
    """``capacity`` and ``max_per_step`` in encoded positions; 0 where there is no encoder."""

    def __init__(self, capacity: int, max_per_step: int, lookahead: int) -> None:
        self.capacity = capacity
        self.max_per_step = max_per_step
        self._lookahead = lookahead
        self._left = 0  # of this step's budget
        self._shares: dict[str, _Share] = {}
        self._freed: list[Encoding] = []

    @property
    def _spare(self) -> int:
        return self.capacity - sum(share.claim for share in self._shares.values())

    def check(self, request: Request) -> None:
        """Raises InvalidRequest for spans that this engine can never encode."""
        spans = spans_of(request)
        if not spans:
            return
        limit = min(self.capacity, self.max_per_step)
        if not limit:
            raise InvalidRequest("this model takes text only; remove the images and sounds")
        last = spans[-1]
        if last.end > request.num_prompt_tokens:
            raise InvalidRequest(
                f"span {last.identifier!r} ends at {last.end}, but the prompt has "
                f"{request.num_prompt_tokens} tokens; give offset and length inside it"
            )
        widest = widest_window(spans, self._lookahead)
        if widest > limit:
            raise InvalidRequest(
                f"images and sounds need {widest} encoded positions at once, this node holds {limit} "
                f"(cache {self.capacity}, {self.max_per_step} a step); send smaller or fewer ones"
            )

    def admit(self, request: Request, start: int) -> bool:
        """Reserves what the request needs from position ``start`` on; False, and nothing, for no room."""
        spans = tuple(s for s in spans_of(request) if not is_done(s, start, self._lookahead))
        reserved = widest_window(spans, self._lookahead)
        if reserved > self._spare:
            return False
        if spans:
            self._shares[request.request_id] = _Share(spans, reserved)
        return True

    def begin_step(self) -> None:
        self._left = self.max_per_step

    def limit(self, request: Request, num_new: int) -> int:
        """How many of its next ``num_new`` tokens the request may compute now."""
        return self._plan(request, num_new)[0]

    def take(self, request: Request, num_new: int) -> tuple[MultimodalItem, ...]:
        """The spans to encode before a step over ``num_new`` tokens, as `limit` allowed; held from now on."""
        allowed, chosen = self._plan(request, num_new)
        assert allowed == num_new, f"{request!r} may compute {allowed} tokens, not {num_new}"
        for span in chosen:
            self._shares[request.request_id].held[span.offset] = span
            self._left -= span.length
        return chosen

    def _plan(self, request: Request, num_new: int) -> tuple[int, tuple[MultimodalItem, ...]]:
        share = self._shares.get(request.request_id)
        if share is None or num_new <= 0:
            return num_new, ()
        room = min(self._left, self._spare + share.claim - share.num_held)
        return encodings_for(share.spans, share.held, request.num_computed, num_new, self._lookahead, room)

    def advance(self, request: Request) -> None:
        """After a step: drops the outputs that no later step reads."""
        share = self._shares.get(request.request_id)
        if share is None or not is_done(share.spans[0], request.num_computed, self._lookahead):
            return
        share.spans = tuple(s for s in share.spans if not is_done(s, request.num_computed, self._lookahead))
        for span in list(share.held.values()):
            if is_done(span, request.num_computed, self._lookahead):
                self._freed.append((request.request_id, share.held.pop(span.offset)))
        share.reserved = widest_window(share.spans, self._lookahead)
        if not share.spans:
            del self._shares[request.request_id]

    def release(self, request: Request) -> None:
        """Drops all that the request holds and has reserved; legal at any time."""
        share = self._shares.pop(request.request_id, None)
        if share is not None:
            self._freed += [(request.request_id, span) for span in share.held.values()]

    def take_freed(self) -> tuple[Encoding, ...]:
        freed, self._freed = tuple(self._freed), []
        return freed

    def check_invariants(self, active: Collection[str]) -> None:
        """``active``: requests that compute or will without being admitted again."""
        assert self._spare >= 0, f"{-self._spare} encoded positions more than the cache holds"
        for request_id, share in self._shares.items():
            assert request_id in active, f"{request_id} has encoder outputs, but does not run"
            assert set(share.held.values()) <= set(share.spans), f"{request_id} holds outputs of no use"
            assert share.spans, f"{request_id} needs no encoder and has a share"
