"""Counters of one sender or receiver, and how a node publishes them (names and help: common/metrics.py)."""

from collections import Counter
from dataclasses import dataclass, field

from common.metrics import Metrics


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
    leases_live: int = 0  # now
    leases_expired: int = 0
    retries: int = 0
    fences_forced: int = 0
    blocks_quarantined: int = 0  # ever
    blocks_in_quarantine: int = 0  # now
    peers_lost: int = 0
    peers_suspected: int = 0
    messages_unexpected: int = 0  # late, duplicate, foreign or undecodable: counted, never fatal
    sessions_open: int = 0  # now
    failures: Counter[str] = field(default_factory=Counter)
    transports: Counter[str] = field(default_factory=Counter)  # lanes opened by transport name


def publish(counted: TransferMetrics, metrics: Metrics) -> None:
    """Brings a node's series up to ``counted``. On the event loop, which writes the numbers."""
    for name, total in (
        ("attempts", counted.transfers_started),
        ("commits", counted.transfers_committed),
        ("retries", counted.retries),
        ("received_bytes", counted.bytes_received),
        ("sent_bytes", counted.bytes_sent),
        ("chunks_staged", counted.chunks_staged),
        ("leases_expired", counted.leases_expired),
        ("blocks_quarantined", counted.blocks_quarantined),
        ("forced_fences", counted.fences_forced),
        ("peers_suspected", counted.peers_suspected),
        ("peers_lost", counted.peers_lost),
        ("unexpected_messages", counted.messages_unexpected),
    ):
        metrics.set_total(f"kv_transfer_{name}", total)
    metrics.set_total("kv_transfer_chunks", counted.chunks_sent, "sent")
    metrics.set_total("kv_transfer_chunks", counted.chunks_received, "received")
    metrics.set_total("kv_transfer_seconds", counted.seconds_waiting, "waiting")
    metrics.set_total("kv_transfer_seconds", counted.seconds_moving, "moving")
    for reason, total in counted.failures.items():
        metrics.set_total("kv_transfer_failures", total, reason)
    for transport, total in counted.transports.items():
        metrics.set_total("kv_transfer_lanes", total, transport)
    metrics.gauge("kv_transfer_leases").set(counted.leases_live)
    metrics.gauge("kv_transfer_quarantined_blocks").set(counted.blocks_in_quarantine)
    metrics.gauge("kv_transfer_sessions").set(counted.sessions_open)
