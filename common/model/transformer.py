"""The decoder, top to bottom in one file: the families differ only by what ModelConfig says.

A block's token mixer is attention or recurrent. Nothing here knows where keys, values and states live:
`attend` and `recur` are handed in by the caller (over stored blocks in the engine, dense in training and in
the one-shot oracle). Leading dimensions are free: the engine runs flat tokens
[T], training [B, T]. q/k/v and gate/up are one matrix each; the names of a checkpoint file appear only in
`checkpoint_tensors`.
"""

import math
from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.model.model_config import ModelConfig
from common.model.recurrent import Recur, make_mixer
from common.model.rope import Rope
from kernels.linear import linear, pack_linear
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary
from kernels.silu_mul import silu_mul


class Attend(Protocol):
    """Attention over whatever the caller keeps, causal and windowed as layer `layer` wants."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [*, H, Dh], k and v [*, KV, Dh] (normed and rotated) of the tokens in hand -> [*, H, Dh].

        Layer numbers are global: trunk 0..n-1, MTP module m is layer n+m.
        """
        ...


def _parameter(*shape: int, dtype: torch.dtype | None) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype))


def replace_parameter(module: nn.Module, name: str, packed: Tensor) -> None:
    """Puts a packed weight in the place of a parameter, which is released; leaves the parameter if it is the
    same.
    """
    if packed is not getattr(module, name):
        delattr(module, name)
        module.register_buffer(name, packed, persistent=False)


