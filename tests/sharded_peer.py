"""One tensor-parallel rank of a pair, a process of its own: `python -m tests.sharded_peer prefill|decode
BLOCK_SIZE HEADS RANK RANKS`.

A prefill rank prints a ticket for each line (a transfer's id) that it gets, computes at an empty one, and
then prints how each hold ended. A decode rank gets its tickets, as a JSON list, fetches from all of them at
once, checks its cache and prints how many bytes came.
"""

import asyncio
import sys

import msgspec

from common.kv_ticket import KVTicket
from kv_transfer.config import TransferConfig
from kv_transfer.receiver import KvReceiver
from kv_transfer.sender import KvSender
from tests.fakes_sharded import CUT, check, compute, ids_of, make_pools

CONFIG = TransferConfig(transport="tcp", chunk_bytes=4096, fetch_timeout_s=20.0)


async def read_line() -> str:
    line: str = await asyncio.to_thread(sys.stdin.readline)
    return line.strip()


def say(what: object) -> None:
    print(msgspec.json.encode(what).decode(), flush=True)


async def prefill(block_size: int, num_heads: int, rank: int, size: int) -> None:
    pools = make_pools(block_size, num_heads, rank, size)
    ended: asyncio.Queue[str] = asyncio.Queue()
    sender = KvSender(pools, "fp", CONFIG, lambda name, reason: ended.put_nowait(f"{name} {reason}"))
    await sender.start("127.0.0.1")
    names = []
    while name := await read_line():
        names.append(name)
        say(sender.offer(name))
    placed = compute(pools, CUT)
    for name in names:
        sender.extend(name, {0: placed, 1: placed}, CUT)
        sender.finish(name, b"row")
    say(sorted([await ended.get() for _ in names]))
    await sender.close()


async def decode(block_size: int, num_heads: int, rank: int, size: int) -> None:
    pools = make_pools(block_size, num_heads, rank, size)
    receiver = KvReceiver(pools, "fp", CONFIG)
    tickets = msgspec.json.decode(await read_line(), type=list[KVTicket])
    ids = ids_of(block_size, 1)
    want = {0: ids, 1: ids}
    results = await asyncio.gather(*(receiver.fetch(ticket, want, CUT) for ticket in tickets))
    check(pools, want)
    say(sum(result.num_bytes for result in results))
    await receiver.close()


if __name__ == "__main__":
    roles = {"prefill": prefill, "decode": decode}
    asyncio.run(roles[sys.argv[1]](*map(int, sys.argv[2:])))
