"""What passes between scheduler and runner: values, made new every step."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from common.extra_keys import MultimodalItem
from common.kv_cache.manager import BlockCopy
from common.request import FinishReason, Request, SamplingParams, TokenLogprob


@dataclass(frozen=True)
class ScheduledRequest:
    """One request's share of a step: positions ``start`` .. ``start + num_new + len(drafts) - 1``.

    ``known`` and ``tables`` are the scheduler's own lists, lent for the duration of the step.
    """

    request_id: str
    known: Sequence[int]  # all known tokens; T = len(known) - 1
    start: int  # q: first position to compute
    num_new: int  # known tokens computed in this step
    drafts: tuple[int, ...]  # tokens after T to verify; empty unless the step reaches T
    samples: bool  # the step reaches T, so token T+1 is drawn
    tables: Sequence[Sequence[int]]  # physical blocks by KV group and block position
    sampling: SamplingParams
    num_prompt: int
    handover_carry: bytes | None = None  # hidden rows of the positions just below `start`, from P
    encode: tuple[MultimodalItem, ...] = ()  # spans to encode before the step

    @property
    def end(self) -> int:
        """One past the last position computed, drafts included."""
        return self.start + self.num_new + len(self.drafts)


@dataclass(frozen=True)
class ScheduledBatch:
    """``forgotten``: requests whose tensors the runner drops before the step; ``freed_encodings``: (request
    id, span) of encoder outputs that it drops, likewise first."""

    entries: tuple[ScheduledRequest, ...]
    copies: tuple[BlockCopy, ...] = ()
    forgotten: tuple[str, ...] = ()
    freed_encodings: tuple[tuple[str, MultimodalItem], ...] = ()


@dataclass(frozen=True)
class RequestOutput:
    """What the runner did for one entry. ``tokens``: accepted drafts, then the token drawn by the trunk."""

    tokens: tuple[int, ...] = ()
    num_accepted: int = 0
    next_drafts: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None


@dataclass(frozen=True)
class RunnerOutput:
    """One RequestOutput per entry of the batch, in order."""

    outputs: tuple[RequestOutput, ...]


@dataclass(frozen=True)
class RequestSummary:
    """What a finished sequence used; counters as in `SpecStats`."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted: int
    accepted_per_pos: tuple[int, ...]
    verified_per_pos: tuple[int, ...]


@dataclass(frozen=True)
class RequestUpdate:
    """What a step changed for one request, as its owner hears it."""

    request_id: str
    new_tokens: tuple[int, ...] = ()
    offset: int = 0  # of the first new token in the sequence's output
    logprobs: tuple[TokenLogprob, ...] | None = None
    drafts: tuple[int, ...] = ()  # proposed for the tokens after them
    final_upto: int = 0  # positions whose KV no later step writes again
    num_computed: int = 0
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    summary: RequestSummary | None = None  # present iff the sequence ended


@dataclass(frozen=True)
class StepOutput:
    """``forked``: (parent, child) ids of sequences that began in this step."""

    updates: tuple[RequestUpdate, ...] = ()
    forked: tuple[tuple[str, str], ...] = ()
    num_scheduled_tokens: int = 0
    preempted: tuple[str, ...] = field(default=())


def summary_of(request: Request) -> RequestSummary:
    """What the sequence has used so far."""
    spec = request.spec
    return RequestSummary(
        request.num_prompt_tokens,
        request.num_output_tokens,
        request.num_cached_tokens,
        spec.num_drafts,
        spec.num_draft_tokens,
        spec.num_accepted,
        tuple(spec.accepted_per_pos),
        tuple(spec.verified_per_pos),
    )
