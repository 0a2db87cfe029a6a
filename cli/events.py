"""`baton events`: follows one node's KV events for a person: numbers, gaps, blocks with their lookahead.

Works with any publisher of this event format; one that is not ours has no snapshot to catch up from
(`--foreign`). Ends with Ctrl-C or after `--count` batches.
"""

import argparse
import asyncio
from typing import Any

from cli.number_types import positive_int


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
    from common.kv_event_printer import format_update
    from common.kv_event_reader import KVEventReader
    from common.kv_event_updates import Events

    seen = 0
    async with KVEventReader(
        args.endpoint, args.replay, topic=args.topic, snapshots=not args.foreign
    ) as reader:
        async for update in reader.updates():
            lines = [as_json(update)] if args.json else format_update(update)
            for line in lines:
                print(line, flush=True)
            seen += isinstance(update, Events)
            if args.count is not None and seen >= args.count:
                return


def as_json(update: Any) -> str:
    """The update's name and fields; bytes such as hashes in hexadecimal."""
    import dataclasses
    import json

    import msgspec

    fields = {f.name: getattr(update, f.name) for f in dataclasses.fields(update)}
    plain = msgspec.to_builtins({"update": type(update).__name__, **fields}, builtin_types=(bytes,))
    return json.dumps(_hexadecimal(plain))


def _hexadecimal(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {key: _hexadecimal(item) for key, item in value.items()}
    return [_hexadecimal(item) for item in value] if isinstance(value, list | tuple) else value
