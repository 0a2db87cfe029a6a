"""KV events: recorded frames decode here, our frames decode with definitions written from those frames."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.block_hash import BlockHasher, event_hash
from common.extra_keys import from_event_form
from common.kv_event_printer import format_event
from common.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEventBatch,
    UndecodableBatch,
    decode_batch,
    decode_seq,
    encode_batch,
    encode_seq,
    with_int_hashes,
)
from common.kv_snapshot import BlockMirror, SnapshotPart, snapshot_parts, to_event

DATA = Path(__file__).resolve().parents[1] / "data"
Recorded = dict[str, Any]
KEPT_FRAMES: list[Recorded] = [
    json.loads(line) for line in (DATA / "kv_event_frames.jsonl").read_text().splitlines()
]

# What a subscriber of the recorded streams would declare; on purpose not derived from common.kv_events.
ForeignHash = int | bytes


class ForeignStored(msgspec.Struct, tag="BlockStored", omit_defaults=True):
    block_hashes: list[ForeignHash]
    parent_block_hash: ForeignHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    lookahead_token_ids: list[list[int]] | None = None


class ForeignRemoved(msgspec.Struct, tag="BlockRemoved", omit_defaults=True):
    block_hashes: list[ForeignHash]
    medium: str | None
    group_idx: int | None = None


class ForeignCleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class ForeignBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[ForeignStored | ForeignRemoved | ForeignCleared]
    data_parallel_rank: int | None = None


def stored(**changes: Any) -> BlockStored:
    fields: dict[str, Any] = {
        "block_hashes": [b"\1" * 32, b"\2" * 32],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "lora_id": None,
        "medium": "CPU",
        "lora_name": None,
        "lookahead_token_ids": [[3], [5]],
    }
    return BlockStored(**fields | changes)


def encode(*events: KVEvent) -> bytes:
    return encode_batch(KVEventBatch(1700000000.25, list(events)))


def from_json(value: Any) -> Any:
    """The recorded JSON writes byte strings as {"bytes_hex": ...}."""
    match value:
        case {"bytes_hex": str() as digits}:
            return bytes.fromhex(digits)
        case dict():
            return {key: from_json(item) for key, item in value.items()}
        case list():
            return [from_json(item) for item in value]
        case _:
            return value


def check_recorded_frame(recorded: Recorded) -> None:
    """Decodes to the recorded content, whole, and encodes to the recorded bytes again."""
    topic, seq, payload = (bytes.fromhex(frame) for frame in recorded["frames"])
    assert topic.decode() == recorded["topic"]
    assert decode_seq(seq) == recorded["seq"]
    assert encode_seq(recorded["seq"]) == seq
    batch = decode_batch(payload)
    assert (batch.num_unknown_events, batch.num_unknown_fields) == (0, 0)
    ts, events, rank = from_json(recorded["decoded"])
    assert (batch.ts, batch.data_parallel_rank) == (ts, rank)
    assert [msgspec.to_builtins(event, builtin_types=(bytes,)) for event in batch.events] == events
    assert encode_batch(KVEventBatch(batch.ts, batch.events, batch.data_parallel_rank)) == payload


@pytest.mark.parametrize("recorded", KEPT_FRAMES, ids=lambda r: f"{r['stream']}{r['seq']}")
def test_kept_recorded_frames(recorded: Recorded) -> None:
    check_recorded_frame(recorded)


def test_all_recorded_frames(shared_dir: Path) -> None:
    num_frames = 0
    for path in sorted((shared_dir / "conformance" / "kv_events").glob("[AB]_*b32*.jsonl")):
        if not path.name.endswith(".requests.jsonl"):
            for line in path.read_text().splitlines():
                check_recorded_frame(json.loads(line))
                num_frames += 1
    assert num_frames == 25


def test_recorded_lookahead_event(shared_dir: Path) -> None:
    """The other engine's struct has more fields than fit a short map header; the reader does not care."""
    path = shared_dir / "conformance" / "block_hashes" / "hash_vectors_033_lookahead.json"
    batch = decode_batch(bytes.fromhex(json.loads(path.read_text())["sample_event_hex"]))
    assert (batch.num_unknown_events, batch.num_unknown_fields) == (0, 0)
    (event,) = batch.events
    assert isinstance(event, BlockStored)
    assert event.lookahead_token_ids == [[3], [5]]
    assert event.block_hashes == [11, 2**63 + 5]


