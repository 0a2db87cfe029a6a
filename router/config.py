"""Configuration of the router: one dataclass, composed of small groups."""

from dataclasses import dataclass, field

from common.config import LogOptions, ModelOptions, option

HANDOFFS = ("backoff", "carry")


@dataclass(frozen=True)
class ListenOptions:
    """Where the router listens."""

    host: str = option("127.0.0.1", "address to listen on, for HTTP and for the control channel")
    port: int = option(8000, "HTTP port; 0: a free one", minimum=0)
    control_port: int = option(8001, "ZMQ port that nodes connect to; 0: a free one", minimum=0)
    drain_timeout_s: float = option(20.0, "longest wait for running requests at shutdown, seconds", minimum=0)
    metrics_compat: bool = option(False, "also expose metrics under the vllm: names that dashboards know")


@dataclass(frozen=True)
class Timeouts:
    """The longest wait of each leg of a request, in seconds."""

    heartbeat_timeout_s: float = option(5.0, "silence after which a node counts as dead", minimum=0.1)
    reserve_timeout_s: float = option(25.0, "for a decode node to accept a request", minimum=0.1)
    prefill_timeout_s: float = option(120.0, "for the prompt to be computed", minimum=0.1)
    transfer_timeout_s: float = option(30.0, "for the KV blocks to cross, beyond the prefill", minimum=0.1)
    first_token_timeout_s: float = option(30.0, "for the first token once the prompt is there", minimum=0.1)
    between_tokens_timeout_s: float = option(30.0, "between tokens of a request", minimum=0.1)


@dataclass(frozen=True)
class Limits:
    """What one router takes on."""

    max_requests: int = option(1024, "requests in flight; further ones are answered 429", minimum=1)
    max_body_bytes: int = option(8 << 20, "largest HTTP request body", minimum=1)
    max_decode_attempts: int = option(3, "decode nodes tried for a request before its first token", minimum=1)


@dataclass(frozen=True)
class PolicyOptions:
    """How requests are placed on nodes."""

    handoff: str = option(
        "backoff",
        "hand-over of a prompt: the decode node computes its last tokens (backoff), or the prefill node does "
        "and samples the first token too (carry; requests for several sequences use backoff)",
        choices=HANDOFFS,
    )
    min_remote_prefill_tokens: int = option(
        32, "prompt tokens missing on the decode node below which it computes them itself", minimum=1
    )
    busy_tolerance: int = option(
        4, "requests by which a node with a longer cached prefix may be busier than the idlest", minimum=0
    )


@dataclass(frozen=True)
class RouterConfig:
    listen: ListenOptions = field(default_factory=ListenOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    timeouts: Timeouts = field(default_factory=Timeouts)
    limits: Limits = field(default_factory=Limits)
    policy: PolicyOptions = field(default_factory=PolicyOptions)
    log: LogOptions = field(default_factory=LogOptions)
