"""One end of a KV transfer in a process of its own, driven by JSON lines on stdin; answers on stdout.

Run as ``python -m tests.transfer_peer sender|receiver '<json settings>'``. A sender fills blocks with the
pattern of ``seed`` when it is told to extend, so that a receiver elsewhere can check every byte.
"""

import asyncio
import json
import sys
from typing import Any

import msgspec

from common.errors import TransferError, TransferFailed
from common.kv_ticket import KVTicket
from kv_transfer.config import TransferConfig
from kv_transfer.receiver import KvReceiver
from kv_transfer.sender import KvSender
from tests.fakes_transfer import BLOCK_SIZE, fill, make_pools

Command = dict[str, Any]


def say(**event: object) -> None:
    print(json.dumps(event), flush=True)


class SenderPeer:
    def __init__(self, settings: Command) -> None:
        self.sender = KvSender(
            make_pools(settings["num_blocks"], tuple(settings["block_bytes"])),
            settings["fingerprint"],
            TransferConfig(**settings["config"]),
            lambda transfer_id, reason: say(event="released", id=transfer_id, reason=reason),
            engine_id=settings["engine_id"],
        )
        self.port = settings["port"]

    async def start(self) -> None:
        await self.sender.start("127.0.0.1", self.port)
        say(event="ready", port=self.sender.address[1], transports=list(self.sender.transports))

    async def act(self, command: Command) -> object:
        match command["op"]:
            case "offer":
                return msgspec.to_builtins(self.sender.offer(command["id"], command.get("lease_s")))
            case "extend":
                blocks = {
                    int(g): {int(p): b for p, b in placed.items()} for g, placed in command["blocks"].items()
                }
                fill(self.sender.pools, command["seed"], blocks)
                upto = 1 + max(p for placed in blocks.values() for p in placed)
                return self.sender.extend(command["id"], blocks, upto * BLOCK_SIZE)
            case "overwrite":  # as if another request had got the blocks
                for group in self.sender.pools.groups:
                    group.array_NB[:] = 0xEE
            case "finish":
                return self.sender.finish(command["id"], command["carry"].encode(), b"extra")
            case "cancel":
                self.sender.cancel(command["id"], command["reason"])
            case "held":
                return self.sender.num_held
            case _:
                raise ValueError(command["op"])
        return None

    async def close(self) -> None:
        await self.sender.close()


class ReceiverPeer:
    def __init__(self, settings: Command) -> None:
        self.receiver = KvReceiver(
            make_pools(settings["num_blocks"], tuple(settings["block_bytes"])),
            settings["fingerprint"],
            TransferConfig(**settings["config"]),
        )

    async def start(self) -> None:
        await self.receiver.start()
        say(event="ready", port=0, transports=list(self.receiver.transports))

    async def act(self, command: Command) -> object:
        ticket = msgspec.convert(command["ticket"], KVTicket)
        want = {int(g): {int(p): b for p, b in placed.items()} for g, placed in command["want"].items()}
        try:
            result = await self.receiver.fetch(
                ticket, want, command["cut"], lambda upto: say(event="progress", upto=upto)
            )
        except TransferFailed as error:
            return {"failed": error.reason, "final_upto": error.final_upto}
        except TransferError as error:
            return {"failed": str(error)}
        return {"carry": result.carry.decode(), "num_bytes": result.num_bytes, "transport": result.transport}

    async def close(self) -> None:
        await self.receiver.close()


async def serve(peer: SenderPeer | ReceiverPeer) -> None:
    await peer.start()
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := await reader.readline():
        command = json.loads(line)
        if command["op"] == "close":
            break
        say(answer=await peer.act(command))
    await peer.close()
    say(event="closed")


if __name__ == "__main__":
    peer_settings = json.loads(sys.argv[2])
    asyncio.run(serve((SenderPeer if sys.argv[1] == "sender" else ReceiverPeer)(peer_settings)))
