"""Caches of tensor-parallel ranks, filled with the KV of one prompt, whatever the size of their blocks."""

from collections.abc import Mapping

import numpy as np

from common.kv_cache.layout import cdiv
from kv_transfer.geometry import HeadShare
from kv_transfer.plan import Bytes, GroupPool, KvPools

PLANES = (6, 2)  # by group: three layers, and one module
HEAD_BYTES = 4
STATE_BYTES, STATE_TOKENS = 100, 64
NUM_BLOCKS = 24
CUT = 133  # in the middle of a block of 16 and of 32, and the second half of the latter is not there
GUARD = 0xA5


def truth(inside: HeadShare, group: int) -> Bytes:
    """[planes, tokens, heads of a rank, bytes]: what the prompt's KV is, wherever it lies."""
    shape = (PLANES[group], 160, inside.num_kv_heads, HEAD_BYTES)
    everything = np.random.default_rng(group).integers(0, 256, shape, dtype=np.uint8)
    return everything[:, :, inside.heads.start : inside.heads.stop]


def make_pools(block_size: int, num_heads: int, rank: int = 0, size: int = 1) -> KvPools:
    """Two groups of KV and one of state."""
    groups = []
    for planes in PLANES:
        inside = HeadShare(planes, num_heads, HEAD_BYTES, rank, size)
        buffer = np.full((NUM_BLOCKS, planes * block_size * inside.token_bytes), GUARD, np.uint8)
        groups.append(GroupPool(buffer, block_size, inside))
    state = np.full((8, STATE_BYTES), GUARD, np.uint8)
    return KvPools((*groups, GroupPool(state, STATE_TOKENS)))


def apart(pool: GroupPool, block: int) -> Bytes:
    """[planes, block_size, heads, bytes] of one block, the same memory."""
    assert pool.inside is not None
    heads = len(pool.inside.heads)
    part: Bytes = pool.array_NB[block].reshape(pool.inside.planes, pool.block_size, heads, HEAD_BYTES)
    return part


def ids_of(block_size: int, salt: int) -> dict[int, int]:
    """Block position -> block: some of them consecutive, so that both ways of receiving are taken."""
    count = cdiv(CUT, block_size)
    return {p: (p + salt if p < 2 else NUM_BLOCKS - 1 - p) for p in range(count)}


def compute(pools: KvPools, upto: int, *, first: int = 0, leave_out: int = -1) -> dict[int, int]:
    """A rank of P computes the prompt's positions first .. upto-1. Returns the blocks that this makes final,
    by position; the one in which the prompt ends is the last of them, though partial."""
    size = pools.groups[0].block_size
    whole = range(first // size, cdiv(CUT, size) if upto == CUT else upto // size)
    placed = {p: b for p, b in ids_of(size, 3).items() if p in whole and p != leave_out}
    for group, pool in enumerate(pools.groups[: len(PLANES)]):
        assert pool.inside is not None
        wanted = truth(pool.inside, group)[:, :upto]
        for position, block in placed.items():
            part = wanted[:, position * size : (position + 1) * size]
            apart(pool, block)[:, : part.shape[1]] = part
    return placed


def check(pools: KvPools, want: Mapping[int, Mapping[int, int]]) -> None:
    """Every token below the cut in its place, and no other block touched."""
    for group in range(len(PLANES)):
        pool = pools.groups[group]
        assert pool.inside is not None
        wanted = truth(pool.inside, group)[:, :CUT]
        for position, block in want[group].items():
            part = wanted[:, position * pool.block_size : (position + 1) * pool.block_size]
            assert (apart(pool, block)[:, : part.shape[1]] == part).all(), (group, position)
        others = sorted(set(range(NUM_BLOCKS)) - set(want[group].values()))
        assert (pool.array_NB[others] == GUARD).all()
