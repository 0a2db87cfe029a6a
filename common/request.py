"""A request as the engine sees it: sampling parameters, states, and the one mutable Request.

    WAITING -> RUNNING -> FINISHED                     an ordinary request
    WAITING -> RUNNING -> HELD -> FINISHED             P: computed to its cut, blocks held for the transfer
    RECEIVING_KV -> READY -> RUNNING -> FINISHED       D: blocks reserved, KV arriving, prompt finished here
    RUNNING -> WAITING                                 preempted: recomputed later from its known tokens

Role is data: `stop_at` and `hold_blocks` make a prefill, `reserve` makes a hand-over; the engine never asks
which kind of node it is. No torch here.
"""

import enum
from dataclasses import dataclass, field

import msgspec

from common.block_hash import ExtraKeys


class RequestState(enum.Enum):
    WAITING = "waiting"
    RECEIVING_KV = "receiving_kv"
    READY = "ready"
    RUNNING = "running"
    HELD = "held"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    CUT = "cut"  # a prefill reached `stop_at`, and the sequence goes on elsewhere


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How tokens are chosen. Validated at the router; every process may rely on the ranges.

    temperature 0 is greedy. ``seed`` None draws from the request id, so that a retry on another node
    draws the same numbers but different requests do not. ``logprobs`` is the number of alternatives
    reported beside the chosen token (0: the chosen one only), None for none.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    logit_bias: dict[int, float] = {}

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def fixed(self) -> bool:
        """Tokens are a function of the known ones and the seed: drafts are verified without what they were
        drawn from."""
        return self.greedy or self.seed is not None

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of a chosen token under the unmodified model, and the most likely alternatives."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class SpecStats:
    """What was verified (02-exactness 5): a step that verified n > 0 drafts is one draft."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    verified_per_pos: list[int] = field(default_factory=list)
    accepted_per_pos: list[int] = field(default_factory=list)

    def record(self, verified: int, accepted: int) -> None:
        if verified == 0:
            return
        while len(self.verified_per_pos) < verified:
            self.verified_per_pos.append(0)
            self.accepted_per_pos.append(0)
        self.num_drafts += 1
        self.num_draft_tokens += verified
        self.num_accepted += accepted
        for i in range(verified):
            self.verified_per_pos[i] += 1
            self.accepted_per_pos[i] += i < accepted

    @property
    def acceptance_length(self) -> float:
        return 1.0 + self.num_accepted / self.num_drafts if self.num_drafts else 1.0


@dataclass(eq=False)
class Request:
    """One sequence. Owned by the scheduler; nobody else writes to it.

    ``token_ids`` are the known tokens, prompt and outputs; drafts are never among them.
    ``num_computed`` counts positions of known tokens whose trunk KV is in the pool.
    ``tables[g]`` are the physical blocks of KV group g by block position; 0 is the null block.
    """

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    stop_at: int | None = None  # P: compute positions below it, then stop; at its last one token L is sampled
    hold_blocks: bool = False  # P: keep the blocks until `release`
    priority: int = 0  # lower runs first
    num_sequences: int = 1  # n of the API: forks made once the prompt is computed
    extra_keys: ExtraKeys | None = None
    lora_name: str | None = None
    arrival_time_s: float = 0.0

    state: RequestState = RequestState.WAITING
    num_prompt_tokens: int = 0
    num_computed: int = 0
    num_cached_tokens: int = 0  # prompt tokens that a local hit or a received transfer saved
    tables: list[list[int]] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_registered: list[int] = field(default_factory=list)  # per group: blocks offered to the cache so far
    drafts: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    num_preemptions: int = 0
    spec: SpecStats = field(default_factory=SpecStats)

    def __post_init__(self) -> None:
        if self.num_prompt_tokens == 0:
            self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def end(self) -> int:
        """Positions to compute before the request samples or stops."""
        return self.num_tokens if self.stop_at is None else self.stop_at

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.state.value}, tokens={self.num_tokens}"
            f"(+{len(self.drafts)}), computed={self.num_computed})"
        )


def sequences_of(parent: Request) -> list[Request]:
    """Requests for sequences 1..n-1 of an ``n`` request: same prompt, other random numbers."""
    children = []
    for index in range(1, parent.num_sequences):
        sampling = parent.sampling
        if sampling.seed is not None:
            sampling = msgspec.structs.replace(sampling, seed=sampling.seed + index)
        children.append(
            Request(
                request_id=f"{parent.request_id}#{index}",
                token_ids=list(parent.token_ids),
                sampling=sampling,
                priority=parent.priority,
                extra_keys=parent.extra_keys,
                lora_name=parent.lora_name,
                arrival_time_s=parent.arrival_time_s,
                num_prompt_tokens=parent.num_prompt_tokens,
                num_cached_tokens=parent.num_cached_tokens,
                block_hashes=list(parent.block_hashes),
            )
        )
    return children
