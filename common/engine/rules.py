"""The scheduler's rules as pure functions: what a step may hold, how a chunk ends, what is final.

From 02-exactness 2 and 3 of the design; each is tested by itself and by breaking it.
"""

from dataclasses import dataclass

from common.engine.speculation import NO_SPECULATION, Speculation
from common.errors import ConfigError
from common.request import Request


@dataclass(frozen=True)
class SchedulerConfig:
    """``max_model_len`` counts prompt and output. Encoder outputs (`encoder_cache`) are counted in positions
    of the prompt; 0 for models that take text only."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    speculation: Speculation = NO_SPECULATION
    long_prefill_token_threshold: int = 0
    max_encoder_tokens: int = 0
    encoder_cache_tokens: int = 0

    def __post_init__(self) -> None:
        chunk, lookahead = self.max_chunk, self.speculation.lookahead
        if chunk < lookahead + 1:
            raise ConfigError(
                f"a step may hold {chunk} tokens (max_num_batched_tokens {self.max_num_batched_tokens}, "
                f"long_prefill_token_threshold {self.long_prefill_token_threshold}), but a drafter that "
                f"looks {lookahead} tokens ahead needs at least {lookahead + 1}; raise the smaller one"
            )

    @property
    def max_chunk(self) -> int:
        """Most tokens of one prompt in one step."""
        threshold = self.long_prefill_token_threshold
        return min(self.max_num_batched_tokens, threshold) if threshold else self.max_num_batched_tokens

    @property
    def tail(self) -> int:
        """Tokens that a hit, a lost carry row or a fork leaves to compute: they refill the carry."""
        return self.speculation.tail


def next_share(
    request: Request, budget: int, config: SchedulerConfig, limit: int
) -> tuple[int, tuple[int, ...]]:
    """(known tokens, drafts) of the request's next piece of work within ``budget``; (<= 0, ()) for none.

    ``limit`` is the longest sequence this engine holds.
    """
    todo = request.end - request.num_computed
    num_new = min(todo, budget, config.max_chunk)
    if num_new == todo:
        if request.stop_at is not None:
            return num_new, ()
        # A step that verifies n drafts may emit n + 1 tokens: never past the request's own end.
        left = min(request.sampling.max_tokens - request.num_output_tokens, limit - request.num_tokens)
        return num_new, request.drafts[: max(0, min(budget - num_new, left - 1))]
    # Reserve rule: a chunk ends the prompt or leaves at least k known tokens.
    remaining = request.num_tokens - request.num_computed - num_new
    lookahead = config.speculation.lookahead
    if 0 < remaining < lookahead:
        num_new -= lookahead - remaining
    return num_new, ()


def final_upto(request: Request, lookahead: int) -> int:
    """Positions below it are never written again: min(num_computed, T - k + 1)."""
    if lookahead == 0:
        return request.num_computed
    return max(0, min(request.num_computed, request.num_tokens - lookahead))


def is_pinned(request: Request) -> bool:
    """A prefill whose blocks a transfer may be reading: it owns all of them from its start and keeps them."""
    return request.stop_at is not None and request.hold_blocks
