"""KV-cache events on the wire: what a node publishes about its prefix cache, and how to read it.

We write batches as arrays and events as maps tagged ``type``, the shape that engines and indexers of
this field speak. We read more: events as arrays (the older shape), batches as maps, hashes as integers
or bytes, unknown fields and unknown event types, which are counted and skipped. Message frames are
``topic | seq (8 bytes, big-endian) | payload``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from common.block_hash import event_hash
from common.errors import ProtocolViolation

BlockHash = int | bytes

END_SEQ = -1
"""Sequence number of the message that ends a replay."""


class BlockStored(
    msgspec.Struct,
    tag=True,
    kw_only=True,
    frozen=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    gc=False,
):
    """Consecutive blocks of one chain became visible to prefix hits.

    ``token_ids`` holds ``block_size`` ids for each of ``block_hashes``; ``extra_keys`` and
    ``lookahead_token_ids`` have one entry a block, the former covering block and lookahead, in the event
    form of ``common.extra_keys``. Where a salted request's keys are withheld the ids are zeros. The fields
    without a default are always written, as nil if need be. The declared fields and the tag must stay at
    most 15, or every event's map header grows.
    """

    block_hashes: Sequence[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: Sequence[Sequence[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    lookahead_token_ids: Sequence[Sequence[int]] | None = None

    def __post_init__(self) -> None:
        num_blocks = len(self.block_hashes)
        if self.block_size < 1 or len(self.token_ids) != num_blocks * self.block_size:
            raise ValueError(
                f"{len(self.token_ids)} token ids for {num_blocks} blocks of {self.block_size} tokens"
            )
        for name, lists in (
            ("extra_keys", self.extra_keys),
            ("lookahead_token_ids", self.lookahead_token_ids),
        ):
            if lists is not None and len(lists) != num_blocks:
                raise ValueError(f"{name} has {len(lists)} entries for {num_blocks} blocks")


class BlockRemoved(
    msgspec.Struct,
    tag=True,
    kw_only=True,
    frozen=True,
    omit_defaults=True,
    forbid_unknown_fields=True,
    gc=False,
):
    """The last physical copy of each of these hashes is gone from this group and medium."""

    block_hashes: Sequence[BlockHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True, forbid_unknown_fields=True, gc=False):
    """Nothing of what was announced before is held any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Events of one engine step, in order. ``ts`` is wall-clock seconds."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = 0


