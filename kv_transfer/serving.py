"""Prefill side, per transfer: what is held (:class:`Offer`) and how it is sent to one reader
(:class:`Serve`).

Nothing here awaits: every event (more blocks, more credit, a send that ended) calls ``pump`` or ``settle``,
which do what has become possible. An offer's blocks are pinned while its lease lives or a send still reads
them.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from common.kv_cache.layout import cdiv
from kv_transfer.geometry import GroupMap
from kv_transfer.metrics import TransferMetrics
from kv_transfer.plan import Chunk, KvPools, RootDigest, chunk_digest, gather
from kv_transfer.protocol import (
    AbortAck,
    ChunkSent,
    Failed,
    Finish,
    Message,
    SenderEvent,
    SenderState,
    sender_machine,
)
from kv_transfer.relayout import gather_mapped
from kv_transfer.transport import Lane, Request

logger = logging.getLogger(__name__)


@dataclass
class Offer:
    """Blocks that the prefill node holds for one transfer. Owner of the blocks: the engine, which must not
    free them before ``on_released``."""

    transfer_id: str
    generation: int
    lease_s: float
    deadline: float  # of the lease, on the loop's clock
    blocks: dict[int, dict[int, int]] = field(default_factory=dict)  # group -> position -> block id
    final_upto: int = 0  # tokens
    finished: tuple[bytes, bytes] | None = None  # (carry, extra)
    serve: "Serve | None" = None
    reason: str = ""  # why it stopped, once it did

    def __post_init__(self) -> None:
        self.machine = sender_machine(self.transfer_id)

    def touch(self, now: float) -> None:
        self.deadline = now + self.lease_s

    def positions_of(self, chunk: Chunk, pair: GroupMap) -> list[int]:
        """Positions of the blocks of P that a chunk is made of, ascending. The end of D's last block may lie
        past the end of a finished prompt, where P has no blocks; its beginning never does."""
        end = cdiv(self.final_upto, pair.source.block_size) if self.finished is not None else None
        spans = [pair.source_positions(position) for position in chunk.positions]
        needed = (p for span in spans for p in span if end is None or p < end or p == span.start)
        return list(dict.fromkeys(needed))  # several blocks of D may lie in one of P

    def block_ids(self, chunk: Chunk, pair: GroupMap) -> dict[int, int] | None:
        """P's block position -> block id for a chunk; None while one of them is not final."""
        held = self.blocks.get(chunk.group, {})
        ids = {p: held.get(p, -1) for p in self.positions_of(chunk, pair)}
        return None if -1 in ids.values() else ids

    def first_missing(self, chunks: tuple[Chunk, ...], maps: Sequence[GroupMap]) -> str | None:
        """Names the first wanted block that is not held."""
        for chunk in chunks:
            held = self.blocks.get(chunk.group, {})
            for position in self.positions_of(chunk, maps[chunk.group]):
                if position not in held:
                    return f"block at position {position} of group {chunk.group}"
        return None


