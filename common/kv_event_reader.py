"""Follows one publisher of KV events and makes good what it missed.

    live batch is the next one     -> Events
    numbers are missing            -> Gap, then by replay: Events ..., CaughtUp
                                      or, where the ring no longer has them: SnapshotLoaded, CaughtUp
                                      or, where there is no snapshot either: Lost
    another process took over      -> Restarted, then as for a gap from 0
    nothing heard for a while      -> asks where the publisher stands; behind: as for a gap

Between Gap and CaughtUp what is known of the publisher may be wrong. Foreign publishers have neither head
nor snapshot (``snapshots=False``): there a restart shows as a lower number only.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import zmq
import zmq.asyncio

from common.kv_event_requests import ReplayClient, ReplayedBatch
from common.kv_event_tracker import SequenceTracker, Verdict
from common.kv_event_updates import (
    CaughtUp,
    Events,
    Gap,
    Lost,
    Restarted,
    SnapshotLoaded,
    Undecodable,
    Update,
)
from common.kv_events import UndecodableBatch, decode_batch, decode_seq
from common.kv_snapshot import Head


@dataclass(frozen=True)
class ReaderTimeouts:
    """All waits of a reader, in seconds."""

    idle_probe_s: float = 2.0  # silence after which the publisher is asked where it stands
    in_flight_s: float = 0.1  # a batch that the publisher has sent may be this long on its way
    message_s: float = 2.0  # for each message of a reply
    reply_s: float = 30.0  # for a whole reply


class KVEventReader:
    """``async with KVEventReader(...) as reader: async for update in reader.updates(): ...``

    Starts with a replay from 0 (or a snapshot), so a late reader ends up knowing the same as an early
    one. One ``updates()`` at a time; it ends only by being closed or cancelled.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        topic: str = "",
        snapshots: bool = True,
        timeouts: ReaderTimeouts | None = None,
        context: zmq.asyncio.Context | None = None,
    ) -> None:
        """Without ``replay_endpoint`` every gap is Lost. A ``context`` given is shared, not ended."""
        self.endpoint = endpoint
        self.epoch: str | None = None
        self._topic = topic
        self._timeouts = timeouts or ReaderTimeouts()
        self._owns_context = context is None
        self._context = zmq.asyncio.Context() if context is None else context
        self._replay_endpoint = replay_endpoint
        self._snapshots = snapshots and replay_endpoint is not None
        self._tracker = SequenceTracker()
        self._told_head: Head | None = None
        self._told = asyncio.Event()
        self._unrecovered = False  # a gap is open that a later try may close

    @property
    def next_seq(self) -> int:
        """The first batch that has not been accounted for."""
        return self._tracker.next_seq

    async def __aenter__(self) -> Self:
        self._sub = self._context.socket(zmq.SUB)
        self._sub.setsockopt(zmq.LINGER, 0)
        self._sub.setsockopt(zmq.RCVHWM, 100_000)
        self._sub.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
        # A peer that vanished without a word is noticed, and the connection made again.
        self._sub.setsockopt(zmq.HEARTBEAT_IVL, 2_000)
        self._sub.setsockopt(zmq.HEARTBEAT_TIMEOUT, 6_000)
        self._sub.setsockopt_string(zmq.SUBSCRIBE, self._topic)
        self._sub.connect(self.endpoint)
        self._client: ReplayClient | None = None
        if self._replay_endpoint is not None:
            self._client = ReplayClient(
                self._context,
                self._replay_endpoint,
                message_timeout_s=self._timeouts.message_s,
                reply_timeout_s=self._timeouts.reply_s,
            )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._sub.close(linger=0)
        if self._owns_context:
            self._context.destroy(linger=0)

    def note_head(self, epoch: str, seq: int) -> None:
        """Tell what a heartbeat said of the publisher, from the reader's own event loop. A new epoch or
        a number ahead of ours starts recovery at once, even if the stream is silent."""
        self._told_head = Head(epoch, seq)
        self._told.set()

    async def updates(self) -> AsyncIterator[Update]:
        """What to apply, in order. Does not raise for anything that a publisher does."""
        async for update in self._recover():
            yield update
        clock = asyncio.get_running_loop().time
        next_probe = clock() + self._timeouts.idle_probe_s
        while True:
            message = await self._receive(next_probe - clock())
            if message is not None:
                async for update in self._on_message(message):
                    yield update
                if not self._unrecovered:
                    next_probe = clock() + self._timeouts.idle_probe_s
            if self._told_head is not None:
                head, self._told_head = self._told_head, None
                self._told.clear()
                async for update in self._on_head(head):
                    yield update
            if clock() >= next_probe:
                async for update in self._probe():
                    yield update
                next_probe = clock() + self._timeouts.idle_probe_s

    async def _receive(self, wait_s: float) -> list[bytes] | None:
        """The next live message, or None after ``wait_s`` or as soon as a heartbeat told something."""
        try:
            return await self._sub.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            pass
        if wait_s <= 0 or self._told.is_set():
            return None
        readable = asyncio.ensure_future(self._sub.poll(int(wait_s * 1000) + 1))
        told = asyncio.ensure_future(self._told.wait())
        try:
            await asyncio.wait({readable, told}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            readable.cancel()
            told.cancel()
        try:
            return await self._sub.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    async def _on_message(self, message: list[bytes]) -> AsyncIterator[Update]:
        try:
            _, seq_frame, payload = message
            seq = decode_seq(seq_frame)
        except (ValueError, UndecodableBatch) as error:
            yield Undecodable(None, f"message of {len(message)} frames: {error}")
            return
        verdict = self._tracker.judge(seq, payload)
        restarted = verdict is Verdict.RESTART
        if restarted:
            self._tracker.restarted()
            self.epoch = None
            yield Restarted(None)
            verdict = self._tracker.judge(seq, payload)
        if verdict is Verdict.GAP:
            epoch = self.epoch
            yield Gap(self._tracker.next_seq, seq - 1)
            async for update in self._recover(upto=seq - 1):
                yield update
            if epoch is not None and self.epoch != epoch:
                return  # which process this batch is from cannot be told; a later number will
        # Above next_seq now would be a batch that the publisher itself does not have: a former process's.
        if self._tracker.next_seq == seq:
            yield self._decoded(seq, payload, replayed=False)
            self._tracker.applied(seq)
            if restarted and verdict is Verdict.NEXT:  # seen from its first batch on
                yield CaughtUp(seq, "live")

    async def _on_head(self, head: Head) -> AsyncIterator[Update]:
        if self.epoch is not None and head.epoch != self.epoch:
            self._tracker.restarted()
            self.epoch = head.epoch
            yield Restarted(head.epoch)
            async for update in self._recover():
                yield update
            return
        self.epoch = head.epoch
        if head.seq < self._tracker.next_seq and not self._unrecovered:
            return
        if not self._unrecovered and await self._sub.poll(int(self._timeouts.in_flight_s * 1000)):
            return  # what is ahead of us is arriving; if not all of it, the next head will tell
        if head.seq >= self._tracker.next_seq:
            yield Gap(self._tracker.next_seq, head.seq)
        async for update in self._recover(upto=head.seq):
            yield update

    async def _probe(self) -> AsyncIterator[Update]:
        if self._client is None:
            return
        if self._snapshots:
            head = await self._client.head()
            if head is not None:
                async for update in self._on_head(head):
                    yield update
            return
        # A foreign publisher: ask for what comes next; mostly that is nothing.
        missed = await self._client.replay(self._tracker.next_seq)
        if missed and missed[0].seq == self._tracker.next_seq:
            yield Gap(missed[0].seq, missed[-1].seq)
            for update in self._apply_replay(missed):
                yield update
            yield CaughtUp(missed[-1].seq, "replay")

    async def _recover(self, upto: int | None = None) -> AsyncIterator[Update]:
        """Get everything from ``next_seq`` on: at least to ``upto``, else as far as there is any."""
        missed: list[ReplayedBatch] | None = None
        reachable = self._client is not None
        if self._snapshots and self._client is not None:
            head = await self._client.head()
            reachable = head is not None
            if head is not None and self.epoch not in (None, head.epoch):
                # Numbers of two processes must not be mixed: from 0, and without a bound.
                upto = None
                self._tracker.restarted()
                yield Restarted(head.epoch)
            if head is not None:
                self.epoch = head.epoch
        if reachable and self._client is not None and not self._unrecovered:
            first = self._tracker.next_seq
            missed = await self._client.replay(first)
            if missed is not None and (not missed or missed[0].seq == first):
                for update in self._apply_replay(missed):
                    yield update
                if upto is None or self._tracker.next_seq > upto:
                    yield CaughtUp(self._tracker.next_seq - 1, "replay")
                    return
        if reachable and self._client is not None and self._snapshots:
            snapshot = await self._client.snapshot()
            if snapshot is not None:
                if snapshot.epoch != self.epoch:
                    self._tracker.restarted()
                self.epoch = snapshot.epoch
                self._tracker.applied(snapshot.seq)
                self._unrecovered = False
                yield SnapshotLoaded(snapshot.epoch, snapshot.seq, snapshot.blocks)
                yield CaughtUp(snapshot.seq, "snapshot")
                return
        self._unrecovered = self._snapshots
        if missed:
            upto = max(missed[0].seq - 1, -1 if upto is None else upto)
        if upto is not None and upto >= self._tracker.next_seq:
            yield Lost(self._tracker.next_seq, upto)
            self._tracker.applied(upto)
        for update in self._apply_replay(missed or []):
            yield update

    def _apply_replay(self, batches: list[ReplayedBatch]) -> list[Update]:
        updates: list[Update] = []
        for batch in batches:
            if batch.seq == self._tracker.next_seq:
                updates.append(self._decoded(batch.seq, batch.payload, replayed=True))
                self._tracker.applied_by_replay(batch.seq, batch.payload)
        return updates

    def _decoded(self, seq: int, payload: bytes, *, replayed: bool) -> Update:
        try:
            return Events(seq, decode_batch(payload), replayed)
        except UndecodableBatch as error:
            return Undecodable(seq, str(error))
