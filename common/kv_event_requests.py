"""What a reader asks a publisher of KV events: a replay, its head, a snapshot. Each with a deadline.

Every request has a DEALER socket of its own: a reply that comes too late goes nowhere, instead of being
taken for the next one's. (A REQ socket would break after the first message of a reply.)
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import msgspec
import zmq
import zmq.asyncio

from common.kv_event_replies import HEAD_REQUEST, SNAPSHOT_REQUEST
from common.kv_events import END_SEQ, UndecodableBatch, decode_seq, encode_seq
from common.kv_snapshot import BlockRecord, Head, SnapshotPart

_head_decoder = msgspec.msgpack.Decoder(Head)
_part_decoder = msgspec.msgpack.Decoder(SnapshotPart)


@dataclass(frozen=True)
class ReplayedBatch:
    seq: int
    payload: bytes


@dataclass(frozen=True)
class Snapshot:
    """All registered blocks of a publisher as of ``seq`` (or a little later)."""

    epoch: str
    seq: int
    blocks: list[BlockRecord]


class ReplayClient:
    """Asks one publisher. Every answer is None when it did not come in time, or made no sense.

    ``message_timeout_s`` bounds the wait for each message of a reply, ``reply_timeout_s`` all of them.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: str,
        *,
        message_timeout_s: float,
        reply_timeout_s: float,
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._message_timeout_s = message_timeout_s
        self._reply_timeout_s = reply_timeout_s

    async def replay(self, start_seq: int) -> list[ReplayedBatch] | None:
        """The batches from ``start_seq`` on that are still kept: consecutive, the first perhaps later
        than asked for, none when there is nothing new."""
        batches: list[ReplayedBatch] = []
        async for message in self._messages(encode_seq(start_seq)):
            match message:  # some publishers leave the topic out
                case [_, seq_frame, payload] | [seq_frame, payload]:
                    pass
                case _:
                    return None
            try:
                seq = decode_seq(seq_frame)
            except UndecodableBatch:
                return None
            if seq == END_SEQ:
                return batches
            if batches and seq != batches[-1].seq + 1:
                return None
            batches.append(ReplayedBatch(seq, payload))
        return None

    async def head(self) -> Head | None:
        async for message in self._messages(HEAD_REQUEST):
            try:
                return _head_decoder.decode(message[-1])
            except msgspec.DecodeError:
                return None
        return None

    async def snapshot(self) -> Snapshot | None:
        blocks: list[BlockRecord] = []
        async for message in self._messages(SNAPSHOT_REQUEST):
            try:
                part = _part_decoder.decode(message[-1])
            except msgspec.DecodeError:
                return None
            blocks += part.blocks
            if part.last:
                return Snapshot(part.epoch, part.seq, blocks)
        return None

    async def _messages(self, request: bytes) -> AsyncIterator[list[bytes]]:
        """Messages of the reply without the empty frame; ends early at a deadline."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._reply_timeout_s
        dealer = self._context.socket(zmq.DEALER)
        try:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.connect(self._endpoint)
            await dealer.send_multipart([b"", request])
            while True:
                wait_s = min(self._message_timeout_s, deadline - clock())
                if wait_s <= 0 or not await dealer.poll(int(wait_s * 1000)):
                    return
                empty, *message = await dealer.recv_multipart()
                if empty == b"" and message:
                    yield message
        finally:
            dealer.close(linger=0)
