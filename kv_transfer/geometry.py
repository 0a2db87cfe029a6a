"""Whose bytes go where when two nodes lay one KV group out differently: pure functions, no torch, no I/O.

A block is [planes, block_size, heads of this rank, head_bytes], C order; its planes are layer 0 K, layer 0
V, layer 1 K, ..., MTP modules among the layers (see `common/kv_cache/layout.py` and `storage.py`). Nodes may
differ in block size, one a multiple of the other, and in tensor-parallel degree. What a destination rank
holds is asked of as few source ranks as hold it, every head of exactly one, and every token of a block of
exactly one source block. A group without planes (recurrent state) is opaque: both nodes lay it out alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from common.errors import ConfigError


def head_range(num_kv_heads: int, tp_rank: int, tp_size: int) -> range:
    """The KV heads that a rank holds: its equal share, or one that other ranks hold too where there are fewer
    heads than ranks. Raises ConfigError by name for a split that would leave ranks with unequal shares: the
    query heads of one rank would then read unequally many KV heads (3 on 4 ranks: one, two, two, one)."""
    if not 0 <= tp_rank < tp_size:
        raise ConfigError(f"tensor-parallel rank {tp_rank} does not exist: there are {tp_size} ranks")
    if num_kv_heads % tp_size == 0:
        share = num_kv_heads // tp_size
        return range(tp_rank * share, (tp_rank + 1) * share)
    if tp_size % num_kv_heads == 0:
        head = tp_rank // (tp_size // num_kv_heads)
        return range(head, head + 1)
    raise ConfigError(
        f"{num_kv_heads} KV heads cannot be shared evenly by {tp_size} tensor-parallel ranks; choose a "
        f"number of ranks that divides {num_kv_heads}, or a multiple of it"
    )


def sources(num_kv_heads: int, source_size: int, rank: int, size: int) -> dict[int, range]:
    """Source rank -> heads that destination ``rank`` of ``size`` asks it for, in order of the heads.

    Where a head is on several source ranks, the destination ranks that hold it are spread over them evenly.
    """
    copies = max(1, size // num_kv_heads)  # destination ranks per head
    source_copies = max(1, source_size // num_kv_heads)
    share = len(head_range(num_kv_heads, 0, source_size))
    spread = rank % copies * source_copies // copies
    asked: dict[int, range] = {}
    for head in head_range(num_kv_heads, rank, size):
        source = head // share * source_copies + spread
        asked[source] = range(asked[source].start if source in asked else head, head + 1)
    return asked


@dataclass(frozen=True)
class HeadShare:
    """The inside of a block of one rank: ``planes`` x tokens x its heads x ``head_bytes``."""

    planes: int  # layers x (K, V)
    num_kv_heads: int  # of all ranks together
    head_bytes: int  # one head of one token of one plane
    tp_rank: int = 0
    tp_size: int = 1

    @property
    def heads(self) -> range:
        return head_range(self.num_kv_heads, self.tp_rank, self.tp_size)

    @property
    def token_bytes(self) -> int:
        """Of one token in one plane: the stride from token to token."""
        return len(self.heads) * self.head_bytes


@dataclass(frozen=True)
class GroupGeometry:
    """One group of one rank. ``inside`` is None where a block cannot be taken apart."""

    block_size: int  # tokens
    block_bytes: int
    inside: HeadShare | None = None

    def __post_init__(self) -> None:
        inside = self.inside
        if self.block_size < 1 or self.block_bytes < 1:
            raise ConfigError(f"a block of {self.block_size} tokens and {self.block_bytes} bytes is empty")
        if inside is not None and self.block_bytes != inside.planes * self.block_size * inside.token_bytes:
            raise ConfigError(
                f"a block of {self.block_bytes} bytes is not {inside.planes} planes x {self.block_size} "
                f"tokens x {inside.token_bytes} bytes"
            )


@dataclass(frozen=True)
class BlockCopy:
    """What one source block gives one destination block, in every plane: a range of tokens, as they are
    counted inside either block, and of heads, as they are inside the source's."""

    source_position: int  # absolute block position, in blocks of the source
    source_tokens: range
    tokens: range  # in the destination block
    source_heads: range


