"""The decoder against two oracles: recorded goldens of another engine, and `transformers` on random
checkpoints.

Each model runs in one pass with dense attention and token by token over a growing cache, so that the
rotary tables, windows and masks are checked from both sides. `transformers` is a development dependency;
it looks for a package called `kernels` by version and finds that ours is none of its own.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from common.model.dense_attention import DenseAttention
from common.model.transformer import Transformer
from common.model.weights import load_transformer

LENGTH = 80
COMMON: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
BEFORE = {"original_max_position_embeddings": 32}  # so that LENGTH goes well beyond the pre-training length
SLIDING = {"use_sliding_window": True, "sliding_window": 16}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **BEFORE}
CASES: dict[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-theta": ("Llama", {"tie_word_embeddings": True, "rope_theta": 5e5}),
    "llama-head-dim": ("Llama", {"head_dim": 24, "num_key_value_heads": 4}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
    "llama-linear": ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama-dynamic": ("Llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama-llama3": ("Llama", {"rope_scaling": LLAMA3}),
    "llama-yarn": ("Llama", {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, **BEFORE}}),
    "llama-yarn-mscale": (
        "Llama",
        {
            "rope_scaling": {
                **{"rope_type": "yarn", "factor": 8.0, "mscale": 0.8, "mscale_all_dim": 0.5},
                **{"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
                **BEFORE,
            }
        },
    ),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied-layer-types": ("Qwen2", {"tie_word_embeddings": True, "layer_types": KINDS, **SLIDING}),
    "qwen2-max-window-layers": ("Qwen2", {"max_window_layers": 1, **SLIDING}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "qwen3-tied-bias": ("Qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-windows-yarn": (
        "Qwen3",
        {
            **{"head_dim": 32, "layer_types": KINDS, "rope_theta": 1e6},
            **{"rope_scaling": {"rope_type": "yarn", "factor": 4.0, **BEFORE}},
            **SLIDING,
        },
    ),
}


class GrowingCache:
    """Attention over flat tokens [T], keys and values of all earlier calls kept: what an engine does,
    plainly.
    """

    def __init__(self, layer_windows: tuple[int | None, ...]) -> None:
        self.layer_windows = layer_windows
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if layer in self.kept:
            k, v = torch.cat((self.kept[layer][0], k)), torch.cat((self.kept[layer][1], v))
        self.kept[layer] = (k, v)
        end, window = k.shape[0], self.layer_windows[layer]
        distance = torch.arange(end - q.shape[0], end)[:, None] - torch.arange(end)[None]
        seen = (distance >= 0) & (distance < (window or end))
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        groups = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(0, 1)


def one_shot(model: Transformer, ids: list[int]) -> Tensor:
    """Logits [T, V] of one dense pass."""
    attend = DenseAttention(model.config.layer_windows)
    return model.logits(model(torch.tensor([ids]), torch.arange(len(ids)), attend))[0]


def step_wise(model: Transformer, ids: list[int], chunk: int) -> Tensor:
    """Logits [T, V], `chunk` flat tokens at a time."""
    attend = GrowingCache(model.config.layer_windows)
    positions = torch.arange(len(ids)).split(chunk)  # type: ignore[no-untyped-call]
    hidden = [model(torch.tensor(ids)[part], part, attend) for part in positions]
    return model.logits(torch.cat(hidden))


def save_random_checkpoint(family: str, change: Mapping[str, Any], folder: Path, ids: list[int]) -> Tensor:
    """A random model of `transformers` in `folder`; returns its own logits [T, V]."""
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **change}, attn_implementation="eager")
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms too, which would start as zeros and ones
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
        model.save_pretrained(folder)
        logits: Tensor = model(torch.tensor([ids])).logits[0]
    return logits


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_random_checkpoints_agree_with_transformers(case: str, tmp_path: Path) -> None:
    family, change = CASES[case]
    ids = torch.randint(97, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = save_random_checkpoint(family, change, tmp_path, ids)
    model = load_transformer(tmp_path, "float32")
    scale = expected.abs().max().item()
    assert scale < 100, "logits so large that 1e-4 would be rounding"
    for got in (one_shot(model, ids), step_wise(model, ids, 1), step_wise(model, ids, 7)):
        assert (got - expected).abs().max().item() < 1e-4
    if model.config.layer_windows != (None,) * 3:  # the case can tell: without windows it differs
        model.config = replace(model.config, layer_windows=(None,) * 3)
        assert (one_shot(model, ids) - expected).abs().max().item() > 1e-2


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.inference_mode()
def test_recorded_goldens(family: str, shared_dir: Path) -> None:
    """Tokens and top-5 log-probabilities of another engine, fp32, prompts of 1 to 700, teacher-forced."""
    folder = shared_dir / "conformance" / "models"
    model = load_transformer(folder / f"tiny_{family}", "float32")
    cases = json.loads((folder / f"golden_{family}_fp32.json").read_text())
    assert len(cases) >= 9
    for case in cases:
        prompt, output = case["prompt"], case["output"]
        logprobs = one_shot(model, prompt + output[:-1])[len(prompt) - 1 :].log_softmax(-1)
        for step, (token, top5) in enumerate(zip(output, case["top5"], strict=True)):
            row = logprobs[step]
            for other, logprob in top5.items():
                assert row[int(other)].item() == pytest.approx(logprob, abs=1e-4)
            assert row[token].item() >= row.max().item() - 1e-4  # equal, or a near-tie


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@torch.inference_mode()
def test_recorded_tokens_token_by_token(family: str, shared_dir: Path) -> None:
    """Our own greedy tokens over a growing cache, up to the first near-tie."""
    folder = shared_dir / "conformance" / "models"
    model = load_transformer(folder / f"tiny_{family}", "float32")
    compared = 0
    for case in json.loads((folder / f"golden_{family}_fp32.json").read_text()):
        attend, ids = GrowingCache(model.config.layer_windows), torch.tensor(case["prompt"])
        start = 0
        for token in case["output"]:
            logits = model.logits(model(ids, torch.arange(start, start + len(ids)), attend)[-1])
            best, second = logits.topk(2).values.tolist()
            if best - second < 1e-4:
                break
            assert logits.argmax().item() == token
            start, ids, compared = start + len(ids), torch.tensor([token]), compared + 1
    assert compared > 200
