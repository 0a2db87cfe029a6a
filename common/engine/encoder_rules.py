"""When images and sounds are encoded and how long that is kept, as pure functions (02-exactness 2).

A step over positions q .. e-1 reads the tokens up to e-1+k, k the drafter's lookahead. So a span that begins
in the lookahead is encoded with the chunk before its own, a chunk whose next span cannot be encoded ends at
``offset - k``, and an output is of use until ``offset + length + k`` positions are computed.
"""

from collections.abc import Collection, Sequence

from common.extra_keys import MultimodalItem
from common.request import Request


def spans_of(request: Request) -> tuple[MultimodalItem, ...]:
    """The request's spans in order of position; none for a text request."""
    return () if request.extra_keys is None else request.extra_keys.multimodal


def is_done(span: MultimodalItem, num_computed: int, lookahead: int) -> bool:
    """Whether no later step reads the span's output."""
    return span.end + lookahead <= num_computed


def encodings_for(
    spans: Sequence[MultimodalItem],
    held: Collection[int],
    start: int,
    num_new: int,
    lookahead: int,
    room: int,
) -> tuple[int, tuple[MultimodalItem, ...]]:
    """(tokens that a step from ``start`` may compute, spans that it encodes first).

    ``held``: offsets of spans that are encoded; ``room``: positions that may be encoded now. The first span
    that does not fit ends the chunk ``lookahead`` tokens before itself; (0, ()) when that leaves nothing.
    """
    chosen: list[MultimodalItem] = []
    for span in spans:
        if span.offset >= start + num_new + lookahead:
            break
        if span.offset in held or is_done(span, start, lookahead):
            continue
        if span.length > room:
            num_new = max(0, span.offset - lookahead - start)
            break
        room -= span.length
        chosen.append(span)
    return (num_new, tuple(chosen)) if num_new > 0 else (0, ())


def widest_window(spans: Sequence[MultimodalItem], lookahead: int) -> int:
    """Most encoded positions that computing one token needs at once: what a request must be able to hold.

    It is largest where a span has just come into sight, ``lookahead`` before its offset.
    """
    widest = total = first = 0
    for span in spans:
        total += span.length
        while is_done(spans[first], max(0, span.offset - lookahead), lookahead):
            total -= spans[first].length
            first += 1
        widest = max(widest, total)
    return widest
