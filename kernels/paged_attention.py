"""Attention over paged KV, and the write of new KV into its slots: the CPU path.

KV lives in rows of KV-heads x head-size numbers. Inside a block the rows are ordered layer, then K before
V, then token, so one layer's K row of slot (block, offset) is `base + layer_offset` and its V row lies
`block_size` further. Sequences with few queries run as one padded batch, long chunks one by one.
`kernels.reference` is the oracle.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class QueryBatch:
    """S sequences of up to Lq queries over up to M keys.

    rows [S, Lq]: row of each query among the step's T tokens (padding repeats row 0 of the sequence), or
    None when the T tokens are exactly S x Lq in order. keys [S, M]: base row of each key. mask
    [S, 1, Lq, M], true where a query sees a key; None when every query sees every key. valid [S, Lq] is
    None where nothing is padded.
    """

    num_sequences: int
    num_queries: int
    rows: Tensor | None
    valid: Tensor | None
    keys: Tensor
    mask: Tensor | None
    _masks: dict[int, Tensor] = field(default_factory=dict)

    def mask_for(self, shared: int) -> Tensor | None:
        """The mask for ``shared`` query heads per KV head, which run as further queries; made once a pass."""
        if self.mask is None or shared == 1:
            return self.mask
        if shared not in self._masks:
            self._masks[shared] = self.mask.repeat(1, 1, shared, 1)
        return self._masks[shared]


def store_kv(
    kv_rows: Tensor, slots: Tensor, layer_offset: int, block_size: int, k: Tensor, v: Tensor
) -> None:
    """Writes k and v [T, KV, Dh] to the K and V rows of ``slots`` [T] (base rows) of one layer.

    Several tokens may share a slot of the null block; which of them stays there is nobody's concern.
    """
    k_rows = slots + layer_offset
    kv_rows.index_copy_(0, torch.cat((k_rows, k_rows + block_size)), torch.cat((k.flatten(1), v.flatten(1))))


def paged_attention(
    q: Tensor,
    kv_rows: Tensor,
    batches: tuple[QueryBatch, ...],
    layer_offset: int,
    block_size: int,
    num_kv_heads: int,
) -> Tensor:
    """q [T, H, Dh] over paged rows [R, KV * Dh] -> [T, H, Dh], scaled by 1/sqrt(Dh)."""
    if len(batches) == 1 and batches[0].rows is None:
        return _attend(q, kv_rows, batches[0], layer_offset, block_size, num_kv_heads).reshape(q.shape)
    out = torch.empty_like(q)
    for batch in batches:
        assert batch.rows is not None
        attended = _attend(q[batch.rows], kv_rows, batch, layer_offset, block_size, num_kv_heads)
        if batch.valid is None:
            out[batch.rows] = attended
        else:
            out[batch.rows[batch.valid]] = attended[batch.valid]
    return out


def _attend(
    q: Tensor, kv_rows: Tensor, batch: QueryBatch, layer_offset: int, block_size: int, num_kv_heads: int
) -> Tensor:
    """q [S * Lq, H, Dh] or [S, Lq, H, Dh] -> [S, Lq, H, Dh]. Query heads of one KV head become queries."""
    s, length = batch.num_sequences, batch.num_queries
    heads, size = q.shape[-2:]
    shared = heads // num_kv_heads
    k_rows = batch.keys.flatten() + layer_offset
    gathered = kv_rows.index_select(0, torch.cat((k_rows, k_rows + block_size)))
    kv = gathered.view(2, s, -1, num_kv_heads, size).transpose(2, 3)  # [2, S, KV, M, Dh]
    q = q.reshape(s, length, num_kv_heads, shared, size).permute(0, 2, 3, 1, 4)
    q = q.reshape(s, num_kv_heads, shared * length, size)
    out = F.scaled_dot_product_attention(q, kv[0], kv[1], attn_mask=batch.mask_for(shared))
    out = out.view(s, num_kv_heads, shared, length, size).permute(0, 3, 1, 2, 4)
    return out.reshape(s, length, heads, size)
