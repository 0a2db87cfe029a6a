"""The claim on one prompt's KV that travels from a prefill node to a decode node, through the router.

A ticket names a transfer and where to ask for it; it carries no address of memory and no KV. It may be
written before the prefill node has computed (or even heard of) the prompt: whoever knows the node can make
one. Only relative times are on the wire, since clocks of two machines are not comparable.
"""

import msgspec


class KVTicket(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``generation`` 0 and ``incarnation`` "" mean "whatever the node has now": used when the ticket is
    written before the node has offered the transfer. Any other value must match, or the node refuses."""

    transfer_id: str
    engine_id: str
    host: str
    port: int
    incarnation: str = ""  # random per process: tells a restarted node from the one that made the offer
    generation: int = 0  # of the lease: a second offer under the same id gets another one
    transports: tuple[str, ...] = ()  # what the node offers, best first; () when not known yet
    lease_s: float = 30.0
