"""Rotary tables: inverse frequencies of each scaling variant, and cos/sin rows by position.

Angles are computed in fp32 whatever the model's dtype and only then rounded, as the published checkpoints
were trained; a table per dtype is kept, so a step costs one gather.
"""

import math

import torch
from torch import Tensor

from common.model.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Frequencies [Dh/2] in fp32 and the factor that cos and sin are multiplied with (1 except for yarn)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.type == "linear":
        return plain / rope.factor, 1.0
    if rope.type == "llama3":
        return _llama3(plain, rope), 1.0
    if rope.type == "yarn":
        return _yarn(plain, rope, head_dim), _yarn_attention_factor(rope)
    return plain, 1.0  # default; dynamic within max_position_embeddings


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    length = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / plain
    smooth = (length / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - smooth) * plain / rope.factor + smooth * plain
    long = wavelength > length / rope.low_freq_factor
    short = wavelength < length / rope.high_freq_factor
    return torch.where(short, plain, torch.where(long, plain / rope.factor, between))


def _yarn(plain: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """Dimensions that turn often over the pre-training length are kept, others interpolated."""

    def dimension_of(rotations: float) -> float:
        length = rope.original_max_position_embeddings
        return head_dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    dimensions = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    keep = 1 - ((dimensions - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * (1 - keep) + plain * keep


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)


class Rope:
    """cos and sin by position, for positions below `max_positions`."""

    def __init__(self, rope: RopeConfig, head_dim: int, max_positions: int) -> None:
        self.max_positions = max_positions
        self._head_dim = head_dim
        self._frequencies, self._factor = inverse_frequencies(rope, head_dim)
        self._tables: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [*] int64 -> cos and sin [*, 1, Dh] in `dtype`; sin with the sign that `kernels.rotary`
        wants.
        """
        key = (dtype, positions.device)
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = self._table().to(device=positions.device, dtype=dtype)
        rows = table[positions]  # [*, 2, 1, Dh]
        cos, sin = rows.unbind(-3)
        return cos, sin

    def _table(self) -> Tensor:
        positions = torch.arange(self.max_positions, dtype=torch.float32, device="cpu")
        angles = positions[:, None] * self._frequencies  # [P, Dh/2]
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
        return table[:, :, None, :]
