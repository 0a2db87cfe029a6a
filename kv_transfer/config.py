"""Settings of the KV transfer; scalar fields only, so that flags, variables and chart values derive from
them."""

import math
from dataclasses import dataclass, field, fields

from common.errors import ConfigError

TRANSPORT_CHOICES = ("auto", "ucx", "tcp")


@dataclass(frozen=True)
class TransferConfig:
    """How blocks and the carry cross between nodes. Both nodes of a pair may differ in every field."""

    transport: str = field(
        default="auto",
        metadata={"help": "auto: UCX where both nodes have it, else TCP; ucx or tcp: that one or refuse"},
    )
    chunk_bytes: int = field(
        default=2 * 1024 * 1024,
        metadata={
            "help": "bytes per message (1-4 MiB is fastest); consecutive blocks are packed up to this size"
        },
    )
    window_chunks: int = field(
        default=8, metadata={"help": "chunks of one transfer in flight at once; bounds staging memory"}
    )
    lease_s: float = field(
        default=30.0,
        metadata={"help": "seconds a prefill node keeps blocks for a decode node that shows no sign of life"},
    )
    heartbeat_s: float = field(
        default=1.0, metadata={"help": "seconds between heartbeats on a control connection"}
    )
    suspect_s: float = field(
        default=3.0, metadata={"help": "silence in seconds after which a peer is reported"}
    )
    dead_s: float = field(
        default=10.0,
        metadata={"help": "silence in seconds after which a peer is given up and its transfers fail"},
    )
    connect_timeout_s: float = field(
        default=10.0,
        metadata={
            "help": "seconds to reach a peer, compare fingerprints and open its data lane; a host that takes "
            "no connection within suspect_s is not waited for"
        },
    )
    fetch_timeout_s: float = field(
        default=120.0,
        metadata={"help": "seconds a whole transfer may take, the prefill's computing included"},
    )
    checksum: bool = field(
        default=True,
        metadata={"help": "verify an xxh3 digest of every chunk (nearly free); off only to measure"},
    )

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORT_CHOICES:
            raise ConfigError(
                f"transport is {self.transport!r}; choose one of {', '.join(TRANSPORT_CHOICES)}"
            )
        for f in fields(self):
            value = getattr(self, f.name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{f.name} is {value}; it must be positive")
        if not self.heartbeat_s < self.suspect_s <= self.dead_s:
            raise ConfigError(
                f"heartbeat_s {self.heartbeat_s} < suspect_s {self.suspect_s} <= dead_s {self.dead_s} "
                "does not hold"
            )
