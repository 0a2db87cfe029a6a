"""Causal depthwise convolution over a few positions, with the state that lets it go on where it stopped.

    y_t = sum over j of w[:, j] * x_{t-K+1+j}        (x before position 0 is zero)

The short filter of gated-convolution layers (H3, Fu et al. 2022, arXiv:2212.14052; Hyena, Poli et al. 2023,
arXiv:2302.10866). The state is the last K-1 inputs, oldest first, and cannot be rewound. `short_conv` runs a
stretch of positions, `short_conv_step` one; both compute in fp32, whatever the activations are.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def short_conv(x: Tensor, weight: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """x [*, T, C], weight [C, K], state fp32 [*, C, K-1] -> y [*, T, C] and the state after position T-1."""
    channels, kernel = weight.shape
    seen = torch.cat((state, x.transpose(-1, -2).to(state.dtype)), -1)  # [*, C, K-1+T]
    flat = seen.reshape(-1, channels, seen.shape[-1])
    y = F.conv1d(flat, weight.to(state.dtype)[:, None], groups=channels)
    return y.view(*x.shape[:-2], channels, -1).transpose(-1, -2).to(x.dtype), _last(seen, kernel - 1)


def short_conv_step(x: Tensor, weight: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """x [S, C] of one position of S sequences, state fp32 [S, C, K-1] -> y [S, C] and the next states."""
    seen = torch.cat((state, x[..., None].to(state.dtype)), -1)  # [S, C, K]
    y = (seen * weight.to(state.dtype)).sum(-1)
    return y.to(x.dtype), seen[..., 1:]


def _last(seen: Tensor, count: int) -> Tensor:
    return seen[..., seen.shape[-1] - count :]  # count may be 0, where [-0:] would be everything
