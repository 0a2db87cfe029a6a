"""`baton events`: follows one node's KV events for a person: numbers, gaps, blocks with their lookahead.

Works with any publisher of this event format; one that is not ours has no snapshot to catch up from
(`--foreign`). Ends with Ctrl-C or after `--count` batches.
"""

import argparse
import asyncio
from typing import Any

from cli.number_types import positive_int

TOKENS_SHOWN = 8


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--endpoint", required=True, help="ZMQ address of the publisher, e.g. tcp://127.0.0.1:5557")
    add(
        "--replay",
        default=None,
        metavar="ENDPOINT",
        help="ZMQ address of its replay; without it gaps stay open",
    )
    add("--topic", default="", help="topic prefix to follow (default: all)")
    add("--foreign", action="store_true", help="the publisher is another engine: replay only, no snapshot")
    add("--count", type=positive_int, default=None, help="stop after so many batches")
    add("--json", action="store_true", help="one JSON object a line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    asyncio.run(follow(args))
    return 0


async def follow(args: argparse.Namespace) -> None:
    from common.kv_event_reader import KVEventReader
    from common.kv_event_updates import Events

    describe = _as_json if args.json else _as_text
    seen = 0
    async with KVEventReader(
        args.endpoint, args.replay, topic=args.topic, snapshots=not args.foreign
    ) as reader:
        async for update in reader.updates():
            print(describe(update), flush=True)
            seen += isinstance(update, Events)
            if args.count is not None and seen >= args.count:
                return


def _as_json(update: Any) -> str:
    import msgspec

    name = type(update).__name__
    return msgspec.json.encode({"update": name, **_fields(update)}, enc_hook=str).decode()


def _fields(update: Any) -> dict[str, Any]:
    import dataclasses

    return {f.name: getattr(update, f.name) for f in dataclasses.fields(update)}


def _as_text(update: Any) -> str:
    from common.kv_event_updates import Events, SnapshotLoaded

    if isinstance(update, Events):
        header = f"#{update.seq}{' replayed' if update.replayed else ''}"
        lines = [line for event in update.batch.events for line in _event_lines(event)]
        return "\n".join(f"{header} {line}" for line in lines or ["(no events)"])
    fields = _fields(update)
    if isinstance(update, SnapshotLoaded):
        fields["blocks"] = len(update.blocks)
    return f"-- {type(update).__name__} " + " ".join(f"{key}={value}" for key, value in fields.items())


def _event_lines(event: Any) -> list[str]:
    from common.kv_events import BlockRemoved, BlockStored

    match event:
        case BlockStored():
            return _stored_lines(event)
        case BlockRemoved():
            hashes = " ".join(_short(h) for h in event.block_hashes)
            return [f"removed group={event.group_idx or 0} {event.medium or ''} {hashes}"]
        case _:
            return ["all blocks cleared"]


def _stored_lines(event: Any) -> list[str]:
    """One line a block: its hash, its parent, its first tokens, and the lookahead that the hash covers."""
    lines = []
    parent = event.parent_block_hash
    for i, block_hash in enumerate(event.block_hashes):
        tokens = event.token_ids[i * event.block_size : (i + 1) * event.block_size]
        more = "..." if len(tokens) > TOKENS_SHOWN else ""
        line = f"stored {_short(block_hash)} after {_short(parent)} group={event.group_idx or 0}"
        line += f" tokens {tokens[:TOKENS_SHOWN]}{more}"
        if event.lookahead_token_ids is not None:
            line += f" lookahead {event.lookahead_token_ids[i]}"
        lines.append(line)
        parent = block_hash
    return lines


def _short(block_hash: int | bytes | None) -> str:
    if block_hash is None:
        return "-"
    return f"{block_hash:x}"[:12] if isinstance(block_hash, int) else block_hash.hex()[:12]