class DecoderBlock(nn.Module):
    """x + mix(norm(x)), then x + mlp(norm(x)); `kind` says whether mix is attention or a recurrent mixer."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype | None = None, kind: str = "full_attention"
    ) -> None:
        super().__init__()
        d, inner, dh = config.hidden_size, config.intermediate_size, config.head_dim
        heads, kv_heads = config.num_heads, config.num_kv_heads
        self.eps = config.rms_norm_eps
        self.num_heads, self.num_kv_heads, self.head_dim = heads, kv_heads, dh
        self.input_norm = _parameter(d, dtype=dtype)
        self.mixer = make_mixer(kind, config, dtype)
        if self.mixer is None:
            rows = (heads + 2 * kv_heads) * dh  # q, then k, then v
            self.qkv_weight = _parameter(rows, d, dtype=dtype)
            self.o_weight = _parameter(d, heads * dh, dtype=dtype)
            self.qkv_bias = _parameter(rows, dtype=dtype) if config.qkv_bias else None
            self.o_bias = _parameter(d, dtype=dtype) if config.o_bias else None
            self.q_norm = _parameter(dh, dtype=dtype) if config.qk_norm else None
            self.k_norm = _parameter(dh, dtype=dtype) if config.qk_norm else None
        self.post_norm = _parameter(d, dtype=dtype)
        self.gate_up_weight = _parameter(2 * inner, d, dtype=dtype)  # rows: gate, then up
        self.down_weight = _parameter(d, inner, dtype=dtype)
        self.gate_up_bias = _parameter(2 * inner, dtype=dtype) if config.mlp_bias else None
        self.down_bias = _parameter(d, dtype=dtype) if config.mlp_bias else None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend, recur: Recur | None = None
    ) -> Tensor:
        """x [*, D], cos and sin [*, 1, Dh] -> [*, D]."""
        normed = rms_norm(x, self.input_norm, self.eps)
        if self.mixer is None:
            qkv = linear(normed, self.qkv_weight, self.qkv_bias)
            qkv = qkv.view(*qkv.shape[:-1], -1, self.head_dim)
            q, k, v = self._split_rotated(qkv, cos, sin)
            attended = attend(layer, q, k, v).flatten(-2)
            x = x + linear(attended, self.o_weight, self.o_bias)
        else:
            assert recur is not None, f"layer {layer} is recurrent: the caller must hand in `recur`"
            x = x + self.mixer(normed, layer, recur)
        gate_up = linear(rms_norm(x, self.post_norm, self.eps), self.gate_up_weight, self.gate_up_bias)
        return x + linear(silu_mul(gate_up), self.down_weight, self.down_bias)

    def _split_rotated(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """qkv [*, H + 2KV, Dh] -> q, k (normed if the family does, rotated) and v. q and k are rotated in one
        go.
        """
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qk, v = torch.split(qkv, [heads + kv_heads, kv_heads], -2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = torch.split(qk, [heads, kv_heads], -2)
            qk = torch.cat((rms_norm(q, self.q_norm, self.eps), rms_norm(k, self.k_norm, self.eps)), -2)
        q, k = torch.split(rotary(qk, cos, sin), [heads, kv_heads], -2)
        return q, k, v

    def pack(self) -> None:
        """Packs the matrices for this CPU where that is faster: inference only, no saving afterwards."""
        names = ["gate_up_weight", "down_weight"]
        if self.mixer is None:
            names += ["qkv_weight", "o_weight"]
        else:
            self.mixer.pack()
        for name in names:
            replace_parameter(self, name, pack_linear(getattr(self, name)))

    def checkpoint_tensors(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """(name in a checkpoint file, view of the parameter it belongs to) for every tensor of this block."""
        yield prefix + "input_layernorm.weight", self.input_norm
        if self.mixer is None:
            yield from self._attention_tensors(prefix + "self_attn.")
        else:
            yield from self.mixer.checkpoint_tensors(prefix)
        for kind, gate_up in (("weight", self.gate_up_weight), ("bias", self.gate_up_bias)):
            if gate_up is not None:
                gate, up = gate_up.detach().chunk(2)
                yield f"{prefix}mlp.gate_proj.{kind}", gate
                yield f"{prefix}mlp.up_proj.{kind}", up
        rest = {
            "post_attention_layernorm.weight": self.post_norm,
            "mlp.down_proj.weight": self.down_weight,
            "mlp.down_proj.bias": self.down_bias,
        }
        for name, tensor in rest.items():
            if tensor is not None:
                yield prefix + name, tensor

    def _attention_tensors(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        q_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        for kind, qkv in (("weight", self.qkv_weight), ("bias", self.qkv_bias)):
            if qkv is not None:
                q, k, v = torch.split(qkv.detach(), [q_rows, kv_rows, kv_rows])
                yield f"{prefix}q_proj.{kind}", q
                yield f"{prefix}k_proj.{kind}", k
                yield f"{prefix}v_proj.{kind}", v
        rest = {
            "o_proj.weight": self.o_weight,
            "o_proj.bias": self.o_bias,
            "q_norm.weight": self.q_norm,
            "k_norm.weight": self.k_norm,
        }
        for name, tensor in rest.items():
            if tensor is not None:
                yield prefix + name, tensor

    @torch.no_grad()
    def reset_parameters(self, num_layers: int, generator: torch.Generator | None = None) -> None:
        """Fresh weights for training: normal(0, 0.02), outputs scaled by depth, norms one, biases zero."""
        if self.mixer is not None:
            self.mixer.reset_parameters(num_layers, generator)
        for name, parameter in self.named_parameters(recurse=False):
            if name.endswith("norm"):
                parameter.fill_(1.0)
            elif parameter.dim() == 1:
                parameter.zero_()
            else:
                deep = name in ("o_weight", "down_weight")
                parameter.normal_(
                    0.0, 0.02 / math.sqrt(2 * num_layers) if deep else 0.02, generator=generator
                )


class Transformer(nn.Module):
    """Embedding, decoder blocks, final norm and head. Parameters are uninitialised until loaded or reset."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.config = config
        self.embedding = _parameter(config.vocab_size, config.hidden_size, dtype=dtype)
        self.blocks = nn.ModuleList(DecoderBlock(config, dtype, kind) for kind in config.layer_types)
        self.final_norm = _parameter(config.hidden_size, dtype=dtype)
        tied = config.tie_word_embeddings
        self.head = None if tied else _parameter(config.vocab_size, config.hidden_size, dtype=dtype)
        self._packed_head: Tensor | None = None
        self.rope = Rope(config.rope, config.head_dim, config.max_position_embeddings)

    @property
    def head_weight(self) -> Tensor:
        """Output matrix [V, D]; the embedding when tied."""
        return self.embedding if self.head is None else self.head

    def embed(self, token_ids: Tensor) -> Tensor:
        """[*] -> [*, D]."""
        return F.embedding(token_ids, self.embedding)

    def forward(
        self, token_ids: Tensor, positions: Tensor, attend: Attend, recur: Recur | None = None
    ) -> Tensor:
        """ids [*], positions [*] (or broadcastable to it) -> the last block's output [*, D], before the final
        norm.

        This is what MTP module 0 and `logits` read. Models with recurrent layers need `recur`.
        """
        x = self.embed(token_ids)
        cos, sin = self.rope.cos_sin(positions, x.dtype)
        for layer, block in enumerate(self.blocks):
            x = block(x, cos, sin, layer, attend, recur)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head: [*, D] -> [*, V]."""
        weight = self.head_weight if self._packed_head is None else self._packed_head
        return linear(rms_norm(hidden, self.final_norm, self.config.rms_norm_eps), weight)

    def pack(self) -> "Transformer":
        """Packs all matrices for this CPU where that is faster (bf16): for inference only, never saved."""
        for block in self.blocks:
            assert isinstance(block, DecoderBlock)
            block.pack()
        self._packed_head = pack_linear(self.head_weight)  # beside the plain rows, which modules gather
        return self

    def checkpoint_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name in a checkpoint file, view of the parameter it belongs to) for every tensor of the model."""
        yield "model.embed_tokens.weight", self.embedding
        for layer, block in enumerate(self.blocks):
            assert isinstance(block, DecoderBlock)
            yield from block.checkpoint_tensors(f"model.layers.{layer}.")
        yield "model.norm.weight", self.final_norm
        if self.head is not None:
            yield "lm_head.weight", self.head

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Fresh weights for training."""
        self.embedding.normal_(0.0, 0.02, generator=generator)
        if self.head is not None:
            self.head.normal_(0.0, 0.02, generator=generator)
        self.final_norm.fill_(1.0)
        for block in self.blocks:
            assert isinstance(block, DecoderBlock)
            block.reset_parameters(self.config.num_layers, generator)
