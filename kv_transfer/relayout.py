"""Rearranging blocks between nodes that lay them out differently, as `geometry` says.

The prefill node packs what the decode node will hold, in the decode node's order, so that the decode node can
receive in place wherever it gets whole blocks from one rank. A message holds, for each block position of the
decode node, [planes, block_size, heads asked, head_bytes].
"""

from collections.abc import Mapping, Sequence

import numpy as np

from kv_transfer.geometry import GroupMap
from kv_transfer.plan import Bytes, GroupPool, view_of


def gather_mapped(
    pair: GroupMap, pool: GroupPool, positions: Sequence[int], block_ids: Mapping[int, int]
) -> memoryview:
    """The message for the decode node's blocks at ``positions``. ``block_ids``: source position -> block of
    ``pool``; tokens of blocks that are not there (past the end of the prompt) are zero."""
    inside = pair.destination.inside
    assert inside is not None
    shape = (inside.planes, pair.destination.block_size, len(pair.asked), inside.head_bytes)
    packed = np.zeros((len(positions), *shape), np.uint8)
    blocks = _taken_apart(pool)
    for message, position in zip(packed, positions, strict=True):
        for copy in pair.copies(position):
            block = block_ids.get(copy.source_position)
            if block is not None:
                source = blocks[block][:, _slice(copy.source_tokens), _slice(copy.source_heads)]
                message[:, _slice(copy.tokens)] = source
    return view_of(packed)


def scatter_mapped(pair: GroupMap, pool: GroupPool, block_ids: Sequence[int], packed: memoryview) -> None:
    """Writes the heads of a message to their places in ``block_ids``; other heads are left alone."""
    inside = pair.destination.inside
    assert inside is not None
    shape = (len(block_ids), inside.planes, pool.block_size, len(pair.asked), inside.head_bytes)
    first = pair.asked.start - inside.heads.start
    heads = slice(first, first + len(pair.asked))
    _taken_apart(pool)[list(block_ids), :, :, heads] = np.frombuffer(packed, np.uint8).reshape(shape)


def _taken_apart(pool: GroupPool) -> Bytes:
    """[num_blocks, planes, block_size, heads, head_bytes], the same memory."""
    inside = pool.inside
    assert inside is not None
    return pool.array_NB.reshape(-1, inside.planes, pool.block_size, len(inside.heads), inside.head_bytes)


def _slice(part: range) -> slice:
    return slice(part.start, part.stop)
