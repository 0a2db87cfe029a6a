"""Configuration of a decode node: one dataclass, composed of the shared option groups."""

from dataclasses import dataclass, field

from common.config import EngineOptions, LogOptions, ModelOptions, NodeOptions, option
from kv_transfer.config import TransferConfig


@dataclass(frozen=True)
class DecodeOptions:
    """What only a decode node has."""

    aggregated: bool = option(False, "compute every prompt here: a cluster without prefill nodes")
    admission_timeout_s: float = option(
        20.0, "longest wait for room before a request is refused, seconds; below the router's", minimum=0
    )
    on_transfer_failure: str = option(
        "recompute",
        "recompute: keep what arrived and compute the rest here; fail: end the request with an error",
        choices=("recompute", "fail"),
    )


@dataclass(frozen=True)
class DecodeConfig:
    decode: DecodeOptions = field(default_factory=DecodeOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    node: NodeOptions = field(default_factory=NodeOptions)
    log: LogOptions = field(default_factory=LogOptions)
