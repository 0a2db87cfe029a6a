"""What moves in which order: pure functions of what a decode node wants, evaluated alike on both nodes.

A block holds all layers of one KV group for ``block_size`` tokens, contiguous. Blocks are paired by absolute
position, so neither node ever learns the other's block ids. Positions are counted in blocks of the decode
node, which may be of another size than the prefill node's (see `geometry`). Both nodes compute the chunk list
from the same request and compare its digest before the first byte moves.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kv_transfer.geometry import GroupGeometry, HeadShare

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class GroupPool:
    """One KV group's blocks. ``buffer``: [num_blocks, block_bytes] uint8, C-contiguous, writable on D."""

    buffer: Any  # ndarray or memoryview
    block_size: int  # tokens
    inside: HeadShare | None = None  # None: a block goes whole or not at all

    @cached_property
    def array_NB(self) -> Bytes:
        """The buffer as [num_blocks, block_bytes] uint8, without a copy."""
        array = np.asarray(self.buffer)
        if array.dtype != np.uint8 or array.ndim != 2 or not array.flags.c_contiguous:
            raise ValueError(
                "a pool must be a contiguous [num_blocks, block_bytes] uint8 array; "
                f"got {array.dtype} {array.shape}"
            )
        return array

    @property
    def num_blocks(self) -> int:
        return int(self.array_NB.shape[0])

    @property
    def block_bytes(self) -> int:
        return int(self.array_NB.shape[1])

    @cached_property
    def geometry(self) -> GroupGeometry:
        return GroupGeometry(self.block_size, self.block_bytes, self.inside)


@dataclass(frozen=True)
class KvPools:
    groups: tuple[GroupPool, ...]

    @cached_property
    def geometry(self) -> tuple[GroupGeometry, ...]:
        """Of every group: what the nodes compare when they meet. Pool sizes are no part of it."""
        return tuple(g.geometry for g in self.groups)


@dataclass(frozen=True)
class Chunk:
    """One message: the blocks of ``positions`` (absolute block positions, ascending) of one group, packed."""

    seq: int
    group: int
    positions: tuple[int, ...]


# A chunk spans at most so many tokens: a group of small blocks (a module's) would otherwise pack a whole
# prompt into one chunk, and nothing of the prompt would count as arrived before its end.
MAX_SPAN_TOKENS = 256


def plan_chunks(
    want: Mapping[int, Sequence[int]], geometry: Sequence[GroupGeometry], chunk_bytes: int
) -> tuple[Chunk, ...]:
    """Packs each group's wanted positions into chunks of at most ``chunk_bytes`` (at least one block), cut at
    absolute positions (which is where a chunked prefill ends too), ordered by the token position at which a
    chunk becomes final, so that the first tokens of all groups go first. ``geometry`` is the decode node's.
    """
    unordered: list[tuple[int, int, tuple[int, ...]]] = []
    for group, positions in want.items():
        block_size, block_bytes = geometry[group].block_size, geometry[group].block_bytes
        per_chunk = max(1, min(chunk_bytes // block_bytes, MAX_SPAN_TOKENS // block_size))
        spans: dict[int, list[int]] = {}
        for position in sorted(positions):
            spans.setdefault(position // per_chunk, []).append(position)
        for members in spans.values():
            part = tuple(members)
            unordered.append(((part[-1] + 1) * block_size, group, part))
    unordered.sort()
    return tuple(Chunk(seq, group, part) for seq, (_, group, part) in enumerate(unordered))


def plan_digest(chunks: Sequence[Chunk]) -> bytes:
    digest = xxhash.xxh3_128()
    for c in chunks:
        digest.update(repr((c.seq, c.group, c.positions)).encode())
    return digest.digest()


def chunk_digest(view: memoryview) -> bytes:
    return xxhash.xxh3_128_digest(view)


class RootDigest:
    """Binds every chunk's digest to transfer, attempt and block positions, in chunk order.

    Equal bytes under another transfer or at other positions therefore give another root."""

    def __init__(self, transfer_id: str, attempt: int) -> None:
        self._hash = xxhash.xxh3_128(repr((transfer_id, attempt)).encode())

    def add(self, chunk: Chunk, digest: bytes) -> None:
        self._hash.update(repr((chunk.seq, chunk.group, chunk.positions)).encode())
        self._hash.update(digest)

    def finish(self, carry: bytes, extra: bytes) -> bytes:
        self._hash.update(xxhash.xxh3_128_digest(carry))
        self._hash.update(xxhash.xxh3_128_digest(extra))
        return self._hash.digest()


def consecutive(ids: Sequence[int]) -> bool:
    return all(b == a + 1 for a, b in pairwise(ids))


def view_of(array: Bytes) -> memoryview:
    """A flat byte view of a contiguous array."""
    return array.reshape(-1).data


def gather(pool: GroupPool, block_ids: Sequence[int]) -> tuple[memoryview, bool]:
    """The bytes of ``block_ids`` in order: a view into the pool where ids are consecutive, else a packed
    copy. Second value: whether it is a copy."""
    if consecutive(block_ids):
        return view_of(pool.array_NB[block_ids[0] : block_ids[-1] + 1]), False
    return view_of(pool.array_NB[list(block_ids)]), True


def scatter(pool: GroupPool, block_ids: Sequence[int], packed: memoryview) -> None:
    """Writes packed blocks to their places: the inverse of :func:`gather`'s copy."""
    pool.array_NB[list(block_ids)] = np.frombuffer(packed, np.uint8).reshape(len(block_ids), pool.block_bytes)


def runs(positions: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Half-open runs of consecutive positions, for messages a person reads."""
    start = prev = None
    for p in positions:
        if prev is not None and p == prev + 1:
            prev = p
            continue
        if start is not None and prev is not None:
            yield start, prev + 1
        start = prev = p
    if start is not None and prev is not None:
        yield start, prev + 1
