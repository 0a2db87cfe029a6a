"""Hybrid configurations, checkpoints and layers; modules with recurrent layers are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from common.engine.state_plan import PagedRecurrence, StateSpan
from common.errors import ModelLoadError
from common.kv_cache.layout import RecurrentLayer, build_layout
from common.kv_cache.storage import KVStorage
from common.model.dense_attention import DenseAttention
from common.model.dense_recurrence import DenseRecurrence
from common.model.model_config import ModelConfig
from common.model.mtp import MtpConfig, MtpModules
from common.model.transformer import Transformer
from common.model.weights import load_transformer, save_checkpoint, trunk_digest
from tests.builders import hybrid_config, random_prompt, random_trunk


def test_a_configuration_comes_back_from_its_json() -> None:
    config = hybrid_config()
    assert ModelConfig.from_json(config.to_json()) == config
    assert config.attention_windows == {0: 6, 3: None}
    assert config.recurrent_layers == (RecurrentLayer(1, (32, 3)), RecurrentLayer(2, (56, 3), (2, 8, 12)))
    plain = hybrid_config(("full_attention", "sliding_attention"), (5,))
    assert plain.recurrent is None
    assert plain.recurrent_layers == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": None}, "expected one entry for each of 4 layers"),
        ({"layer_types": ["full_attention"] * 3}, "expected one entry for each of 4 layers"),
        ({"layer_types": ["full_attention"] * 3 + ["mamba"]}, "layer_types mamba are not supported"),
        ({"layer_windows": [None] * 4}, "expected a size for each sliding_attention layer"),
        ({"layer_windows": [6, 6, None, None]}, "null for the others"),
        ({"conv_kernel": None}, "conv_kernel is missing"),
        ({"delta_heads": 0}, "delta_heads is 0, expected a positive integer"),
    ],
)
def test_wrong_configurations_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        ModelConfig.from_json(hybrid_config().to_json() | change)


def test_a_checkpoint_comes_back_with_all_its_tensors(tmp_path: Path) -> None:
    trunk = random_trunk(config=hybrid_config())
    save_checkpoint(tmp_path / "a", trunk, torch.float32)
    again = load_transformer(tmp_path / "a", torch.float32)
    names = [name for name, _ in again.checkpoint_tensors()]
    assert "model.layers.1.mixer.in_weight" in names
    assert "model.layers.2.mixer.rate_bias" in names
    assert "model.layers.2.self_attn.q_proj.weight" not in names
    for (name, ours), (_, theirs) in zip(trunk.checkpoint_tensors(), again.checkpoint_tensors(), strict=True):
        assert torch.equal(ours, theirs), name
    swapped = hybrid_config(("sliding_attention", "gated_delta_net", "short_conv", "full_attention"))
    save_checkpoint(tmp_path / "b", random_trunk(config=swapped), torch.float32)
    assert trunk_digest(tmp_path / "a") != trunk_digest(tmp_path / "b")


def test_modules_with_recurrent_layers_are_refused() -> None:
    config = MtpConfig(num_modules=2, trunk_digest="x", windows=(None, 6)).to_json()
    raw = {**json.loads(config), "layer_types": ["full_attention", "gated_delta_net"]}
    with pytest.raises(ModelLoadError, match="modules with gated_delta_net layers are refused"):
        MtpConfig.from_json(raw)
    raw["layer_types"] = ["full_attention", "sliding_attention"]
    assert MtpConfig.from_json(raw).windows == (None, 6)


def test_modules_start_from_the_last_attention_block() -> None:
    trunk = random_trunk(config=hybrid_config(("full_attention", "short_conv"), ()))
    modules = MtpModules(MtpConfig(num_modules=1, trunk_digest="x"), trunk, None, torch.float32)
    modules.init_from_trunk()
    assert torch.equal(modules.module(0).block.qkv_weight, trunk.blocks[0].get_parameter("qkv_weight"))


def test_a_hybrid_without_recur_is_an_error() -> None:
    trunk = random_trunk(config=hybrid_config())
    ids = torch.zeros(1, 3, dtype=torch.long)
    with pytest.raises(AssertionError, match="layer 1 is recurrent"):
        trunk(ids, torch.arange(3)[None], DenseAttention(trunk.config.layer_windows))


def test_a_hybrid_can_be_trained() -> None:
    """Gradients reach every parameter through both recurrences, and none is lost in a cast."""
    trunk = random_trunk(config=hybrid_config()).requires_grad_(True)
    ids = torch.tensor([random_prompt(20, 1), random_prompt(20, 2)])
    dense = DenseAttention(trunk.config.layer_windows)
    hidden = trunk(ids[:, :-1], torch.arange(19)[None], dense, DenseRecurrence())
    loss = torch.nn.functional.cross_entropy(trunk.logits(hidden).flatten(0, 1), ids[:, 1:].flatten())
    names, parameters = zip(*trunk.named_parameters(), strict=True)
    for name, gradient in zip(names, torch.autograd.grad(loss, parameters), strict=True):
        assert torch.isfinite(gradient).all(), name
        assert gradient.abs().sum() > 0, name


# ---- the engine's recurrence against the dense one ------------------------------------------------------


def dense_states(
    trunk: Transformer, ids: list[int], at: list[int]
) -> dict[tuple[int, int, int], torch.Tensor]:
    record: dict[tuple[int, int, int], torch.Tensor] = {}
    dense = DenseAttention(trunk.config.layer_windows)
    trunk(torch.tensor([ids]), torch.arange(len(ids))[None], dense, DenseRecurrence(record, at))
    return record


@torch.inference_mode()
def test_short_and_long_spans_in_one_pass_equal_the_dense_recurrence() -> None:
    """Three sequences: a long chunk over checkpoints, one in the middle of a block, a decode with drafts of
    which one is accepted."""
    trunk = random_trunk(config=hybrid_config(("short_conv", "gated_delta_net"), ()))
    layout = build_layout(
        {},
        (None,),  # a module's layer: a layout wants some attention
        block_size=8,
        num_kv_heads=2,
        head_dim=8,
        dtype="float32",
        recurrent_layers=trunk.config.recurrent_layers,
        state_block_size=8,
    )
    storage = KVStorage(layout, [2, 40])
    state = layout.state_group
    assert state is not None
    prompts = [random_prompt(45, 1), random_prompt(15, 2), random_prompt(23, 3)]
    tables = [list(range(1, 7)), [10, 11], [20, 21, 22]]
    attend = DenseAttention(())  # never asked

    def run(starts: list[int], knowns: list[int], ends: list[int], counted: list[int]) -> None:
        spans = [StateSpan(t, s, k, e) for t, s, k, e in zip(tables, starts, knowns, ends, strict=True)]
        recur = PagedRecurrence(storage, spans)
        ids = [i for p, s, e in zip(prompts, starts, ends, strict=True) for i in p[s:e]]
        trunk(torch.tensor(ids), torch.zeros(len(ids), dtype=torch.long), attend, recur)
        recur.commit(counted)

    run([0, 0, 0], [3, 5, 20], [3, 5, 20], [3, 5, 20])
    run([3, 5, 20], [45, 15, 21], [45, 15, 23], [45, 15, 22])
    rows = storage.rows(1)
    for ids, table, stops in zip(
        prompts, tables, ([8, 16, 24, 32, 40, 45], [8, 15], [8, 16, 22]), strict=True
    ):
        for (layer, part, position), expected in dense_states(trunk, ids, stops).items():
            if position not in stops:
                continue
            row = rows[table[(position - 1) // 8]]
            assert row.view(torch.int32)[0] == position
            torch.testing.assert_close(
                row[state.slices[layer][part]], expected.flatten(), atol=2e-5, rtol=1e-4
            )
    with pytest.raises(AssertionError, match="block 22 holds the state after 22 positions, the one after 21"):
        PagedRecurrence(storage, [StateSpan(tables[2], 21, 22, 22)])


def test_bf16_models_keep_fp32_states() -> None:
    """A bf16 trunk runs over the same states, near the fp32 one."""
    config = hybrid_config(("short_conv", "gated_delta_net", "full_attention"), ())
    trunk = random_trunk(config=config)
    rounded = Transformer(config, torch.bfloat16)
    rounded.load_state_dict({k: v.bfloat16() for k, v in trunk.state_dict().items()})
    ids = torch.tensor([random_prompt(20, 4)])
    record: dict[tuple[int, int, int], torch.Tensor] = {}
    outs = []
    with torch.inference_mode():
        for model in (trunk, rounded):
            dense = DenseAttention(config.layer_windows)
            outs.append(model(ids, torch.arange(20)[None], dense, DenseRecurrence(record)).float())
    assert {state.dtype for state in record.values()} == {torch.float32}
    assert (outs[0] - outs[1]).abs().mean() < 0.05 * outs[0].abs().mean()
