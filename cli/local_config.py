"""Configuration of commands that run engines in their own process."""

from dataclasses import dataclass, field

from common.config import EngineOptions, LogOptions, ModelOptions, option
from common.model.registry import DEFAULT_MODEL
from kv_transfer.config import TransferConfig


@dataclass(frozen=True)
class DefaultModelOptions(ModelOptions):
    model: str = option(DEFAULT_MODEL, "model: a shipped or prepared name, a checkpoint folder, or a hub id")


@dataclass(frozen=True)
class QuietLogOptions(LogOptions):
    log_level: str = option(
        "warning", "least severe level written", choices=("debug", "info", "warning", "error")
    )


@dataclass(frozen=True)
class EngineConfig:
    """One engine."""

    model: DefaultModelOptions = field(default_factory=DefaultModelOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)


@dataclass(frozen=True)
class ClusterConfig(EngineConfig):
    """Several nodes."""

    transfer: TransferConfig = field(default_factory=TransferConfig)
    log: QuietLogOptions = field(default_factory=QuietLogOptions)
