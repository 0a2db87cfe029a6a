"""Token mixers with a state instead of keys and values: a gated short convolution and a gated delta net.

Like attention they know nothing of where their state lives: what crosses positions is computed by `recur`,
handed in by the caller (over stored states in the engine, from zero states over whole sequences in training
and in the oracle). The geometry of a layer's state is `ModelConfig`'s; the recurrences are `kernels`'.
"""

import math
from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.model.model_config import ModelConfig
from kernels.linear import linear, pack_linear
from kernels.rms_norm import rms_norm


class Recur(Protocol):
    """The recurrences of layer `layer` over whatever the caller keeps; tokens in order of position."""

    def short_conv(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """x [*, C], weight [C, K] -> [*, C]; see `kernels.short_conv`."""
        ...

    def gated_delta(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor
    ) -> Tensor:
        """q, k [*, H, Dk], v [*, H, Dv], gates [*, H] -> [*, H, Dv]; see `kernels.gated_delta`."""
        ...


def _parameter(*shape: int, dtype: torch.dtype | None) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype))


class Mixer(nn.Module):
    """What both have: x [*, D] (normed) -> [*, D]."""

    in_weight: Tensor
    out_weight: Tensor
    matrices = ("in_weight", "out_weight")

    def forward(self, x: Tensor, layer: int, recur: Recur) -> Tensor:
        raise NotImplementedError

    def pack(self) -> None:
        """Packs the matrices for this CPU where that is faster: inference only, no saving afterwards."""
        for name in self.matrices:
            weight = getattr(self, name)
            packed = pack_linear(weight)
            if packed is not weight:
                delattr(self, name)
                self.register_buffer(name, packed, persistent=False)

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """(name in a checkpoint file, parameter)."""
        for name, parameter in self.named_parameters():
            yield f"{prefix}mixer.{name}", parameter

    @torch.no_grad()
    def reset_parameters(self, num_layers: int, generator: torch.Generator | None = None) -> None:
        """Fresh weights for training: as a block's, and filters of about unit gain."""
        for name, parameter in self.named_parameters():
            if name == "conv_weight":
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
            elif parameter.dim() > 1:
                scale = 0.02 / math.sqrt(2 * num_layers) if name == "out_weight" else 0.02
                parameter.normal_(0.0, scale, generator=generator)
            elif name == "rate_bias":  # memories of about 3 to 150 positions
                parameter.copy_(torch.linspace(-1.0, -5.0, parameter.shape[0]))
            else:
                parameter.fill_(1.0 if name == "norm" else 0.0)


class ShortConvMixer(Mixer):
    """out(c * conv(b * x)) with b, c, x = in(input): a short filter between two multiplicative gates, the
    operator of H3 and Hyena (arXiv:2212.14052, arXiv:2302.10866) with its short filter alone."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        assert config.recurrent is not None
        d = config.hidden_size
        self.in_weight = _parameter(3 * d, d, dtype=dtype)  # rows: b, c, x
        self.conv_weight = _parameter(d, config.recurrent.conv_kernel, dtype=dtype)
        self.out_weight = _parameter(d, d, dtype=dtype)

    def forward(self, x: Tensor, layer: int, recur: Recur) -> Tensor:
        b, c, x = linear(x, self.in_weight).chunk(3, -1)
        return linear(c * recur.short_conv(layer, b * x, self.conv_weight), self.out_weight)


class GatedDeltaNetMixer(Mixer):
    """The block of Gated Delta Networks (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464, figure 1): q, k
    and v pass a short convolution and SiLU, q and k are normalised, decay and write strength come from the
    input, the output is normed by head and gated. Decay as in Mamba: a = exp(-exp(A) softplus(x + bias))."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        r = config.recurrent
        assert r is not None
        d, self.heads, self.key_dim, self.value_dim = (
            config.hidden_size,
            r.delta_heads,
            r.delta_key_dim,
            r.delta_value_dim,
        )
        self.eps = config.rms_norm_eps
        self.channels = r.delta_channels
        rows = self.channels + self.heads * self.value_dim + 2 * self.heads
        self.in_weight = _parameter(rows, d, dtype=dtype)  # rows: q, k, v, then gate, decay, beta
        self.conv_weight = _parameter(self.channels, r.conv_kernel, dtype=dtype)
        self.log_rate = _parameter(self.heads, dtype=dtype)  # A
        self.rate_bias = _parameter(self.heads, dtype=dtype)
        self.norm = _parameter(self.value_dim, dtype=dtype)
        self.out_weight = _parameter(d, self.heads * self.value_dim, dtype=dtype)

    def forward(self, x: Tensor, layer: int, recur: Recur) -> Tensor:
        heads, dk, dv = self.heads, self.key_dim, self.value_dim
        sizes = [self.channels, heads * dv, heads, heads]
        qkv, gate, rate, beta = torch.split(linear(x, self.in_weight), sizes, -1)
        qkv = F.silu(recur.short_conv(layer, qkv, self.conv_weight))
        parts = torch.split(qkv, [heads * dk, heads * dk, heads * dv], -1)
        q, k, v = (t.reshape(*t.shape[:-1], heads, -1) for t in parts)
        q, k = F.normalize(q.float(), dim=-1) * dk**-0.5, F.normalize(k.float(), dim=-1)
        log_decay = -self.log_rate.float().exp() * F.softplus(rate.float() + self.rate_bias.float())
        out = recur.gated_delta(layer, q, k, v, log_decay, beta.float().sigmoid())
        gated = rms_norm(out, self.norm, self.eps) * F.silu(gate.reshape(out.shape))
        return linear(gated.flatten(-2), self.out_weight)


def make_mixer(kind: str, config: ModelConfig, dtype: torch.dtype | None = None) -> Mixer | None:
    """The mixer of a layer type; None for attention, which the block does itself."""
    match kind:
        case "short_conv":
            return ShortConvMixer(config, dtype)
        case "gated_delta_net":
            return GatedDeltaNetMixer(config, dtype)
        case _:
            return None
