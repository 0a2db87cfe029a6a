"""Plain torch, slow and obvious: the oracle that every fast path is compared with."""

from collections.abc import Sequence

import torch
from torch import Tensor


def paged_attention(
    q: Tensor,
    kv_rows: Tensor,
    tables: Sequence[Sequence[int]],
    query_positions: Sequence[Sequence[int]],
    *,
    block_rows: int,
    layer_offset: int,
    block_size: int,
    num_kv_heads: int,
    window: int | None,
) -> Tensor:
    """q [T, H, Dh], sequence after sequence -> [T, H, Dh].

    ``tables[i]`` are sequence i's blocks, ``query_positions[i]`` its queries' positions; ``block_rows``
    is the number of rows of one block. A query at p sees keys at max(0, p - window + 1) .. p.
    """
    heads, size = q.shape[1:]
    out = torch.empty_like(q)
    row = 0
    for table, positions in zip(tables, query_positions, strict=True):
        for p in positions:
            first = 0 if window is None else max(0, p - window + 1)
            slots = [table[s // block_size] * block_rows + s % block_size for s in range(first, p + 1)]
            k_rows = torch.tensor(slots) + layer_offset
            k = kv_rows[k_rows].view(-1, num_kv_heads, size).float()
            v = kv_rows[k_rows + block_size].view(-1, num_kv_heads, size).float()
            for h in range(heads):
                kv_head = h // (heads // num_kv_heads)
                scores = (k[:, kv_head] @ q[row, h].float()) / size**0.5
                out[row, h] = (scores.softmax(0) @ v[:, kv_head]).to(out.dtype)
            row += 1
    return out
