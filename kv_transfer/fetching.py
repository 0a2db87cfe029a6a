"""Decode side, per transfer: posts receives, gives credit, verifies, places, reports, and fences at the end.

Driven by messages and by receives that end; the only waits are for the outcome and for quiet. A receive lands
directly in the destination blocks where their ids are consecutive and it brings all of them (not only some
heads), else in a staging buffer that is scattered after its digest was checked.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from common.errors import ProtocolViolation, TransferFailed
from common.kv_ticket import KVTicket
from kv_transfer.plan import (
    Chunk,
    RootDigest,
    chunk_digest,
    consecutive,
    plan_chunks,
    plan_digest,
    scatter,
    view_of,
)
from kv_transfer.protocol import (
    RETRYABLE_NAKS,
    Abort,
    AbortAck,
    ChunkSent,
    Commit,
    Credit,
    Failed,
    Finish,
    Nak,
    NakCode,
    Pull,
    PullOk,
    ReceiverEvent,
    ReceiverState,
    Released,
    receiver_machine,
    tag_base,
)
from kv_transfer.relayout import scatter_mapped
from kv_transfer.transport import Request

if TYPE_CHECKING:
    from kv_transfer.receiver import KvReceiver
    from kv_transfer.receiver_session import ReceiverSession

logger = logging.getLogger(__name__)

_QUIET_GRACE_S = 2.0  # for receives in flight to end by themselves before the lane is closed by force
# P is asked as soon as D has accepted the prompt: what it does not know for so long it never will.
_UNKNOWN_GRACE_S = 10.0

T = TypeVar("T")


class Fetch:
    def __init__(
        self,
        receiver: "KvReceiver",
        ticket: KVTicket,
        want: Mapping[int, Mapping[int, int]],
        cut: int,
        on_progress: Callable[[int], None] | None,
    ) -> None:
        self.ticket = ticket
        self.progress = 0  # tokens: the last value reported
        self.num_done = 0
        self.num_bytes = 0
        self.seconds_moving = 0.0
        self.machine = receiver_machine(ticket.transfer_id)
        self.attempt = receiver.new_attempt()
        self.key = (ticket.transfer_id, self.attempt)
        self._receiver = receiver
        self._pools = receiver.pools
        self._want = {g: dict(sorted(placed.items())) for g, placed in want.items()}
        self._cut = cut
        self._on_progress = on_progress
        self._loop = asyncio.get_running_loop()
        self._session: ReceiverSession | None = None
        self._outcome: asyncio.Future[Finish] = self._loop.create_future()
        self._tag_base = tag_base(self.attempt)
        self.chunks = plan_chunks(
            {g: list(placed) for g, placed in self._want.items()},
            self._pools.geometry,
            receiver.config.chunk_bytes,
        )
        self._num_posted = 0
        self._requests: dict[int, Request] = {}  # seq -> receive in flight
        self._staging: dict[int, memoryview] = {}
        self._landed: set[int] = set()
        self._digests: dict[int, bytes] = {}
        self._done: set[int] = set()
        # per group its chunks in order, and how many of them from the front are done
        self._order: dict[int, list[Chunk]] = {}
        for chunk in self.chunks:
            self._order.setdefault(chunk.group, []).append(chunk)
        self._front = dict.fromkeys(self._order, 0)
        self._stuck: dict[int, tuple[int, ...]] = {}  # seq -> its blocks, in quarantine
        self._caller_knows = False
        self._finish: Finish | None = None
        self._refused = False  # P serves nothing of ours: there is nothing to abort
        self._retry: asyncio.TimerHandle | None = None
        self._unknown_since: float | None = None
        self._quiet = asyncio.Event()
        self._moving_since: float | None = None

    # --- the walk ---

    async def unless_cancelled(self, waiting: Coroutine[Any, Any, T]) -> T:
        """``waiting``'s result, or TransferFailed as soon as the fetch is given up."""
        task = self._loop.create_task(waiting)
        try:
            both: set[asyncio.Future[Any]] = {task, self._outcome}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await self._outcome  # raises: before the pull there is no good outcome
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    async def run(self, session: "ReceiverSession") -> Finish:
        if session.lost is not None:
            raise TransferFailed(f"peer_lost: {session.lost}")
        self._session = session
        session.fetches[self.key] = self
        self.machine.handle(ReceiverEvent.CONNECTED)
        self._send_pull()
        finish = await self._outcome
        session.fetches.pop(self.key, None)
        return finish

    def cancel(self, reason: str) -> None:
        self.fail(f"cancelled: {reason}")

    def fail(self, reason: str) -> None:
        """Decides the outcome; the task that runs the fetch then fences."""
        if not self._outcome.done():
            self._outcome.set_exception(TransferFailed(reason))

    def _send_pull(self) -> None:
        self._retry = None
        assert self._session is not None
        self._session.send(
            Pull(
                transfer_id=self.ticket.transfer_id,
                attempt=self.attempt,
                generation=self.ticket.generation,
                incarnation=self.ticket.incarnation,
                want={g: list(placed) for g, placed in self._want.items()},
                chunk_bytes=self._receiver.config.chunk_bytes,
                tag_base=self._tag_base,
            )
        )

    # --- messages; the session has found us by (transfer, attempt) ---

    def handle(self, message: Nak | PullOk | ChunkSent | Finish | Failed | Released | AbortAck) -> None:
        try:
            match message:
                case Nak():
                    self._on_nak(message)
                case PullOk():
                    self._on_pull_ok(message)
                case ChunkSent():
                    self._on_chunk_sent(message)
                case Finish():
                    self.machine.handle(ReceiverEvent.FINISH)
                    self._on_finish(message)
                case Failed():
                    self.fail(f"refused: {message.reason}")
                case Released() | AbortAck():
                    pass  # what counts is that our own receives are terminal
        except ProtocolViolation as error:
            self._receiver.metrics.messages_unexpected += 1
            if self.machine.state not in (
                ReceiverState.FENCING,
                ReceiverState.FAILED,
                ReceiverState.COMMITTED,
            ):
                self.fail(f"protocol: {error}")

    def _on_nak(self, nak: Nak) -> None:
        if self.machine.state is not ReceiverState.ASKING:
            return  # "offered now", after a retry was already answered
        if nak.code not in RETRYABLE_NAKS:
            self._refused = True
            self.fail(f"{nak.code.value}: {nak.reason}")
            return
        if nak.code is NakCode.UNKNOWN:
            now = self._loop.time()
            if self._unknown_since is None:
                self._unknown_since = now
            if now - self._unknown_since > _UNKNOWN_GRACE_S:
                self.fail(f"unknown: the prefill node was not asked for this prompt in {_UNKNOWN_GRACE_S} s")
                return
        self.machine.handle(ReceiverEvent.RETRY)
        self._receiver.metrics.retries += 1
        if self._retry is not None:
            self._retry.cancel()
        self._retry = self._loop.call_later(nak.retry_ms / 1000, self._send_pull)

    def _on_pull_ok(self, ok: PullOk) -> None:
        self.machine.handle(ReceiverEvent.PULL_OK)
        if ok.num_chunks != len(self.chunks) or ok.plan_digest != plan_digest(self.chunks):
            self.fail(
                f"plan: the prefill node plans {ok.num_chunks} chunks, {len(self.chunks)} others are wanted"
            )
            return
        self._post_window()

    def _post_window(self) -> None:
        """Posts receives up to the window, then gives credit for them: a chunk never finds no receive."""
        session = self._session
        assert session is not None
        before = self._num_posted
        while (
            self._num_posted < len(self.chunks)
            and self._num_posted - self.num_done < self._receiver.config.window_chunks
            and not self._outcome.done()
        ):
            chunk = self.chunks[self._num_posted]
            view = self._destination(chunk)
            request = session.lane.post_recv(self._tag_base | chunk.seq, view)
            self._num_posted += 1
            self._requests[chunk.seq] = request
            request.add_done_callback(partial(self._on_landed, chunk))
        if self._num_posted > before and not self._outcome.done():
            session.send(
                Credit(transfer_id=self.ticket.transfer_id, attempt=self.attempt, credits=self._num_posted)
            )

    def _destination(self, chunk: Chunk) -> memoryview:
        pool = self._pools.groups[chunk.group]
        ids = self._block_ids(chunk)
        assert self._session is not None
        pair = self._session.maps[chunk.group]
        if pair.fills_blocks and consecutive(ids):
            return view_of(pool.array_NB[ids[0] : ids[-1] + 1])
        self._receiver.metrics.chunks_staged += 1
        staging = view_of(np.empty(len(ids) * pair.bytes_per_block, np.uint8))
        self._staging[chunk.seq] = staging
        return staging

    def _block_ids(self, chunk: Chunk) -> list[int]:
        placed = self._want[chunk.group]
        return [placed[p] for p in chunk.positions]

    def _on_chunk_sent(self, sent: ChunkSent) -> None:
        self.machine.handle(ReceiverEvent.CHUNK)
        if sent.seq in self._digests or not 0 <= sent.seq < self._num_posted:
            raise ProtocolViolation(f"chunk {sent.seq} is announced twice or without credit")
        self._digests[sent.seq] = sent.digest
        if self._moving_since is None:
            self._moving_since = self._loop.time()
        self._complete(self.chunks[sent.seq])

    def _on_landed(self, chunk: Chunk, request: Request) -> None:
        """A receive is terminal, for good or bad; nothing writes to its destination any more."""
        self._requests.pop(chunk.seq, None)
        if not self._requests:
            self._quiet.set()
        if self.machine.state is ReceiverState.QUARANTINED:
            self._release_quiet()
        if request.error is not None:
            self.fail(f"peer_lost: receiving chunk {chunk.seq} failed: {request.error}")
            if self._session is not None:
                self._session.lane_broke(f"its lane broke: {request.error}")
        elif not self._outcome.done():
            self._landed.add(chunk.seq)
            try:
                self._complete(chunk)
            except Exception as error:  # nobody above would hear of it
                logger.exception("transfer %s broke", self.ticket.transfer_id)
                self.fail(f"internal: {error!r}")

    def _complete(self, chunk: Chunk) -> None:
        """Both the bytes and the announcement are here: verify, place, report, give more credit."""
        seq = chunk.seq
        if seq not in self._landed or seq not in self._digests or seq in self._done or self._outcome.done():
            return
        pool = self._pools.groups[chunk.group]
        ids = self._block_ids(chunk)
        staged = self._staging.pop(seq, None)
        view = staged if staged is not None else view_of(pool.array_NB[ids[0] : ids[-1] + 1])
        digest = self._digests[seq]
        if digest and self._receiver.config.checksum and chunk_digest(view) != digest:
            self.fail(
                f"checksum: chunk {seq} of group {chunk.group}, block positions {chunk.positions[0]} to "
                f"{chunk.positions[-1]}, arrived damaged"
            )
            return
        if staged is not None:
            assert self._session is not None
            pair = self._session.maps[chunk.group]
            if pair.fills_blocks:
                scatter(pool, ids, staged)
            else:
                scatter_mapped(pair, pool, ids, staged)
        self._done.add(seq)
        self.num_done += 1
        self.num_bytes += len(view)
        self._receiver.metrics.bytes_received += len(view)
        self._receiver.metrics.chunks_received += 1
        if len(self._digests) == self.num_done:
            self._stop_clock()
        self._report(chunk.group)
        self._post_window()
        self._commit_if_complete()

    def _report(self, group: int) -> None:
        order, front = self._order[group], self._front[group]
        while front < len(order) and order[front].seq in self._done:
            front += 1
        self._front[group] = front
        upto = self._cut
        for g, chunks in self._order.items():
            if self._front[g] < len(chunks):
                first_missing = chunks[self._front[g]].positions[0]
                upto = min(upto, first_missing * self._pools.groups[g].block_size)
        self._advance(upto)

    def _advance(self, upto: int) -> None:
        if upto <= self.progress:
            return
        self.progress = upto
        if self._on_progress is not None:
            try:
                self._on_progress(upto)
            except Exception as error:  # the caller's bug must not leave receives running
                logger.exception("on_progress(%d) of transfer %s failed", upto, self.ticket.transfer_id)
                self.fail(f"internal: on_progress failed: {error!r}")

    def _on_finish(self, finish: Finish) -> None:
        if finish.final_upto < self._cut:
            self.fail(
                f"short: the prefill node computed {finish.final_upto} positions, {self._cut} are wanted"
            )
            return
        self._finish = finish
        self._commit_if_complete()

    def _commit_if_complete(self) -> None:
        finish = self._finish
        if finish is None or self.num_done < len(self.chunks) or self._outcome.done():
            return
        root = RootDigest(self.ticket.transfer_id, self.attempt)
        for chunk in self.chunks:
            root.add(chunk, self._digests[chunk.seq])
        if root.finish(finish.carry, finish.extra) != finish.root:
            self.fail("checksum: the root digest over chunks, carry and extra differs")
            return
        self._advance(self._cut)
        if self._outcome.done():
            return
        self.machine.handle(ReceiverEvent.COMPLETE)
        assert self._session is not None
        self._session.send(
            Commit(transfer_id=self.ticket.transfer_id, attempt=self.attempt, root=finish.root)
        )
        self._outcome.set_result(finish)

    def _stop_clock(self) -> None:
        if self._moving_since is not None:
            self.seconds_moving += self._loop.time() - self._moving_since
            self._moving_since = None

    # --- the fence ---

    async def quiesce(self, reason: str) -> dict[int, tuple[int, ...]]:
        """Makes every receive terminal: P fills unused credits with empty messages; if P does not, the lane
        is closed by force. Returns the destination blocks of receives that did not end (normally none)."""
        self.fail(reason)
        if not self._outcome.cancelled():
            self._outcome.exception()  # it has been seen
        self._stop_clock()
        if self._retry is not None:
            self._retry.cancel()
        if self.machine.allows(ReceiverEvent.STOP):
            self.machine.handle(ReceiverEvent.STOP)
        session = self._session
        if session is None:
            return {}
        if session.lost is None and not self._refused:
            session.send(
                Abort(
                    transfer_id=self.ticket.transfer_id,
                    attempt=self.attempt,
                    generation=self.ticket.generation,
                    credits=self._num_posted,
                    reason=reason,
                )
            )
            if self._requests:
                self._quiet.clear()
                waits = {
                    self._loop.create_task(self._quiet.wait()),
                    self._loop.create_task(session.lost_event.wait()),
                }
                await asyncio.wait(waits, timeout=_QUIET_GRACE_S, return_when=asyncio.FIRST_COMPLETED)
                for task in waits:
                    task.cancel()
                await asyncio.gather(*waits, return_exceptions=True)
        if self._requests:
            self._receiver.metrics.fences_forced += 1
            await session.close(f"receives of transfer {self.ticket.transfer_id} do not end")
        session.fetches.pop(self.key, None)
        if not self._requests:
            if self.machine.allows(ReceiverEvent.QUIET):  # not when the deadline came with the commit
                self.machine.handle(ReceiverEvent.QUIET)
            self._staging.clear()
            return {}
        self.machine.handle(ReceiverEvent.STUCK)
        blocks: dict[int, tuple[int, ...]] = {}
        for seq in self._requests:
            chunk = self.chunks[seq]
            if seq not in self._staging:  # a staging buffer is ours anyway
                self._stuck[seq] = tuple(self._block_ids(chunk))
                blocks[chunk.group] = blocks.get(chunk.group, ()) + self._stuck[seq]
        self._receiver.quarantine(blocks, session.lane)
        return blocks

    def caller_knows(self) -> None:
        """The outcome, and with it the blocks in quarantine, has been told: only now can they be returned."""
        self._caller_knows = True
        self._release_quiet()

    def _release_quiet(self) -> None:
        if not self._caller_knows:
            return
        for seq in [seq for seq in self._stuck if seq not in self._requests]:
            self._receiver.release_quarantine(self.chunks[seq].group, self._stuck.pop(seq))
        if not self._requests and self.machine.allows(ReceiverEvent.QUIET):
            self.machine.handle(ReceiverEvent.QUIET)
            self._staging.clear()
