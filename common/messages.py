"""Control messages between router and nodes: msgpack over ZMQ, one tag a type, one decoder a direction.

A router binds a ROUTER socket; every node connects a DEALER to each router and speaks first (`Register`).
A frame is one encoded message; the node's DEALER identity names it. KV bytes never travel here. Whatever
starts work (`Register`, `PrefillRequest`, `DecodeRequest`) is answered; unknown ids are ignored and counted.
"""

import msgspec

from common.kv_ticket import KVTicket
from common.request import SamplingParams, TokenLogprob


class TransferAddress(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a prefill node's KV sender listens; the router makes a KVTicket from it."""

    engine_id: str
    incarnation: str
    host: str
    port: int
    transports: tuple[str, ...] = ()
    lease_s: float = 30.0


class NodeLoad(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a node tells about itself in every heartbeat."""

    num_running: int = 0
    num_waiting: int = 0
    num_receiving: int = 0
    num_held: int = 0
    waiting_tokens: int = 0  # tokens still to compute of everything admitted or queued
    free_blocks: int = 0  # smallest share over KV groups, in blocks of the first group
    total_blocks: int = 0
    prefix_cache_queries: int = 0  # tokens looked up and found, since start
    prefix_cache_hits: int = 0
    num_drafts: int = 0  # since start: the acceptance counters
    num_draft_tokens: int = 0
    num_accepted: int = 0
    accepted_per_pos: tuple[int, ...] = ()
    verified_per_pos: tuple[int, ...] = ()
    kv_bytes_received: int = 0
    num_transfers: int = 0  # that ended, one way or the other; aborted ones are not counted
    num_transfer_failures: int = 0


# ---- node -> router -------------------------------------------------------------------------------------


class Register(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """First message of a node, repeated until `Registered` or `Refused` comes (request_id "")."""

    node_id: str
    epoch: str  # random per process: a restart is another node
    role: str  # "prefill" | "decode" | "both"
    version: str
    model: str
    fingerprint: dict[str, str]  # what a pair must agree on, by name (02-exactness 4)
    block_size: int
    num_lookahead: int  # k of the block hashes
    hash_algorithm: str
    hash_seed: str
    num_modules: int  # N in use
    vocab_size: int
    max_model_len: int  # prompt + output, tokens; the pool's limit included
    total_blocks: int
    events_endpoint: str
    replay_endpoint: str
    http_url: str
    tokenizer_digest: str = ""
    transfer: TransferAddress | None = None


class Heartbeat(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    node_id: str
    epoch: str
    last_event_seq: int
    load: NodeLoad
    draining: bool = False


class Leave(msgspec.Struct, tag=True, frozen=True):
    """Last message of a node that exits: the router forgets it now instead of after missed heartbeats."""

    node_id: str
    epoch: str


class Accepted(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """D: blocks are reserved (or the request queued for local compute). P: the prompt is queued."""

    request_id: str
    cached_tokens: int = 0


class Refused(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """Final for this node. ``retry``: another node, or this one later, may take it.
    ``http_status`` and ``param`` describe a fault of the request itself."""

    request_id: str
    reason: str
    retry: bool
    http_status: int = 503
    param: str | None = None


class TokenChunk(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """New tokens of one sequence (index 0..n-1), in order. ``offset`` is where they begin in its output:
    token L of the hand-over `carry` is told by P and by D, and counts once."""

    request_id: str
    token_ids: tuple[int, ...]
    index: int = 0
    logprobs: tuple[TokenLogprob, ...] | None = None
    offset: int = 0


class Finished(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """One sequence ended. From P (role prefill) "cut" or "abort" is the hand-over's own end (index 0); where
    the answer ends with the token that P samples, "stop" or "length" comes before it.

    ``reason``: stop | length | abort | error | cut. ``stop_string`` is the one that matched: text from
    it on is not part of the answer. ``transferred_tokens`` came over the wire, ``cached_tokens`` from
    the node's own cache. ``transfer_failed``: D was told to end a request whose KV transfer fails; no other
    node is asked.
    """

    request_id: str
    reason: str
    index: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    transferred_tokens: int = 0
    transferred_bytes: int = 0
    stop_string: str | None = None
    error: str | None = None
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    accepted_per_pos: tuple[int, ...] = ()
    verified_per_pos: tuple[int, ...] = ()
    transfer_failed: bool = False

    @property
    def is_answer(self) -> bool:
        """The sequence is complete, as the client asked for it."""
        return self.reason in ("stop", "length")


NodeMessage = Register | Heartbeat | Leave | Accepted | Refused | TokenChunk | Finished

# ---- router -> node -------------------------------------------------------------------------------------


class Registered(msgspec.Struct, tag=True, frozen=True):
    router_id: str


class RegisterRefused(msgspec.Struct, tag=True, frozen=True):
    """The router will not use this node (another model, another N ...); the node exits with the reason."""

    reason: str


class HeartbeatReply(msgspec.Struct, tag=True, frozen=True):
    """Answers every heartbeat, so that a node sees a router die or restart. ``known`` False: this router
    does not know the node (it restarted, or dropped the node after missed heartbeats); register again."""

    router_id: str
    known: bool


class PrefillRequest(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """P keeps the whole prompt, computes positions 0..cut-1 and holds its blocks for ``ticket``.

    With ``sampling`` the hand-over is `carry`: the cut is the prompt's end, and P samples the first token."""

    request_id: str
    token_ids: list[int]
    cut: int
    ticket: KVTicket
    priority: int = 0
    cache_salt: str | None = None
    lora_name: str | None = None
    sampling: SamplingParams | None = None


class DecodeRequest(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """Generate from ``token_ids``. With a ticket: reserve first, fetch positions below ``cut`` from P, and
    with a cut at the prompt's end the first token too (hand-over `carry`, n = 1 only); without one: compute
    the prompt locally. ``n`` sequences share the prompt's blocks.
    ``num_prompt_tokens`` is less than len(token_ids) when a stream is continued (fail-over)."""

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    n: int = 1
    ticket: KVTicket | None = None
    cut: int = 0
    num_prompt_tokens: int = 0
    priority: int = 0
    cache_salt: str | None = None
    lora_name: str | None = None


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Legal in every state, and for ids the node never saw. ``Finished(reason="abort")`` follows once
    the request's blocks are free (nothing follows for an unknown id)."""

    request_id: str


class Drain(msgspec.Struct, tag=True, frozen=True):
    """Take no new work; finish what runs."""


RouterMessage = Registered | RegisterRefused | HeartbeatReply | PrefillRequest | DecodeRequest | Abort | Drain

encoder = msgspec.msgpack.Encoder()
node_message_decoder = msgspec.msgpack.Decoder(NodeMessage)
router_message_decoder = msgspec.msgpack.Decoder(RouterMessage)