class Serve:
    """One attempt of one reader to pull an offer over one lane."""

    def __init__(
        self,
        offer: Offer,
        attempt: int,
        tag_base: int,
        chunks: tuple[Chunk, ...],
        pools: KvPools,
        maps: Sequence[GroupMap],
        lane: Lane,
        send: Callable[[Message], None],
        stop: Callable[[Offer, SenderEvent, str], None],
        settled: Callable[["Serve"], None],
        now: Callable[[], float],
        metrics: TransferMetrics,
        checksum: bool,
    ) -> None:
        self.offer = offer
        self.transfer_id = offer.transfer_id
        self.generation = offer.generation
        self.attempt = attempt
        self.chunks = chunks
        self.credits = 0
        self.next_seq = 0
        self.num_reading = 0  # sends that still read the offer's blocks
        self.num_pending = 0  # the same and the empty messages of an abort
        self.aborted = False
        self._all_held = False  # every wanted block is, once the prompt is finished
        self._tag_base = tag_base
        self._pools = pools
        self._maps = maps  # by group: from this node's blocks to the reader's
        self._lane = lane
        self._send = send
        self._stop = stop
        self._settled = settled
        self._now = now
        self._metrics = metrics
        self._checksum = checksum
        self._root = RootDigest(offer.transfer_id, attempt)

    def pump(self) -> None:
        """Sends what credit, finality and the lease allow; then, once, the finish message."""
        offer = self.offer
        while offer.machine.state is SenderState.SENDING and self.next_seq < min(
            self.credits, len(self.chunks)
        ):
            chunk = self.chunks[self.next_seq]
            ids = offer.block_ids(chunk, self._maps[chunk.group])
            if ids is None:
                break
            if not self._lease_holds():
                return
            self._post(chunk, ids)
        if offer.machine.state is not SenderState.SENDING or offer.finished is None:
            return
        if not self._all_held:  # looked at once: it takes a pass over all chunks, and every credit comes here
            missing = offer.first_missing(self.chunks[self.next_seq :], self._maps)
            if missing is not None:
                self._stop(offer, SenderEvent.FAIL, f"prefill node does not hold the wanted {missing}")
                return
            self._all_held = True
        if self.next_seq == len(self.chunks) and self._lease_holds():
            carry, extra = offer.finished
            offer.machine.handle(SenderEvent.FINISH_SENT)
            self._send(
                Finish(
                    transfer_id=self.transfer_id,
                    attempt=self.attempt,
                    final_upto=offer.final_upto,
                    carry=carry,
                    extra=extra,
                    root=self._root.finish(carry, extra),
                )
            )

    def _lease_holds(self) -> bool:
        """Checked for every chunk: blocks whose lease is over may belong to somebody else at any moment."""
        if self.generation == self.offer.generation and self._now() < self.offer.deadline:
            return True
        self._stop(self.offer, SenderEvent.EXPIRE, "lease_expired")
        return False

    def _post(self, chunk: Chunk, block_ids: dict[int, int]) -> None:
        pool, pair = self._pools.groups[chunk.group], self._maps[chunk.group]
        if pair.is_identity:
            view, copied = gather(pool, list(block_ids.values()))
        else:
            view, copied = gather_mapped(pair, pool, chunk.positions, block_ids), True
        digest = chunk_digest(view) if self._checksum else b""
        request = self._lane.post_send(self._tag_base | chunk.seq, view)
        self._root.add(chunk, digest)
        self.next_seq += 1
        self.num_reading += 1
        self.num_pending += 1
        self._send(
            ChunkSent(transfer_id=self.transfer_id, attempt=self.attempt, seq=chunk.seq, digest=digest)
        )
        self._metrics.chunks_sent += 1
        self._metrics.chunks_staged += copied

        def ended(request: Request) -> None:
            self.num_reading -= 1
            self.num_pending -= 1
            if request.error is None:
                self._metrics.bytes_sent += len(view)
            elif self.offer.machine.allows(SenderEvent.FAIL):
                self._stop(self.offer, SenderEvent.FAIL, f"sending chunk {chunk.seq} failed: {request.error}")
            self._settled(self)

        request.add_done_callback(ended)

    def abort(self, credits: int) -> None:
        """The reader gives up. Every receive that it posted and that no chunk will fill gets an empty
        message, so that all its receives end by themselves; AbortAck follows when our sends have ended."""
        self.aborted = True
        for seq in range(self.next_seq, min(credits, len(self.chunks))):
            self.num_pending += 1
            self._lane.post_send(self._tag_base | seq, memoryview(b"")).add_done_callback(self._void_ended)
        self._settled(self)

    def _void_ended(self, request: Request) -> None:
        self.num_pending -= 1
        self._settled(self)

    def tell_failed(self, reason: str) -> None:
        """The reader answers with Abort, which brings the credits that need an empty message."""
        self._send(Failed(transfer_id=self.transfer_id, attempt=self.attempt, reason=reason))

    def acknowledge_abort(self) -> None:
        self._send(AbortAck(transfer_id=self.transfer_id, attempt=self.attempt))
