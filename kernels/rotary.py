"""Rotary position embedding, half-split layout: dimension i pairs with i + Dh/2."""

import torch
from torch import Tensor


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates heads: x [*, H, Dh], cos and sin [*, 1, Dh] as `Rope.cos_sin` makes them -> [*, H, Dh].

    `sin` carries the sign of the pair's first half (-sin, sin), so one roll replaces the negated
    concatenation.
    """
    if cos.dtype != x.dtype:  # under autocast
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
