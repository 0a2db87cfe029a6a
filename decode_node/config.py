"""Configuration of a decode node: one dataclass, composed of the shared option groups."""

from dataclasses import dataclass, field

from common.config import EngineOptions, LogOptions, ModelOptions, NodeOptions
from kv_transfer.config import TransferConfig


@dataclass(frozen=True)
class DecodeConfig:
    model: ModelOptions = field(default_factory=ModelOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    node: NodeOptions = field(default_factory=NodeOptions)
    log: LogOptions = field(default_factory=LogOptions)
