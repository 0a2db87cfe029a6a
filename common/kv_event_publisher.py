"""Publishes a node's KV events over ZMQ from a thread of its own.

The engine calls ``publish`` after a step and never waits. The thread encodes, numbers and sends; keeps
the last batches in a ring for replay and a mirror of all registered blocks for snapshots; and answers
readers (``common.kv_event_replies``). It does not depend on steps: what an idle node publishes goes out.

What cannot be told is never left believed: when a batch is lost (queue full, no encoding), readers get
AllBlocksCleared, and after it all registered blocks again if the node can list them.
"""

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import zmq

from common.errors import ConfigError
from common.kv_event_replies import HEAD_REQUEST, SNAPSHOT_REQUEST, ReplyServer, ReplyStats
from common.kv_events import (
    END_SEQ,
    AllBlocksCleared,
    KVEvent,
    KVEventBatch,
    encode_batch,
    encode_seq,
    with_int_hashes,
)
from common.kv_snapshot import BlockMirror, BlockRecord, Head, snapshot_parts, to_event

log = logging.getLogger(__name__)

SnapshotSource = Callable[[], list[BlockRecord]]

_BATCHES_PER_TURN = 32  # between two looks at the readers' requests
_LINGER_MS = 500  # at close, for messages that ZMQ has not handed to the network yet


@dataclass(frozen=True)
class PublisherLimits:
    """Bounds of everything the publisher keeps, and of how long it serves a slow reader."""

    queue_batches: int = 10_000
    ring_batches: int = 10_000
    ring_bytes: int = 64 << 20
    high_water_mark: int = 100_000  # messages ZMQ buffers for one subscriber; it drops those beyond
    replies: int = 16  # under way at a time; requests beyond get none
    reply_high_water_mark: int = 128  # messages ZMQ buffers for one reply; the rest waits
    reply_timeout_s: float = 30.0
    close_timeout_s: float = 2.0


@dataclass
class PublisherStats:
    """Counters since start."""

    num_batches: int = 0
    num_events: int = 0
    num_dropped_batches: int = 0  # the queue was full
    num_unencodable_batches: int = 0
    num_replays: int = 0
    num_snapshots: int = 0
    replies: ReplyStats = field(default_factory=ReplyStats)


@dataclass(frozen=True)
class _QueuedBatch:
    ts: float
    events: Sequence[KVEvent]


class _DroppedBatches:
    """Stands in the queue where batches were dropped."""


