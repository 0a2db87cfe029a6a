"""Counters of one sender or receiver; the node reads them and publishes them under its own names."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class TransferMetrics:
    """Plain numbers, written on the event loop only. ``failures`` counts by the reason's first word group."""

    bytes_sent: int = 0
    bytes_received: int = 0
    chunks_sent: int = 0
    chunks_received: int = 0
    chunks_staged: int = 0  # needed a copy because block ids were not consecutive
    transfers_started: int = 0
    transfers_committed: int = 0
    seconds_waiting: float = 0.0
    seconds_moving: float = 0.0
    leases_expired: int = 0
    retries: int = 0
    fences_forced: int = 0
    blocks_quarantined: int = 0  # ever
    blocks_in_quarantine: int = 0  # now
    peers_lost: int = 0
    peers_suspected: int = 0
    messages_unexpected: int = 0  # late, duplicate, foreign or undecodable: counted, never fatal
    sessions_open: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    transports: Counter[str] = field(default_factory=Counter)  # lanes opened by transport name
