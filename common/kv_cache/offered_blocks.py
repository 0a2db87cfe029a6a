"""Which blocks of a request are final, by absolute position: what a prefill offers to its transfer."""

from collections.abc import Sequence

from common.kv_cache.layout import NULL_BLOCK, cdiv


def final_blocks(
    tables: Sequence[Sequence[int]],
    block_sizes: Sequence[int],
    first: int,
    end: int,
    *,
    partial: bool = False,
) -> dict[int, dict[int, int]]:
    """{KV group: {block position: block}} of the blocks that end in positions first+1 .. end and hold KV.

    ``partial``: the block that ``end`` lies in is offered too (the last of a prompt, and its running state).
    """
    found: dict[int, dict[int, int]] = {}
    for g, (table, size) in enumerate(zip(tables, block_sizes, strict=False)):
        upto = cdiv(end, size) if partial else end // size
        blocks = range(first // size, min(upto, len(table)))
        found[g] = {i: table[i] for i in blocks if table[i] != NULL_BLOCK}
    return found