def test_recorded_hashes_follow_from_the_recorded_events() -> None:
    """Chain by chain, from event fields alone; integers stand for digests computed before."""
    hasher = BlockHasher(32, 0, algorithm="sha256_cbor", seed="0")
    digests: dict[int | bytes, bytes] = {}
    num_checked = 0
    for recorded in KEPT_FRAMES:
        if recorded["stream"] != "A":
            continue
        for event in decode_batch(bytes.fromhex(recorded["frames"][2])).events:
            if not isinstance(event, BlockStored):
                continue
            parent = None if event.parent_block_hash is None else digests[event.parent_block_hash]
            for index, published in enumerate(event.block_hashes):
                tokens = event.token_ids[index * 32 : index * 32 + 32]
                keys = from_event_form((event.extra_keys or [])[index], event.lora_name)
                parent = hasher.hash_block(parent, tokens, (), keys)
                assert event_hash(parent) == published
                digests[published] = parent
                num_checked += 1
    assert num_checked == 13


def test_our_frames_decode_with_the_recorded_definitions() -> None:
    payload = encode(stored(), BlockRemoved(block_hashes=[7], medium="GPU", group_idx=1), AllBlocksCleared())
    batch = msgspec.msgpack.decode(payload, type=ForeignBatch)
    assert batch.data_parallel_rank == 0
    assert batch.events == [
        ForeignStored(
            [b"\1" * 32, b"\2" * 32], None, [1, 2, 3, 4], 2, None, "CPU", None, lookahead_token_ids=[[3], [5]]
        ),
        ForeignRemoved([7], "GPU", 1),
        ForeignCleared(),
    ]


def test_the_recorded_definitions_fit_the_recorded_frames() -> None:
    for recorded in KEPT_FRAMES:
        msgspec.msgpack.decode(bytes.fromhex(recorded["frames"][2]), type=ForeignBatch)


def test_bytes_of_an_event() -> None:
    """Array batch, map event in field order, nil for the four without a default, no absent optionals,
    rank 0 written, and a one-byte map header."""
    event = stored(block_hashes=[5], token_ids=[9, 300], medium=None, lookahead_token_ids=None)
    assert encode(event).hex() == (
        "93" + "cb41d954fc40100000" + "91"
        "88"
        + "a474797065" + "ab426c6f636b53746f726564"
        + "ac626c6f636b5f686173686573" + "9105"
        + "b1706172656e745f626c6f636b5f68617368" + "c0"
        + "a9746f6b656e5f696473" + "9209cd012c"
        + "aa626c6f636b5f73697a65" + "02"
        + "a76c6f72615f6964" + "c0"
        + "a66d656469756d" + "c0"
        + "a96c6f72615f6e616d65" + "c0"
        + "00"
    )  # fmt: skip
    assert (
        encode(AllBlocksCleared())
        .hex()
        .endswith("91" + "81a474797065b0416c6c426c6f636b73436c6561726564" + "00")
    )
    removed = msgspec.msgpack.decode(encode(BlockRemoved(block_hashes=[5], medium=None)))
    assert removed == [1700000000.25, [{"type": "BlockRemoved", "block_hashes": [5], "medium": None}], 0]


def test_array_events_of_older_publishers() -> None:
    oldest = ["BlockStored", [5], None, [1, 2], 2, None]
    newer = ["BlockStored", [6], 5, [3, 4], 2, 1, "GPU", "ad", [["ad"]], 0, *([None] * 5), [[5]]]
    payload = msgspec.msgpack.encode([1.5, [oldest, newer, ["BlockRemoved", [5]], ["AllBlocksCleared"]]])
    batch = decode_batch(payload)
    assert batch.data_parallel_rank is None
    assert (batch.num_unknown_events, batch.num_unknown_fields) == (0, 0)
    assert batch.events == [
        stored(block_hashes=[5], token_ids=[1, 2], medium=None, lookahead_token_ids=None),
        stored(
            block_hashes=[6],
            parent_block_hash=5,
            token_ids=[3, 4],
            lora_id=1,
            medium="GPU",
            lora_name="ad",
            extra_keys=[["ad"]],
            group_idx=0,
            lookahead_token_ids=[[5]],
        ),
        BlockRemoved(block_hashes=[5], medium=None),
        AllBlocksCleared(),
    ]