class KVEventPublisher:
    """One publisher a process and data-parallel rank. ``start`` binds, ``close`` ends the thread.

    ``snapshot_source`` lists all registered blocks. It is called on the publisher's thread while the
    engine runs; it may be ahead of the batches sent so far (applying a batch twice changes nothing) but
    not behind. Without it snapshots come from the mirror, exact at their seq, but after a lost batch
    readers learn only of blocks stored later.
    """

    def __init__(
        self,
        endpoint: str = "tcp://127.0.0.1:0",
        replay_endpoint: str = "tcp://127.0.0.1:0",
        *,
        topic: str = "",
        epoch: str | None = None,
        data_parallel_rank: int = 0,
        int_hashes: bool = True,
        snapshot_source: SnapshotSource | None = None,
        limits: PublisherLimits | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Port 0 takes a free one; ``endpoint`` and ``replay_endpoint`` tell which after ``start``.

        ``epoch`` is the process's random id. With ``int_hashes`` digests are published as integers.
        """
        self.endpoint = endpoint
        self.replay_endpoint = replay_endpoint
        self.epoch = epoch if epoch is not None else secrets.token_hex(8)
        self.last_seq = -1  # of the last batch sent; any thread may read it
        self.stats = PublisherStats()
        self._topic = topic.encode()
        self._rank = data_parallel_rank
        self._int_hashes = int_hashes
        self._source = snapshot_source
        self._limits = limits or PublisherLimits()
        self._clock = clock
        self._queue: deque[_QueuedBatch | _DroppedBatches] = deque()
        self._queue_lock = threading.Lock()
        self._ring: deque[tuple[int, bytes]] = deque()
        self._ring_bytes = 0
        self._mirror = BlockMirror()
        self._closing = False
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)

    def start(self) -> None:
        """Bind both sockets and send the first batch, AllBlocksCleared. Raises ConfigError if a port is
        taken."""
        self._pub = self._context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.SNDHWM, self._limits.high_water_mark)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.SNDHWM, self._limits.reply_high_water_mark)
        try:
            self.endpoint = _bind(self._pub, self.endpoint)
            self.replay_endpoint = _bind(self._router, self.replay_endpoint)
        except ConfigError:
            self._release()
            raise
        self._thread.start()

    def publish(self, events: Sequence[KVEvent]) -> None:
        """Queue one step's events, from any thread, without waiting. They must not change any more.

        Hashes may be digests or integers. An empty sequence publishes nothing.
        """
        if not events:
            return
        with self._queue_lock:
            if len(self._queue) < self._limits.queue_batches:
                self._queue.append(_QueuedBatch(self._clock(), events))
            else:
                self.stats.num_dropped_batches += 1
                if not isinstance(self._queue[-1], _DroppedBatches):
                    self._queue.append(_DroppedBatches())
            was_empty = len(self._queue) == 1
        if was_empty:
            self._wake()

    def close(self) -> None:
        """Send what is queued, end the thread, free the ports; waits ``close_timeout_s`` at most."""
        self._closing = True
        if self._thread.is_alive():
            self._wake()
            self._thread.join(self._limits.close_timeout_s)
            if self._thread.is_alive():
                log.warning("KV event publisher did not end in %.1f s", self._limits.close_timeout_s)
        elif not self._context.closed:
            self._release()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: woken already; closed: ended already
            self._wake_sender.send(b"\0")

    def _release(self) -> None:
        self._context.destroy(linger=_LINGER_MS)
        self._wake_receiver.close()
        self._wake_sender.close()

    # Everything below runs on the publisher's thread only.

    def _run(self) -> None:
        replies = ReplyServer(
            self._router,
            self._answer,
            self.stats.replies,
            max_replies=self._limits.replies,
            reply_timeout_s=self._limits.reply_timeout_s,
        )
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._wake_receiver, zmq.POLLIN)
        try:
            # Whoever followed this address before a restart must forget what it believed.
            self._send(self._clock(), [AllBlocksCleared()])
            while True:
                wait_s = replies.serve()
                if self._send_queued():
                    wait_s = 0.0
                elif self._closing:
                    return
                for ready, _ in poller.poll(int(wait_s * 1000)):
                    if ready is self._router:
                        replies.accept()
                    else:
                        self._drain_wakes()
        except Exception:
            log.exception("KV event publisher ended; subscribers will hear nothing more from this node")
        finally:
            self._release()

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_receiver.recv(4096):
                pass

    def _send_queued(self) -> bool:
        """Send some queued batches; whether there may be more."""
        for _ in range(_BATCHES_PER_TURN):
            with self._queue_lock:
                if not self._queue:
                    return False
                item = self._queue.popleft()
            if isinstance(item, _DroppedBatches) or not self._send(item.ts, item.events):
                self._forget_and_retell()
        return True

    def _send(self, ts: float, events: Sequence[KVEvent]) -> bool:
        """Encode, number, keep and send one batch; False, with no number used, if it has no encoding."""
        told = [with_int_hashes(event) for event in events] if self._int_hashes else list(events)
        try:
            payload = encode_batch(KVEventBatch(ts, told, self._rank))
        except (TypeError, ValueError, OverflowError) as error:
            log.error("KV event batch of %d events lost: %s", len(events), error)
            self.stats.num_unencodable_batches += 1
            return False
        seq = self.last_seq + 1
        self._keep(seq, payload)
        for event in told:
            self._mirror.apply(event)
        self.last_seq = seq
        self._pub.send_multipart([self._topic, encode_seq(seq), payload])
        self.stats.num_batches += 1
        self.stats.num_events += len(told)
        return True

    def _keep(self, seq: int, payload: bytes) -> None:
        self._ring.append((seq, payload))
        self._ring_bytes += len(payload)
        while len(self._ring) > self._limits.ring_batches or self._ring_bytes > self._limits.ring_bytes:
            _, oldest = self._ring.popleft()
            self._ring_bytes -= len(oldest)

    def _forget_and_retell(self) -> None:
        self._send(self._clock(), [AllBlocksCleared()])
        if self._source is not None:
            self._send(self._clock(), [to_event(record) for record in self._source()])

    def _answer(self, request: bytes) -> Iterable[list[bytes]] | None:
        """The reply's content is fixed now and encoded as it is sent."""
        if request == HEAD_REQUEST:
            return [[HEAD_REQUEST, msgspec.msgpack.encode(Head(self.epoch, self.last_seq))]]
        if request == SNAPSHOT_REQUEST:
            self.stats.num_snapshots += 1
            seq = self.last_seq  # read before the source, which may be ahead of it but not behind
            blocks = self._mirror.blocks() if self._source is None else self._source()
            return ([SNAPSHOT_REQUEST, part] for part in snapshot_parts(self.epoch, seq, blocks))
        if len(request) == 8:
            self.stats.num_replays += 1
            start_seq = int.from_bytes(request, "big")
            return self._replay([entry for entry in self._ring if entry[0] >= start_seq])
        return None

    def _replay(self, kept: list[tuple[int, bytes]]) -> Iterator[list[bytes]]:
        for seq, payload in kept:
            yield [self._topic, encode_seq(seq), payload]
        yield [b"", encode_seq(END_SEQ), b""]


def _bind(sock: zmq.Socket[bytes], endpoint: str) -> str:
    try:
        sock.bind(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"KV events cannot listen on {endpoint} ({error}); choose another port") from None
    return sock.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
