"""What a reader of KV events tells its consumer, in the order in which to apply it.

Between Gap or Restarted and CaughtUp what is known of the publisher may be wrong; Lost has no CaughtUp.
"""

from dataclasses import dataclass
from typing import Literal

from common.kv_events import AllBlocksCleared, DecodedBatch
from common.kv_snapshot import BlockMirror, BlockRecord


@dataclass(frozen=True)
class Events:
    """One batch, to be applied in this order."""

    seq: int
    batch: DecodedBatch
    replayed: bool


@dataclass(frozen=True)
class Gap:
    """Batches ``first_seq`` .. ``last_seq`` were missed; recovery has begun."""

    first_seq: int
    last_seq: int


@dataclass(frozen=True)
class CaughtUp:
    """All batches up to ``seq`` are accounted for."""

    seq: int
    by: Literal["live", "replay", "snapshot"]


@dataclass(frozen=True)
class Lost:
    """Batches ``first_seq`` .. ``last_seq`` cannot be had: forget what was known of this publisher."""

    first_seq: int
    last_seq: int


@dataclass(frozen=True)
class Restarted:
    """Another process publishes here now: forget what was known. ``epoch`` is None until it is told."""

    epoch: str | None


@dataclass(frozen=True)
class SnapshotLoaded:
    """Replace what was known by ``blocks``. Batches up to ``seq`` are in it; later ones follow."""

    epoch: str
    seq: int
    blocks: list[BlockRecord]


@dataclass(frozen=True)
class Undecodable:
    """A batch that could not be read; its events are missing, the stream goes on. ``seq`` is None where
    even that could not be read."""

    seq: int | None
    reason: str


Update = Events | Gap | CaughtUp | Lost | Restarted | SnapshotLoaded | Undecodable


def apply_update(held: BlockMirror, update: Update) -> None:
    """What the publisher holds, as far as the updates tell."""
    match update:
        case Events(batch=batch):
            for event in batch.events:
                held.apply(event)
        case Restarted() | Lost():
            held.apply(AllBlocksCleared())
        case SnapshotLoaded(blocks=blocks):
            held.apply(AllBlocksCleared())
            for block in blocks:
                held.add(block)
        case Gap() | CaughtUp() | Undecodable():
            pass
