"""Attention over whole sequences, keys and values in hand: for training and for the one-shot oracle.

Differentiable, no cache. With `record` it keeps every layer's keys and values, which is what the draft-KV
comparison recomputes in one uninterrupted pass.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


class DenseAttention:
    """Causal attention with one window per global layer (trunk layers, then MTP modules).

    `record`, when given, receives {layer: (k, v)}, each [B, T, KV, Dh]. Masks are kept between calls.
    """

    def __init__(
        self, layer_windows: Sequence[int | None], record: dict[int, tuple[Tensor, Tensor]] | None = None
    ) -> None:
        self.layer_windows = tuple(layer_windows)
        self.record = record
        self._masks: dict[tuple[int, int, torch.device], Tensor] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [*, T, H, Dh], k and v [*, T, KV, Dh] -> [*, T, H, Dh]; the sequence is the third dimension from
        last.
        """
        if self.record is not None:
            self.record[layer] = (k, v)
        length, window = q.shape[-3], self.layer_windows[layer]
        mask = None if window is None or window >= length else self._mask(length, window, q.device)
        groups = q.shape[-2] // k.shape[-2]
        q, k, v = q.transpose(-3, -2), k.transpose(-3, -2), v.transpose(-3, -2)
        if groups > 1:
            k, v = k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        return out.transpose(-3, -2)

    def _mask(self, length: int, window: int, device: torch.device) -> Tensor:
        """[T, T] bool, true where position p may see s: p - window < s <= p."""
        key = (length, window, device)
        mask = self._masks.get(key)
        if mask is None:
            positions = torch.arange(length, device=device)
            distance = positions[:, None] - positions[None, :]
            mask = self._masks[key] = (distance >= 0) & (distance < window)
        return mask
