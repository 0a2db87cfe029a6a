"""The blocks that a node has announced and not removed: kept beside the event stream, sent on request.

A reader that comes late or was too slow for the replay ring takes a snapshot instead: every registered
block with parent and position, as of one sequence number. Our own format: msgpack, token ids packed as
little-endian u32, split into parts so that no message holds up the live stream.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from common.kv_events import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    KVEvent,
    stored_token_ids,
)

BLOCKS_PER_PART = 1024


class BlockRecord(msgspec.Struct, frozen=True, omit_defaults=True, array_like=True, gc=False):
    """One registered block. ``position`` is that of its first token, None if its parent was unknown."""

    block_hash: BlockHash
    parent_block_hash: BlockHash | None
    position: int | None
    block_size: int
    packed_token_ids: bytes
    packed_lookahead: bytes | None
    extra_keys: Sequence[Any] | None
    lora_name: str | None
    medium: str | None
    group_idx: int | None

    @property
    def token_ids(self) -> list[int]:
        return unpack_ids(self.packed_token_ids)

    @property
    def lookahead_token_ids(self) -> list[int] | None:
        return None if self.packed_lookahead is None else unpack_ids(self.packed_lookahead)


class Head(msgspec.Struct, frozen=True):
    """Where a publisher stands: ``seq`` is the last one sent, -1 before the first."""

    epoch: str
    seq: int


class SnapshotPart(msgspec.Struct, frozen=True):
    """Blocks of one snapshot; all of its parts carry the same epoch and seq."""

    epoch: str
    seq: int
    blocks: list[BlockRecord]
    last: bool


def pack_ids(ids: Iterable[int]) -> bytes:
    values = list(ids)
    return struct.pack(f"<{len(values)}I", *values)


def unpack_ids(packed: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(packed) // 4}I", packed))


class BlockMirror:
    """Follows an event stream and knows what is registered after each batch. Not thread-safe."""

    def __init__(self) -> None:
        # dicts keep the order of insertion, so parents come before their children
        self._blocks: dict[tuple[int | None, str | None, BlockHash], BlockRecord] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def apply(self, event: KVEvent) -> None:
        match event:
            case BlockStored():
                for record in self.records_of(event):
                    self.add(record)
            case BlockRemoved():
                for block_hash in event.block_hashes:
                    self._blocks.pop((event.group_idx, event.medium, block_hash), None)
            case AllBlocksCleared():
                self._blocks.clear()

    def add(self, record: BlockRecord) -> None:
        self._blocks[(record.group_idx, record.medium, record.block_hash)] = record

    def blocks(self) -> list[BlockRecord]:
        return list(self._blocks.values())

    def records_of(self, event: BlockStored) -> Iterator[BlockRecord]:
        """The event's blocks one by one, with positions as far as the first one's parent is known."""
        parent = event.parent_block_hash
        position: int | None = 0
        if parent is not None:
            known = self._blocks.get((event.group_idx, event.medium, parent))
            position = None
            if known is not None and known.position is not None:
                position = known.position + known.block_size
        for index, block_hash in enumerate(event.block_hashes):
            lookahead = event.lookahead_token_ids
            yield BlockRecord(
                block_hash=block_hash,
                parent_block_hash=parent,
                position=position,
                block_size=event.block_size,
                packed_token_ids=pack_ids(stored_token_ids(event, index)),
                packed_lookahead=None if lookahead is None else pack_ids(lookahead[index]),
                extra_keys=None if event.extra_keys is None else event.extra_keys[index],
                lora_name=event.lora_name,
                medium=event.medium,
                group_idx=event.group_idx,
            )
            parent = block_hash
            if position is not None:
                position += event.block_size


def to_event(record: BlockRecord) -> BlockStored:
    """The event that announces this block."""
    lookahead = record.lookahead_token_ids
    return BlockStored(
        block_hashes=[record.block_hash],
        parent_block_hash=record.parent_block_hash,
        token_ids=record.token_ids,
        block_size=record.block_size,
        lora_id=None,
        medium=record.medium,
        lora_name=record.lora_name,
        extra_keys=[record.extra_keys],
        group_idx=record.group_idx,
        lookahead_token_ids=None if lookahead is None else [lookahead],
    )


def snapshot_parts(epoch: str, seq: int, blocks: list[BlockRecord]) -> Iterator[bytes]:
    """Encoded parts, made one at a time as they can be sent; at least one, the last marked so."""
    encoder = msgspec.msgpack.Encoder()
    for start in range(0, max(1, len(blocks)), BLOCKS_PER_PART):
        chunk = blocks[start : start + BLOCKS_PER_PART]
        last = start + BLOCKS_PER_PART >= len(blocks)
        yield encoder.encode(SnapshotPart(epoch, seq, chunk, last))
