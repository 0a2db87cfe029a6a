"""The ticket that lets a decode node fetch a prompt's KV blocks from a prefill node.

It names the transfer and the process that holds the blocks, and carries no address of memory: the
sender looks blocks up by position and refuses what its lease no longer covers. Relative times only,
since the two clocks have nothing in common.
"""

import msgspec


class KVTicket(msgspec.Struct, frozen=True, omit_defaults=True):
    """``incarnation`` is random per sender process, so a restart on the same port is never mistaken
    for the process that held the blocks. ``lease_s`` bounds the sender's hold, in seconds."""

    transfer_id: str
    engine_id: str
    incarnation: str
    host: str
    port: int
    transports: tuple[str, ...] = ()
    lease_s: float = 30.0