def test_unknown_fields_and_events_are_counted_and_cost_nothing_else() -> None:
    known = {"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU"}
    payload = msgspec.msgpack.encode(
        {
            "ts": 1,
            "attn_dp_rank": 3,
            "events": [{"type": "BlockMoved", "to": 1}, known | {"why": 1, "when": 2}, ["Other", 1]],
            "node": "x",
        }
    )
    batch = decode_batch(payload)
    assert batch.events == [BlockRemoved(block_hashes=[5], medium="GPU")]
    assert (batch.ts, batch.data_parallel_rank) == (1.0, 3)
    assert (batch.num_unknown_events, batch.num_unknown_fields) == (2, 3)
    longer = decode_batch(
        msgspec.msgpack.encode([1.0, [["BlockRemoved", [5], "GPU", 0, "here", "x", 1]], 0, 9])
    )
    assert (longer.num_unknown_events, longer.num_unknown_fields) == (0, 4)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xc1", "not msgpack"),
        (msgspec.msgpack.encode(3), "neither a map nor an array"),
        (msgspec.msgpack.encode([1.0, 3, 0]), "no list of events"),
        (msgspec.msgpack.encode(["now", [], 0]), "no time stamp"),
        (msgspec.msgpack.encode([1.0, [], "one"]), "data_parallel_rank is 'one'"),
        (msgspec.msgpack.encode([1.0, [3], 0]), "neither a tagged map nor a tagged array"),
        (msgspec.msgpack.encode([1.0, [{"type": "BlockStored"}], 0]), "block_hashes"),
        (
            msgspec.msgpack.encode([1.0, [["BlockStored", [1], None, [1, 2, 3], 2, None]], 0]),
            "3 token ids for 1 blocks of 2 tokens",
        ),
    ],
)
def test_what_cannot_be_read_says_why(content: bytes, reason: str) -> None:
    with pytest.raises(UndecodableBatch, match=reason):
        decode_batch(content)
    with pytest.raises(UndecodableBatch, match="5 bytes"):
        decode_seq(b"12345")


def test_an_event_whose_lists_disagree_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="lookahead_token_ids has 1 entries for 2 blocks"):
        stored(lookahead_token_ids=[[3]])


def test_integer_hashes_are_the_last_eight_bytes() -> None:
    digests = [bytes(range(32)), bytes(range(32, 64))]
    event = with_int_hashes(stored(block_hashes=digests, parent_block_hash=b"\0" * 31 + b"\7"))
    assert isinstance(event, BlockStored)
    assert event.block_hashes == [0x18191A1B1C1D1E1F, 0x38393A3B3C3D3E3F]
    assert event.parent_block_hash == 7
    assert with_int_hashes(event) == event
    assert with_int_hashes(BlockRemoved(block_hashes=digests, medium=None)) == BlockRemoved(
        block_hashes=[event_hash(digest) for digest in digests], medium=None
    )


def test_mirror_follows_and_places_blocks() -> None:
    mirror = BlockMirror()
    mirror.apply(stored(extra_keys=[["salt"], None]))
    mirror.apply(
        stored(block_hashes=[9], parent_block_hash=b"\2" * 32, token_ids=[5, 6], lookahead_token_ids=[[7]])
    )
    mirror.apply(stored(block_hashes=[8], parent_block_hash=404, token_ids=[5, 6], lookahead_token_ids=[[7]]))
    blocks = mirror.blocks()
    assert [block.position for block in blocks] == [0, 2, 4, None]
    assert [block.token_ids for block in blocks] == [[1, 2], [3, 4], [5, 6], [5, 6]]
    assert [block.lookahead_token_ids for block in blocks] == [[3], [5], [7], [7]]
    assert [block.extra_keys for block in blocks] == [["salt"], None, None, None]
    assert to_event(blocks[1]) == stored(
        block_hashes=[b"\2" * 32],
        parent_block_hash=b"\1" * 32,
        token_ids=[3, 4],
        extra_keys=[None],
        lookahead_token_ids=[[5]],
    )
    mirror.apply(BlockRemoved(block_hashes=[b"\1" * 32, 31337], medium="CPU"))
    mirror.apply(BlockRemoved(block_hashes=[9], medium="GPU"))  # another medium's copy
    assert [block.block_hash for block in mirror.blocks()] == [b"\2" * 32, 9, 8]
    mirror.apply(AllBlocksCleared())
    assert len(mirror) == 0


def test_snapshot_parts_carry_all_blocks_and_end() -> None:
    mirror = BlockMirror()
    for index in range(2500):
        mirror.apply(stored(block_hashes=[index], token_ids=[index, 2], lookahead_token_ids=[[3]]))
    decode = msgspec.msgpack.Decoder(SnapshotPart).decode
    parts = [decode(part) for part in snapshot_parts("e", 7, mirror.blocks())]
    assert [part.last for part in parts] == [False, False, True]
    assert {(part.epoch, part.seq) for part in parts} == {("e", 7)}
    assert [block for part in parts for block in part.blocks] == mirror.blocks()
    (empty,) = [decode(part) for part in snapshot_parts("e", -1, [])]
    assert empty.last
    assert empty.blocks == []


def test_printed_blocks_show_their_lookahead() -> None:
    lines = list(format_event(stored(block_hashes=[1, 2], extra_keys=[["s"], None])))
    assert lines == [
        "stored 0000000000000001 after - [1 2] + [3] keys ['s'] on CPU",
        "stored 0000000000000002 after 0000000000000001 [3 4] + [5] on CPU",
    ]
