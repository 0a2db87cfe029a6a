"""The transfer protocol without I/O: messages, and the two state machines as tables.

    D                                   P
    Hello  ------------------------->        fingerprints are compared before anything else
           <-------------------------  Welcome | Refusal
    OpenLane ----------------------->        a data lane; P proves it with one probe message
    Pull (positions wanted) -------->        may come before P has offered: NAK unknown, asked again
           <-------------------------  PullOk (plan digest) | Nak
    Credit (receives posted < n) --->        a chunk is only sent into a posted receive
           <-------------------------  ChunkSent (digest) + the bytes on the lane
           <-------------------------  Finish (carry, root digest)
    Commit (root) ------------------>        P's hold ends
    Abort (credits given) ---------->        P answers each unused credit with an empty message, so that every
           <-------------------------  AbortAck  receive of D becomes terminal, then acknowledges

An event that a state does not know raises :class:`ProtocolViolation` and leaves the state as it was.
"""

from collections.abc import Mapping
from enum import Enum, auto
from typing import Generic, TypeVar

import msgspec

from common.errors import ProtocolViolation
from kv_transfer.geometry import GroupGeometry

PROTOCOL_VERSION = 2


# --- messages -----------------------------------------------------------------------------------------------


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of everything on the control connection."""


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    engine_id: str
    incarnation: str
    fingerprint: str
    geometry: tuple[GroupGeometry, ...]  # by KV group
    transports: tuple[str, ...]  # usable here, best first
    addresses: dict[str, bytes]  # transport name -> its opaque address


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    engine_id: str
    incarnation: str
    geometry: tuple[GroupGeometry, ...]
    transports: tuple[str, ...]  # usable on both, best first
    addresses: dict[str, bytes]


class Refusal(Message, frozen=True, kw_only=True, tag="refusal"):
    """No session. ``code`` is one of version, fingerprint, geometry, transport, closing."""

    code: str
    reason: str


class OpenLane(Message, frozen=True, kw_only=True, tag="open_lane"):
    transport: str
    token: bytes
    probe_tag: int


class LaneRefused(Message, frozen=True, kw_only=True, tag="lane_refused"):
    token: bytes
    reason: str


class Pull(Message, frozen=True, kw_only=True, tag="pull"):
    transfer_id: str
    attempt: int
    generation: int
    incarnation: str
    want: dict[int, list[int]]  # group -> ascending absolute positions of D's blocks
    chunk_bytes: int
    tag_base: int


class PullOk(Message, frozen=True, kw_only=True, tag="pull_ok"):
    transfer_id: str
    attempt: int
    num_chunks: int
    plan_digest: bytes


class NakCode(Enum):
    UNKNOWN = "unknown"  # not offered (yet): ask again
    EXPIRED = "expired"
    GENERATION = "generation"
    INCARNATION = "incarnation"
    BUSY = "busy"  # another attempt is being served: ask again
    BAD_REQUEST = "bad_request"
    GONE = "gone"  # released, dropped or cancelled before


RETRYABLE_NAKS = frozenset({NakCode.UNKNOWN, NakCode.BUSY})


class Nak(Message, frozen=True, kw_only=True, tag="nak"):
    transfer_id: str
    attempt: int
    code: NakCode
    reason: str
    retry_ms: int = 0


class Credit(Message, frozen=True, kw_only=True, tag="credit"):
    """Receives are posted for every chunk with ``seq < credits``."""

    transfer_id: str
    attempt: int
    credits: int


class ChunkSent(Message, frozen=True, kw_only=True, tag="chunk"):
    transfer_id: str
    attempt: int
    seq: int
    digest: bytes  # empty where checksums are off


class Finish(Message, frozen=True, kw_only=True, tag="finish"):
    transfer_id: str
    attempt: int
    final_upto: int  # tokens
    carry: bytes
    extra: bytes
    root: bytes


class Failed(Message, frozen=True, kw_only=True, tag="failed"):
    """P cannot go on; D answers with Abort."""

    transfer_id: str
    attempt: int
    reason: str


class Commit(Message, frozen=True, kw_only=True, tag="commit"):
    transfer_id: str
    attempt: int
    root: bytes


class Released(Message, frozen=True, kw_only=True, tag="released"):
    transfer_id: str
    attempt: int


class Abort(Message, frozen=True, kw_only=True, tag="abort"):
    transfer_id: str
    attempt: int
    generation: int  # the ticket's: an abort must not end somebody else's hold
    credits: int
    reason: str


class AbortAck(Message, frozen=True, kw_only=True, tag="abort_ack"):
    """All sends of the attempt are terminal; none follows."""

    transfer_id: str
    attempt: int


class Drop(Message, frozen=True, kw_only=True, tag="drop"):
    transfer_id: str
    generation: int
    reason: str


class Heartbeat(Message, frozen=True, kw_only=True, tag="heartbeat"):
    renew: tuple[str, ...] = ()  # transfers whose lease goes on


ToSender = Hello | OpenLane | Pull | Credit | Commit | Abort | Drop | Heartbeat
ToReceiver = (
    Welcome
    | Refusal
    | LaneRefused
    | PullOk
    | Nak
    | ChunkSent
    | Finish
    | Failed
    | Released
    | AbortAck
    | Heartbeat
)


# --- data tags ----------------------------------------------------------------------------------------------

_ATTEMPT_BITS, _SEQ_BITS = 40, 24
MAX_CHUNKS = 1 << _SEQ_BITS


def tag_base(attempt: int) -> int:
    """Tags are chosen by the receiving process, so they are unique where they are matched: attempts are
    numbered over the life of the process, those for the same transfer too."""
    assert 0 <= attempt < 1 << _ATTEMPT_BITS
    return attempt << _SEQ_BITS


# --- state machines -----------------------------------------------------------------------------------------


class SenderState(Enum):
    OFFERED = auto()  # held; nobody reads
    SENDING = auto()  # a decode node pulls
    FINISHED = auto()  # everything was sent; waits for the commit
    DRAINING = auto()  # decided; sends may still be in flight, so blocks stay pinned
    RELEASED = auto()  # blocks are the caller's again


class SenderEvent(Enum):
    PULL = auto()
    FINISH_SENT = auto()
    COMMIT = auto()
    ABORT = auto()  # D gives up
    DROP = auto()  # D does not want it and never read
    EXPIRE = auto()  # the lease ended
    CANCEL = auto()  # our own node gives up
    FAIL = auto()  # a send failed or a wanted block does not exist
    PEER_LOST = auto()
    QUIET = auto()  # no send request is pending


S, E = SenderState, SenderEvent
_STOPS = dict.fromkeys((E.ABORT, E.EXPIRE, E.CANCEL, E.FAIL, E.PEER_LOST), S.DRAINING)

SENDER_TRANSITIONS: Mapping[SenderState, Mapping[SenderEvent, SenderState]] = {
    S.OFFERED: {E.PULL: S.SENDING, E.DROP: S.DRAINING, E.EXPIRE: S.DRAINING, E.CANCEL: S.DRAINING},
    S.SENDING: {E.FINISH_SENT: S.FINISHED, **_STOPS},
    S.FINISHED: {E.COMMIT: S.DRAINING, **_STOPS},
    S.DRAINING: {E.QUIET: S.RELEASED},
    S.RELEASED: {},
}


class ReceiverState(Enum):
    CONNECTING = auto()
    ASKING = auto()  # Pull is out
    RECEIVING = auto()  # chunks arrive
    CLOSING = auto()  # Finish arrived; chunks may still be on their way
    COMMITTED = auto()
    FENCING = auto()  # failed or cancelled; receives may still write
    FAILED = auto()  # quiet: blocks are the caller's again
    QUARANTINED = auto()  # could not be made quiet: blocks stay ours


class ReceiverEvent(Enum):
    CONNECTED = auto()
    PULL_OK = auto()
    NAK = auto()
    RETRY = auto()
    CHUNK = auto()
    FINISH = auto()
    COMPLETE = auto()  # all chunks, all digests, the root
    STOP = auto()  # deadline, failure, cancellation or loss of the peer
    QUIET = auto()
    STUCK = auto()


R, V = ReceiverState, ReceiverEvent

RECEIVER_TRANSITIONS: Mapping[ReceiverState, Mapping[ReceiverEvent, ReceiverState]] = {
    R.CONNECTING: {V.CONNECTED: R.ASKING, V.STOP: R.FENCING},
    R.ASKING: {V.RETRY: R.ASKING, V.PULL_OK: R.RECEIVING, V.NAK: R.FENCING, V.STOP: R.FENCING},
    R.RECEIVING: {V.CHUNK: R.RECEIVING, V.FINISH: R.CLOSING, V.STOP: R.FENCING},
    R.CLOSING: {V.CHUNK: R.CLOSING, V.COMPLETE: R.COMMITTED, V.STOP: R.FENCING},
    R.COMMITTED: {},
    R.FENCING: {V.QUIET: R.FAILED, V.STUCK: R.QUARANTINED},
    R.FAILED: {},
    R.QUARANTINED: {V.QUIET: R.FAILED},
}

StateT = TypeVar("StateT", bound=Enum)
EventT = TypeVar("EventT", bound=Enum)


class Machine(Generic[StateT, EventT]):
    """A state and its table."""

    def __init__(self, name: str, start: StateT, table: Mapping[StateT, Mapping[EventT, StateT]]) -> None:
        self.name = name
        self.state = start
        self._table = table

    def allows(self, event: EventT) -> bool:
        return event in self._table[self.state]

    def handle(self, event: EventT) -> StateT:
        """Moves on; raises ProtocolViolation and stays where it was if ``event`` has no place here."""
        after = self._table[self.state].get(event)
        if after is None:
            raise ProtocolViolation(f"{self.name}: {event.name} is illegal in state {self.state.name}")
        self.state = after
        return after

    def __repr__(self) -> str:
        return f"<{self.name} {self.state.name}>"


def sender_machine(transfer_id: str) -> Machine[SenderState, SenderEvent]:
    return Machine(f"sending {transfer_id}", SenderState.OFFERED, SENDER_TRANSITIONS)


def receiver_machine(transfer_id: str) -> Machine[ReceiverState, ReceiverEvent]:
    return Machine(f"receiving {transfer_id}", ReceiverState.CONNECTING, RECEIVER_TRANSITIONS)
