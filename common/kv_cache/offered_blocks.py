"""Which blocks of a request are final, by absolute position: what a prefill offers to its transfer."""

from collections.abc import Sequence

from common.kv_cache.layout import NULL_BLOCK


def final_blocks(
    tables: Sequence[Sequence[int]], first_block: int, end_block: int
) -> dict[int, dict[int, int]]:
    """{KV group: {block position: block}} for positions first_block .. end_block-1 that hold KV."""
    return {
        g: {i: table[i] for i in range(first_block, min(end_block, len(table))) if table[i] != NULL_BLOCK}
        for g, table in enumerate(tables)
    }