@dataclass(frozen=True)
class DecodedBatch:
    """A batch as read, and how much of it this reader did not know."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None
    num_unknown_events: int = 0
    num_unknown_fields: int = 0


class UndecodableBatch(ProtocolViolation):
    """A payload that is no batch of events, or a known event with a field of the wrong type."""


def encode_seq(seq: int) -> bytes:
    return seq.to_bytes(8, "big", signed=True)


def decode_seq(frame: bytes) -> int:
    """Raises UndecodableBatch unless the frame has 8 bytes."""
    if len(frame) != 8:
        raise UndecodableBatch(f"sequence frame has {len(frame)} bytes, expected 8: {frame[:32]!r}")
    return int.from_bytes(frame, "big", signed=True)


_encoder = msgspec.msgpack.Encoder()
_own_shape_decoder = msgspec.msgpack.Decoder(KVEventBatch)


def encode_batch(batch: KVEventBatch) -> bytes:
    """Raises TypeError, ValueError or OverflowError for a value that the format cannot carry."""
    return _encoder.encode(batch)


def decode_batch(payload: bytes) -> DecodedBatch:
    """Raises UndecodableBatch, saying where, if the payload cannot be understood."""
    try:
        batch = _own_shape_decoder.decode(payload)
    except msgspec.DecodeError:  # some other shape, unknown names, or garbage: the slow way tells
        return _decode_any_shape(payload)
    return DecodedBatch(batch.ts, batch.events, batch.data_parallel_rank)


# The order of fields in the array shape. Names that our structs lack are known to exist, not used here.
_ARRAY_FIELDS: dict[str, tuple[str, ...]] = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
        "locality",
        "ownership",
        "session_id",
        "lookahead_token_ids",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx", "locality", "ownership"),
    "AllBlocksCleared": (),
}
_TYPES: dict[str, type[KVEvent]] = {
    "BlockStored": BlockStored,
    "BlockRemoved": BlockRemoved,
    "AllBlocksCleared": AllBlocksCleared,
}
# Publishers from before these fields existed leave them out.
_ABSENT_IN_OLD: dict[str, dict[str, None]] = {
    "BlockStored": {"parent_block_hash": None, "lora_id": None, "medium": None, "lora_name": None},
    "BlockRemoved": {"medium": None},
    "AllBlocksCleared": {},
}
_BATCH_FIELDS = ("ts", "events", "data_parallel_rank")


def _decode_any_shape(payload: bytes) -> DecodedBatch:
    try:
        raw = msgspec.msgpack.decode(payload)
    except msgspec.DecodeError as error:
        raise UndecodableBatch(f"KV event payload of {len(payload)} bytes is not msgpack: {error}") from None
    match raw:
        case dict():
            fields: dict[Any, Any] = raw
        case list() if len(raw) >= 2:
            fields = dict(zip(_BATCH_FIELDS, raw, strict=False))
        case _:
            raise UndecodableBatch("KV event payload is neither a map nor an array [ts, events, ...]")
    # One publisher of this field calls the rank differently.
    rank = fields.get("data_parallel_rank", fields.get("attn_dp_rank"))
    raw_events = fields.get("events")
    ts = fields.get("ts")
    if not isinstance(raw_events, list) or not isinstance(ts, int | float):
        raise UndecodableBatch(f"KV event batch has no list of events or no time stamp (ts is {ts!r})")
    if rank is not None and not isinstance(rank, int):
        raise UndecodableBatch(f"data_parallel_rank is {rank!r}, expected an integer or nil")

    events: list[KVEvent] = []
    num_unknown_events = 0
    num_unknown_fields = len(fields.keys() - {*_BATCH_FIELDS, "attn_dp_rank"})
    if isinstance(raw, list):
        num_unknown_fields += max(0, len(raw) - len(_BATCH_FIELDS))
    for raw_event in raw_events:
        name, named, num_unnamed = _name_fields(raw_event)
        if name not in _TYPES:
            num_unknown_events += 1
            continue
        known = {key: named[key] for key in _TYPES[name].__struct_fields__ if key in named}
        num_unknown_fields += len(named) - len(known) + num_unnamed
        try:
            event = msgspec.convert(_ABSENT_IN_OLD[name] | known, _TYPES[name])
        except msgspec.ValidationError as error:
            raise UndecodableBatch(f"{name} event: {error}") from None
        events.append(event)
    return DecodedBatch(float(ts), events, rank, num_unknown_events, num_unknown_fields)


def _name_fields(raw_event: object) -> tuple[str, Mapping[str, Any], int]:
    """(type name, fields by name, number of trailing fields that have no name)."""
    match raw_event:
        case {"type": str() as name, **fields}:
            return name, {str(key): value for key, value in fields.items()}, 0
        case [str() as name, *values]:
            names = _ARRAY_FIELDS.get(name, ())
            # The array shape cannot leave a field out: nil is what an absent one looks like.
            present = {key: value for key, value in zip(names, values, strict=False) if value is not None}
            return name, present, max(0, len(values) - len(names))
        case _:
            raise UndecodableBatch(
                f"event {str(raw_event)[:80]!r} is neither a tagged map nor a tagged array"
            )


def describe_hash(block_hash: BlockHash | None) -> str:
    """A short form for people: 16 hex digits."""
    match block_hash:
        case None:
            return "-"
        case int():
            return f"{block_hash:016x}"
        case bytes():
            return block_hash[-8:].hex()


def stored_token_ids(event: BlockStored, index: int) -> Sequence[int]:
    """The token ids of the event's block number ``index``."""
    start = index * event.block_size
    return event.token_ids[start : start + event.block_size]


def with_int_hashes(event: KVEvent) -> KVEvent:
    """The event with every digest replaced by the integer that stands for it."""
    match event:
        case BlockStored():
            parent = event.parent_block_hash
            return msgspec.structs.replace(
                event,
                block_hashes=[_as_int(block_hash) for block_hash in event.block_hashes],
                parent_block_hash=None if parent is None else _as_int(parent),
            )
        case BlockRemoved():
            return msgspec.structs.replace(
                event, block_hashes=[_as_int(block_hash) for block_hash in event.block_hashes]
            )
        case AllBlocksCleared():
            return event


def _as_int(block_hash: BlockHash) -> int:
    return event_hash(block_hash) if isinstance(block_hash, bytes) else block_hash
