"""Checkpoint folders: strict names, sharded files, tied heads, digests, and MTP module folders."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.errors import ModelLoadError
from common.model.dense_attention import DenseAttention
from common.model.model_config import ModelConfig
from common.model.mtp import MtpConfig, MtpModules
from common.model.transformer import Transformer
from common.model.weights import (
    load_mtp,
    load_transformer,
    save_checkpoint,
    save_mtp,
    trunk_digest,
)


def make_model(seed: int = 0, **change: Any) -> Transformer:
    raw = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 50,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "intermediate_size": 24,
        "max_position_embeddings": 64,
    }
    model = Transformer(ModelConfig.from_json(raw | change), torch.float32)
    model.reset_parameters(torch.Generator().manual_seed(seed))
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_checkpoint(tmp_path / "model", make_model(), "float32")
    return tmp_path / "model"


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Replaces (or, with None, removes) tensors of the folder's single file."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in change.items():
        if tensor is None:
            del tensors[name]
        else:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")


def split(folder: Path) -> None:
    """The same checkpoint in two files with an index."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in halves.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink()


def logits(model: Transformer) -> torch.Tensor:
    ids = torch.arange(12)[None]
    with torch.no_grad():
        return model.logits(model(ids, torch.arange(12), DenseAttention(model.config.layer_windows)))


def test_what_was_saved_is_loaded(folder: Path) -> None:
    loaded = load_transformer(folder, "float32")
    assert torch.equal(logits(loaded), logits(make_model()))
    assert not any(parameter.requires_grad for parameter in loaded.parameters())
    assert load_transformer(folder, "bfloat16").embedding.dtype == torch.bfloat16


def test_progress_ends_at_the_total(folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    load_transformer(folder, "float32", progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == sum(p.numel() for p in make_model().parameters()) * 4


def test_sharded_folder_is_the_same_model_and_digest(folder: Path) -> None:
    single = trunk_digest(folder)
    split(folder)
    assert torch.equal(logits(load_transformer(folder, "float32")), logits(make_model()))
    assert trunk_digest(folder) == single


def test_missing_and_left_over_names_are_told(folder: Path) -> None:
    rewrite(folder, {"model.layers.1.self_attn.k_proj.weight": None, "model.layers.2.extra": torch.ones(1)})
    with pytest.raises(ModelLoadError) as caught:
        load_transformer(folder, "float32")
    assert "missing model.layers.1.self_attn.k_proj.weight" in str(caught.value)
    assert "left over model.layers.2.extra" in str(caught.value)


def test_untied_model_without_a_head_is_refused(folder: Path) -> None:
    rewrite(folder, {"lm_head.weight": None})
    with pytest.raises(ModelLoadError, match=r"missing lm_head\.weight"):
        load_transformer(folder, "float32")


def test_tied_model_ignores_a_stored_head_and_rotary_buffers(tmp_path: Path) -> None:
    model = make_model(tie_word_embeddings=True)
    save_checkpoint(tmp_path, model, "float32")
    digest = trunk_digest(tmp_path)
    extra = {
        "lm_head.weight": torch.zeros(50, 16),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    rewrite(tmp_path, dict(extra))
    assert torch.equal(logits(load_transformer(tmp_path, "float32")), logits(model))
    assert trunk_digest(tmp_path) == digest


def test_wrong_shape_and_wrong_dtype_are_told(folder: Path) -> None:
    rewrite(folder, {"model.norm.weight": torch.ones(17)})
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight has shape \[17\], .* wants \[16\]"):
        load_transformer(folder, "float32")
    rewrite(folder, {"model.norm.weight": torch.ones(16, dtype=torch.int32)})
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight is I32"):
        load_transformer(folder, "float32")


def test_broken_folders_are_told(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    with pytest.raises(ModelLoadError, match="truncated"):
        load_transformer(folder, "float32")
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(ModelLoadError, match="not a safetensors file"):
        load_transformer(folder, "float32")
    path.unlink()
    with pytest.raises(ModelLoadError, match=r"neither model\.safetensors nor"):
        load_transformer(folder, "float32")
    (folder / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"config\.json does not exist"):
        load_transformer(folder, "float32")


def test_index_that_names_an_absent_file_is_told(folder: Path) -> None:
    split(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"do not exist: b\.safetensors"):
        load_transformer(folder, "float32")


def test_unknown_dtype_is_told(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="float16 is not supported"):
        load_transformer(folder, torch.float16)


def test_digest_changes_with_a_weight_and_with_the_arithmetic(folder: Path) -> None:
    before = trunk_digest(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 5}))
    assert trunk_digest(folder) == before  # says when to stop, not what the logits are
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 5e5}))
    changed = trunk_digest(folder)
    assert changed != before
    rewrite(folder, {"model.norm.weight": torch.full((16,), 1.5)})
    assert trunk_digest(folder) not in (before, changed)


