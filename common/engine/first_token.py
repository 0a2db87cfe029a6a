"""Token L as the prefill node sampled it: what the hand-over `carry` brings besides blocks and hidden rows.

It travels as the opaque ``extra`` of a transfer. Token L's log-probability goes with it, since D never sees
the logits, and so do the drafts that follow, which are a function of the known tokens (02-exactness 6).
"""

import msgspec

from common.engine.batch import RequestUpdate
from common.request import TokenLogprob


class FirstToken(msgspec.Struct, frozen=True, array_like=True):
    """``drafts``: proposed on P for the tokens after it."""

    token_id: int
    drafts: tuple[int, ...] = ()
    logprob: TokenLogprob | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(FirstToken)


def first_token_of(update: RequestUpdate) -> FirstToken | None:
    """What a prefill's last update says; None where it did not sample (hand-over `backoff`)."""
    if not update.new_tokens:
        return None
    logprob = update.logprobs[0] if update.logprobs else None
    return FirstToken(update.new_tokens[0], update.drafts, logprob)


def encode_first_token(first: FirstToken | None) -> bytes:
    """b"" for none."""
    return b"" if first is None else _encoder.encode(first)


def decode_first_token(extra: bytes) -> FirstToken | None:
    """The inverse; None also for what cannot be read: D then samples token L itself."""
    try:
        return _decoder.decode(extra) if extra else None
    except msgspec.DecodeError:
        return None
