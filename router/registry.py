"""The nodes a router knows: what each registered, its load, and whether a new one fits in.

A node is one process: a restart brings a new epoch and is another node. Load is what the node reported,
corrected by what this router started and finished there since, so that placements of the last half second
count at once and several routers over the same nodes still see each other's work.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from common.block_hash import BlockHasher
from common.errors import ConfigError
from common.messages import Heartbeat, NodeLoad, Register

if TYPE_CHECKING:
    from router.node_hub import Leg

ROLES = ("prefill", "decode", "both")


@dataclass(eq=False)
class Node:
    """A live node. Only the hub writes to it."""

    identity: bytes
    register: Register
    hasher: BlockHasher
    last_heard_s: float
    load: NodeLoad = field(default_factory=NodeLoad)
    draining: bool = False
    last_event_seq: int = -1
    beats: bool = False  # a heartbeat came since it last registered: it knew itself registered
    legs: dict[str, "Leg"] = field(default_factory=dict)  # by request id: this router's work there
    _foreign: int = 0  # requests of other routers, as of the last heartbeat

    @property
    def node_id(self) -> str:
        return self.register.node_id

    @property
    def decodes(self) -> bool:
        return self.register.role in ("decode", "both")

    @property
    def prefills(self) -> bool:
        """Whether it computes prompts for other nodes; an aggregated node works for itself only."""
        return self.register.role == "prefill"

    @property
    def num_requests(self) -> int:
        return self._foreign + len(self.legs)

    def heard(self, heartbeat: Heartbeat, now_s: float) -> None:
        self.last_heard_s = now_s
        self.beats = True
        self.load = heartbeat.load
        self.draining = heartbeat.draining
        self.last_event_seq = heartbeat.last_event_seq
        reported = heartbeat.load.num_running + heartbeat.load.num_waiting + heartbeat.load.num_receiving
        self._foreign = max(0, reported - len(self.legs))


def make_node(identity: bytes, register: Register, now_s: float) -> Node:
    """Raises ConfigError if the node's hash parameters are none that we can compute."""
    hasher = BlockHasher(
        register.block_size, register.num_lookahead, register.hash_algorithm, register.hash_seed
    )
    return Node(identity, register, hasher, now_s)


@dataclass(frozen=True)
class ServedModel:
    """What the router serves, to hold against what nodes register."""

    name: str
    aliases: tuple[str, ...]  # other names of the same model that nodes may be started with
    tokenizer_digest: str


def refusal(register: Register, served: ServedModel, live: Iterable[Node]) -> str | None:
    """Why this node cannot join, naming what differs and from what; None if it fits."""
    if register.role not in ROLES:
        return f"role {register.role!r} is none of {', '.join(ROLES)}"
    if register.model not in (served.name, *served.aliases):
        return f"it serves model {register.model!r}, this router serves {served.name!r}"
    if register.tokenizer_digest and register.tokenizer_digest != served.tokenizer_digest:
        return (
            f"its tokenizer differs: digest {register.tokenizer_digest[:12]}, the router's is "
            f"{served.tokenizer_digest[:12]}"
        )
    if register.role == "prefill" and register.transfer is None:
        return "a prefill node must register the address of its KV transfer"
    try:
        make_node(b"", register, 0.0)
    except ConfigError as error:
        return error.message
    for other in live:
        if other.node_id != register.node_id:
            differing = _differences(register.fingerprint, other.register.fingerprint)
            mine, theirs = register.block_size, other.register.block_size
            if mine % theirs and theirs % mine:
                differing.append(f"block_size is {mine} and {theirs}: one must be a multiple of the other")
            if differing:
                return f"it does not fit node {other.node_id}: {'; '.join(differing)}"
    return None


def _differences(mine: dict[str, str], theirs: dict[str, str]) -> list[str]:
    return [
        f"{name} is {mine.get(name)!r} instead of {theirs.get(name)!r}"
        for name in sorted(mine.keys() | theirs.keys())
        if mine.get(name) != theirs.get(name)
    ]
