"""RMSNorm, rotation, the SwiGLU gate and packed products against their formulas, odd shapes and strides
included.
"""

import math

import pytest
import torch
from torch import Tensor

from common.model.dense_attention import DenseAttention
from common.model.model_config import ModelConfig, RopeConfig
from common.model.mtp import MtpConfig, MtpModules
from common.model.rope import Rope
from common.model.transformer import Transformer
from kernels.linear import linear, pack_linear
from kernels.rms_norm import rms_norm
from kernels.rotary import rotary
from kernels.silu_mul import silu_mul

SHAPES = [(8,), (1, 8), (3, 5, 8), (0, 8)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x, weight = random(*shape), random(8, seed=1)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected)
    strided = random(*shape[:-1], 16)[..., ::2]
    torch.testing.assert_close(rms_norm(strided, weight, 1e-5), rms_norm(strided.contiguous(), weight, 1e-5))


def test_rms_norm_follows_the_activation_dtype() -> None:
    assert rms_norm(torch.randn(2, 8, dtype=torch.bfloat16), torch.ones(8), 1e-5).dtype == torch.bfloat16


@pytest.mark.parametrize("shape", SHAPES)
def test_silu_mul(shape: tuple[int, ...]) -> None:
    gate, up = random(*shape), random(*shape, seed=1)
    torch.testing.assert_close(silu_mul(torch.cat((gate, up), -1)), gate * torch.sigmoid(gate) * up)


def test_rotation_turns_each_pair_by_position_times_frequency() -> None:
    rope = Rope(RopeConfig(theta=100.0), head_dim=8, max_positions=32)
    positions = torch.tensor([[0, 7], [31, 2]])
    x = random(2, 2, 3, 8)  # [B, T, H, Dh]
    got = rotary(x, *rope.cos_sin(positions, torch.float64))
    for b, t in ((0, 0), (0, 1), (1, 0), (1, 1)):
        for i in range(4):
            angle = positions[b, t].item() * 100.0 ** (-2 * i / 8)
            first, second = x[b, t, :, i], x[b, t, :, i + 4]
            turned = (
                first * math.cos(angle) - second * math.sin(angle),
                second * math.cos(angle) + first * math.sin(angle),
            )
            torch.testing.assert_close(got[b, t, :, i], turned[0], atol=1e-5, rtol=0)
            torch.testing.assert_close(got[b, t, :, i + 4], turned[1], atol=1e-5, rtol=0)


def test_a_position_beyond_the_table_is_an_error() -> None:
    rope = Rope(RopeConfig(), head_dim=8, max_positions=32)
    with pytest.raises(IndexError):
        rope.cos_sin(torch.tensor([32]), torch.float32)


def test_gradients_are_right() -> None:
    cos, sin = Rope(RopeConfig(), 8, 4).cos_sin(torch.arange(3), torch.float64)
    inputs = (random(3, 2, 8).requires_grad_(), random(8, seed=1).requires_grad_())
    assert torch.autograd.gradcheck(lambda x, w: silu_mul(rotary(rms_norm(x, w, 1e-5), cos, sin)), inputs)


@pytest.mark.parametrize("rows", [1, 5, 33])
def test_packed_product_equals_the_plain_one(rows: int) -> None:
    x, weight, bias = (random(*s, seed=i).bfloat16() for i, s in enumerate([(rows, 24), (40, 24), (40,)]))
    for b in (None, bias):
        got = linear(x, pack_linear(weight), b)
        torch.testing.assert_close(got, linear(x, weight, b), atol=0.05, rtol=0.02)


def test_fp32_weights_are_left_alone() -> None:
    weight = torch.randn(8, 8)
    assert pack_linear(weight) is weight


def test_packed_model_computes_the_same() -> None:
    raw = {
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 60,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    trunk = Transformer(ModelConfig.from_json(raw), torch.bfloat16)
    trunk.reset_parameters(torch.Generator().manual_seed(0))
    modules = MtpModules(MtpConfig(1, "d", draft_vocab_size=9), trunk, torch.arange(9))
    modules.init_from_trunk()
    ids, positions = torch.arange(10), torch.arange(10)

    def outputs() -> tuple[Tensor, Tensor]:
        attend = DenseAttention((None,) * 3)
        with torch.inference_mode():
            hidden = trunk(ids, positions, attend)
            drafted = modules.forward_module(0, hidden, ids, positions, attend)
            return trunk.logits(hidden), modules.draft_logits(0, drafted)

    plain = outputs()
    trunk.pack()
    modules.pack()
    for before, after in zip(plain, outputs(), strict=True):
        torch.testing.assert_close(after, before, atol=0.02, rtol=0.05)
    assert trunk.embedding.shape == (60, 32)  # rows are still there to look up