@dataclass(frozen=True)
class GroupMap:
    """From one rank of the source to one rank of the destination, for one group."""

    source: GroupGeometry
    destination: GroupGeometry

    @cached_property
    def is_identity(self) -> bool:
        """Blocks are equal byte for byte: nothing need be rearranged."""
        a, b = self.source, self.destination
        if a.inside is None or b.inside is None:
            return a == b
        return a.block_size == b.block_size and a.inside.heads == b.inside.heads == self.asked

    @cached_property
    def asked(self) -> range:
        """Heads, as the model counts them, that this source rank gives; empty where others do."""
        a, b = self.source.inside, self.destination.inside
        assert a is not None
        assert b is not None
        return sources(b.num_kv_heads, a.tp_size, b.tp_rank, b.tp_size).get(a.tp_rank, range(0))

    @property
    def fills_blocks(self) -> bool:
        """This source rank gives all of a destination block, not only some of its heads."""
        inside = self.destination.inside
        return inside is None or self.asked == inside.heads

    @property
    def bytes_per_block(self) -> int:
        """Of one destination block, as much of it as comes from this source rank."""
        inside = self.destination.inside
        if inside is None:
            return self.destination.block_bytes
        return inside.planes * self.destination.block_size * len(self.asked) * inside.head_bytes

    def source_positions(self, position: int) -> range:
        """Block positions of the source that hold the tokens of the destination's block at ``position``."""
        ours, theirs = self.destination.block_size, self.source.block_size
        return range(position * ours // theirs, ((position + 1) * ours - 1) // theirs + 1)

    def copies(self, position: int) -> tuple[BlockCopy, ...]:
        """All that the source gives to the destination's block at ``position``, in order of the tokens."""
        a = self.source.inside
        assert a is not None, "an opaque block cannot be taken apart"
        if not self.asked:
            return ()
        start, end = position * self.destination.block_size, (position + 1) * self.destination.block_size
        size = self.source.block_size
        out = []
        for p in self.source_positions(position):
            low, high = max(start, p * size), min(end, (p + 1) * size)
            out.append(
                BlockCopy(
                    source_position=p,
                    source_tokens=range(low - p * size, high - p * size),
                    tokens=range(low - start, high - start),
                    source_heads=range(self.asked.start - a.heads.start, self.asked.stop - a.heads.start),
                )
            )
        return tuple(out)


def difference(source: Sequence[GroupGeometry], destination: Sequence[GroupGeometry]) -> str | None:
    """Why no KV can go from one node to the other, naming the group and both values; None where it can."""
    if len(source) != len(destination):
        return f"there are {len(source)} KV groups and {len(destination)}"
    for g, (a, b) in enumerate(zip(source, destination, strict=True)):
        what = _group_difference(a, b)
        if what is not None:
            return f"KV group {g}: {what}"
    return None


def group_maps(source: Sequence[GroupGeometry], destination: Sequence[GroupGeometry]) -> tuple[GroupMap, ...]:
    """By group, of two nodes between which there is no :func:`difference`."""
    return tuple(GroupMap(a, b) for a, b in zip(source, destination, strict=True))


def _group_difference(a: GroupGeometry, b: GroupGeometry) -> str | None:
    if a.inside is None or b.inside is None:
        if a == b:
            return None
        return (
            f"(block_size, block_bytes) are {(a.block_size, a.block_bytes)} and "
            f"{(b.block_size, b.block_bytes)}, and must be equal where blocks cannot be taken apart"
        )
    for name in ("planes", "num_kv_heads", "head_bytes"):
        mine, theirs = getattr(a.inside, name), getattr(b.inside, name)
        if mine != theirs:
            return f"{name} is {mine} and {theirs}"
    if a.block_size % b.block_size and b.block_size % a.block_size:
        return f"block_size is {a.block_size} and {b.block_size}; one must be a multiple of the other"
    if not GroupMap(a, b).asked:
        return (
            f"rank {a.inside.tp_rank} of {a.inside.tp_size} has no KV head that it gives "
            f"to rank {b.inside.tp_rank} of {b.inside.tp_size}"
        )
    return None
