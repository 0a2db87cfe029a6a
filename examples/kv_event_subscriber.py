"""Follows the KV events of a node: which blocks it holds, with the tokens that each one looked ahead to.

    python examples/kv_event_subscriber.py tcp://127.0.0.1:5557 tcp://127.0.0.1:5558

The reader does the hard part: it starts with what happened before, notices gaps and restarts, and asks
for a replay or a snapshot. Add --foreign for an engine that has no snapshots.
"""

import argparse
import asyncio

from common.kv_event_printer import format_update
from common.kv_event_reader import KVEventReader
from common.kv_event_updates import apply_update
from common.kv_snapshot import BlockMirror


async def follow(events: str, replay: str | None, foreign: bool) -> None:
    held = BlockMirror()
    async with KVEventReader(events, replay, snapshots=not foreign) as reader:
        async for update in reader.updates():
            apply_update(held, update)
            for line in format_update(update):
                print(line, flush=True)
            print(f"         {len(held)} blocks held", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("events", help="PUB endpoint of the node")
    parser.add_argument("replay", nargs="?", help="ROUTER endpoint of the node; without it gaps stay open")
    parser.add_argument("--foreign", action="store_true", help="an engine that has neither head nor snapshot")
    arguments = parser.parse_args()
    try:
        asyncio.run(follow(arguments.events, arguments.replay, arguments.foreign))
    except KeyboardInterrupt:
        print("stopped")
