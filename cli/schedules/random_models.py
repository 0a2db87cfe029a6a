"""Tiny models with random weights, in memory: what `verify --random-model` and the schedules run on.

Three kinds: full attention; a window and full attention; a hybrid with a window, a gated short convolution,
a gated delta net and full attention. The weights are sharp, so that greedy choices are no near-ties, and the
modules' drafts are right now and then. Where the trunk has a window, some modules share it, some have one of
their own, some have none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from common.model.model_config import ModelConfig
from common.model.mtp import MtpConfig, MtpModules
from common.model.transformer import Transformer

VOCAB = 64
EMBEDDING_SCALE, BLOCK_SCALE = 16.0, 4.0  # of the usual initial weights


def model_config(num_layers: int = 3, window: int | None = 12) -> ModelConfig:
    """A Qwen3-shaped toy: layer 1 has a sliding window, the others are full."""
    layer_types = ["full_attention"] * num_layers
    if window is not None and num_layers > 1:
        layer_types[1] = "sliding_attention"
    return ModelConfig.from_json(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 48,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "max_position_embeddings": 512,
            "layer_types": layer_types,
            "sliding_window": window,
            "use_sliding_window": window is not None,
            "max_window_layers": 0,
            "hidden_act": "silu",
            "attention_bias": False,
            "torch_dtype": "float32",
        }
    )


HYBRID_LAYERS = ("sliding_attention", "short_conv", "gated_delta_net", "full_attention")


def hybrid_config(
    layer_types: Sequence[str] = HYBRID_LAYERS, windows: Sequence[int] = (6,), **changes: int
) -> ModelConfig:
    """A toy of our own family; ``windows`` in turn for the sliding layers, ``changes`` to its config.json."""
    sizes = iter(windows)
    return ModelConfig.from_json(
        {
            "architectures": ["BatonHybridForCausalLM"],
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_hidden_layers": len(layer_types),
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 48,
            "max_position_embeddings": 512,
            "layer_types": list(layer_types),
            "layer_windows": [next(sizes) if kind == "sliding_attention" else None for kind in layer_types],
            "conv_kernel": 4,
            "delta_heads": 2,
            "delta_key_dim": 8,
            "delta_value_dim": 12,
            **changes,
        }
    )


def random_trunk(
    seed: int = 0, window: int | None = 12, num_layers: int = 3, config: ModelConfig | None = None
) -> Transformer:
    """Sharp enough that greedy choices are no near-ties; of ``config``, else attention with a window."""
    generator = torch.Generator().manual_seed(seed)
    trunk = Transformer(config or model_config(num_layers, window), torch.float32)
    trunk.reset_parameters(generator)
    with torch.no_grad():
        for name, parameter in trunk.named_parameters():
            if parameter.dim() > 1 and not name.endswith("conv_weight"):
                parameter.mul_(BLOCK_SCALE if name.startswith("blocks") else EMBEDDING_SCALE)
    return trunk.eval().requires_grad_(False)


def random_modules(
    trunk: Transformer, num_modules: int, seed: int = 1, windows: Sequence[int | None] = ()
) -> MtpModules:
    """Modules whose drafts are right about .7 / .4 / .3 / .1 of the time, position by position.

    The trunk's next token depends mostly on the last one, and so does the modules' (the same last block over
    the token's embedding at its true scale).
    """
    config = MtpConfig(num_modules=num_modules, trunk_digest="random", windows=tuple(windows))
    modules = MtpModules(config, trunk, None, torch.float32)
    modules.init_from_trunk()
    generator = torch.Generator().manual_seed(seed)
    identity = torch.eye(trunk.config.hidden_size)
    with torch.no_grad():
        for m in range(num_modules):
            modules.module(m).hidden_norm.fill_(1.0)
            modules.module(m).proj.copy_(torch.cat((0.2 * identity, 0.05 * EMBEDDING_SCALE * identity), 1))
        for parameter in modules.parameters():
            if parameter.dim() > 1:
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return modules.eval().requires_grad_(False)


KINDS = ("full", "window", "hybrid")
_WINDOW, _OWN_WINDOW = 6, 11  # of the trunk's layers and some modules; of other modules alone


@dataclass(frozen=True, eq=False)
class Weights:
    """A trunk and its N modules; of ``num_modules`` 0 there are none."""

    name: str
    trunk: Transformer
    modules: MtpModules | None
    num_modules: int


@cache
def random_weights(kind: str, num_modules: int, vocab_size: int = VOCAB) -> Weights:
    """``kind`` is one of KINDS; only hybrids may have another vocabulary. One trunk a kind, whatever N."""
    trunk = _trunk(kind, vocab_size)
    name = f"random {kind}, N = {num_modules}"
    if num_modules == 0:
        return Weights(name, trunk, None, 0)
    own = (None,) if kind == "full" else (None, _WINDOW, _OWN_WINDOW)
    windows = [own[m % len(own)] for m in range(num_modules)]
    return Weights(name, trunk, random_modules(trunk, num_modules, windows=windows), num_modules)


@cache
def _trunk(kind: str, vocab_size: int) -> Transformer:
    if kind == "full":
        return random_trunk(window=None, num_layers=1)
    if kind == "window":
        return random_trunk(config=model_config(2, _WINDOW))
    assert kind == "hybrid", f"{kind!r} is not one of {', '.join(KINDS)}"
    return random_trunk(config=hybrid_config(HYBRID_LAYERS, (_WINDOW,), vocab_size=vocab_size))