@pytest.mark.parametrize("draft_head", [False, True])
def test_modules_round_trip(folder: Path, draft_head: bool) -> None:
    trunk, digest = load_transformer(folder, "float32"), trunk_digest(folder)
    draft_vocab = torch.tensor([3, 1, 4, 15, 9])
    config = MtpConfig(
        2, digest, draft_vocab_size=5, windows=(None, 8), draft_head=draft_head, recipe={"steps": 1}
    )
    modules = MtpModules(config, trunk, draft_vocab)
    modules.init_from_trunk()
    save_mtp(folder / "mtp", modules, "float32")

    loaded = load_mtp(folder / "mtp", trunk, "float32", digest)
    assert loaded.config == config
    assert loaded.num_modules == 2
    hidden, positions = torch.randn(1, 6, 16, generator=torch.Generator().manual_seed(1)), torch.arange(6)
    for modules_in_hand in (modules, loaded):
        attend = DenseAttention((*trunk.config.layer_windows, *config.windows))
        out = modules_in_hand.forward_module(1, hidden, torch.arange(6)[None], positions, attend)
        drafted = modules_in_hand.draft_logits(1, out)
        assert drafted.shape == (1, 6, 5)
        expected = trunk.logits(out)[..., draft_vocab]  # norm and head start as the trunk's
        torch.testing.assert_close(drafted, expected)
    assert loaded.draft_ids(torch.tensor([[0, 3]])).tolist() == [[3, 15]]


def test_module_reads_the_normed_hidden_state_then_the_normed_next_token(folder: Path) -> None:
    trunk = load_transformer(folder, "float32")
    modules = MtpModules(MtpConfig(1, "d"), trunk)
    modules.init_from_trunk()
    generator = torch.Generator().manual_seed(0)
    module = modules.module(0)
    with torch.no_grad():
        for parameter in (module.hidden_norm, module.embed_norm, module.proj):
            parameter.normal_(generator=generator)
    hidden, ids, positions = (
        torch.randn(1, 6, 16, generator=generator),
        torch.arange(3, 9)[None],
        torch.arange(6),
    )

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + trunk.config.rms_norm_eps).sqrt() * weight

    both = torch.cat(
        (normed(hidden, module.hidden_norm), normed(trunk.embedding[ids], module.embed_norm)), -1
    )
    x = both @ module.proj.T
    cos, sin = trunk.rope.cos_sin(positions, torch.float32)
    expected = module.block(x, cos, sin, 2, DenseAttention((None,) * 3))
    got = modules.forward_module(0, hidden, ids, positions, DenseAttention((None,) * 3))
    torch.testing.assert_close(got, expected)


def test_modules_keep_keys_and_values_apart_from_the_trunk(folder: Path) -> None:
    trunk = load_transformer(folder, "float32")
    modules = MtpModules(MtpConfig(2, "d"), trunk)
    modules.init_from_trunk()
    record: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    attend = DenseAttention((None,) * 4, record)
    ids, positions = torch.arange(8)[None], torch.arange(8)
    hidden = trunk(ids, positions, attend)
    modules.forward_module(1, hidden, ids, positions, attend)
    assert sorted(record) == [0, 1, 3]  # trunk layers, then module 1 as layer n + 1
    assert "trunk" not in dict(modules.named_modules())


def test_training_the_modules_leaves_the_trunk_without_gradients(folder: Path) -> None:
    trunk = load_transformer(folder, "float32")
    modules = MtpModules(MtpConfig(1, "d"), trunk)
    modules.init_from_trunk()
    ids, positions = torch.arange(8)[None], torch.arange(8)
    attend = DenseAttention((None,) * 3)
    hidden = modules.forward_module(0, trunk(ids, positions, attend), ids, positions, attend)
    modules.draft_logits(0, hidden).logsumexp(-1).sum().backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in modules.parameters())
    assert all(parameter.grad is None for parameter in trunk.parameters())


def test_modules_of_another_trunk_are_refused_by_both_names(folder: Path) -> None:
    trunk = load_transformer(folder, "float32")
    save_mtp(folder / "mtp", MtpModules(MtpConfig(1, "digest-of-another"), trunk))
    with pytest.raises(ModelLoadError, match=r"digest-of-another.*this trunk is digest-of-this"):
        load_mtp(folder / "mtp", trunk, "float32", "digest-of-this")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "is this a modules folder"),
        ({"format_version": 99}, "format_version 99"),
        ({"num_modules": 0}, "num_modules is 0"),
        ({"windows": [None, None, None]}, "3 windows for 1 modules"),
        ({"draft_vocab_size": 7}, "draft_vocab is missing"),
    ],
)
def test_bad_module_configs_are_told(folder: Path, change: dict[str, Any], message: str) -> None:
    trunk = load_transformer(folder, "float32")
    save_mtp(folder / "mtp", MtpModules(MtpConfig(1, "d"), trunk))
    path = folder / "mtp" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ModelLoadError, match=message):
        load_mtp(folder / "mtp", trunk, "float32", "d")


def test_draft_vocabulary_outside_the_trunk_is_told() -> None:
    with pytest.raises(ModelLoadError, match=r"ids 0\.\.50, the trunk's vocabulary is 0\.\.49"):
        MtpModules(MtpConfig(1, "d", draft_vocab_size=2), make_model(), torch.tensor([0, 50]))
