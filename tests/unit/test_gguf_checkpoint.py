"""A GGUF file written here, from a model whose logits are known, comes back as that model."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from common.errors import ModelLoadError
from common.model.dense_attention import DenseAttention
from common.model.gguf_checkpoint import convert_gguf
from common.model.model_config import ModelConfig
from common.model.transformer import Transformer
from common.model.weights import load_transformer, trunk_digest
from common.tokenizer import Tokenizer
from tests.builders_tokenizer import byte_level_tokenizer

HEADS, KV_HEADS, D, INNER, LAYERS = 4, 2, 64, 96, 2
NAMES = {  # the format's names, written down independently of the converter's table
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def make_model(vocab_size: int) -> Transformer:
    """Weights that bf16 holds exactly, so that nothing is lost on the way."""
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size,
        "hidden_size": D,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": INNER,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    model = Transformer(ModelConfig.from_json(raw), torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator) * 0.2 + float(parameter.dim() == 1)
            parameter.copy_(values.bfloat16())
    return model


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Row i of a head's first half goes to 2i, of its second half to 2i+1: written as a loop on purpose."""
    out, half = torch.empty_like(weight), weight.shape[0] // heads // 2
    for head in range(heads):
        start = head * 2 * half
        for i in range(half):
            out[start + 2 * i] = weight[start + i]
            out[start + 2 * i + 1] = weight[start + half + i]
    return out


def write_gguf(path: Path, model: Transformer, **change: Any) -> None:
    tokenizer = byte_level_tokenizer()
    state = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].__getitem__)
    writer = gguf.GGUFWriter(path, change.get("architecture", "llama"))
    writer.add_context_length(128)
    writer.add_embedding_length(D)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(50000.0)
    writer.add_rope_dimension_count(D // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    if "scaling" in change:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(change.get("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in state["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages[0]['content'] }}<|end|>")
    for name, tensor in model.checkpoint_tensors():
        stem = name.removesuffix(".weight")
        if stem in ("model.embed_tokens", "model.norm"):
            out = "token_embd" if stem == "model.embed_tokens" else "output_norm"
        else:
            _, _, layer, rest = stem.split(".", 3)
            out = f"blk.{layer}.{NAMES[rest]}"
        if out.endswith("attn_q"):
            tensor = interleaved(tensor, HEADS)
        if out.endswith("attn_k"):
            tensor = interleaved(tensor, KV_HEADS)
        values = np.ascontiguousarray(tensor.detach().numpy())
        if out.endswith(change.get("quantised", ())):
            q8 = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{out}.weight", gguf.quantize(values, q8), raw_dtype=q8)
        else:
            writer.add_tensor(f"{out}.weight", values)
    if "extra" in change:
        writer.add_tensor(change["extra"], np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def model() -> Transformer:
    return make_model(byte_level_tokenizer().get_vocab_size())


def test_converted_checkpoint_is_the_model(model: Transformer, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", model)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out", source={"package": "p"}, progress=False)
    loaded = load_transformer(tmp_path / "out", "float32")
    assert loaded.config.rms_norm_eps == 1e-5
    ids, positions = torch.arange(20)[None], torch.arange(20)
    with torch.no_grad():
        expected, got = (m.logits(m(ids, positions, DenseAttention((None,) * 2))) for m in (model, loaded))
    assert torch.equal(got, expected)

    tokenizer = Tokenizer.from_folder(tmp_path / "out")
    assert tokenizer.eos_token_ids == (0,)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi<|end|>"
    digits = tokenizer.encode("7 77")
    assert [tokenizer.token_text(i) for i in digits] == ["7", " ", "7", "7"]  # every digit by itself
    original = Tokenizer(byte_level_tokenizer())
    text = "the quick brown fox über<|end|>日本"
    assert tokenizer.encode(text) == original.encode(text)
    assert tokenizer.special_ids == original.special_ids
    assert json.loads((tmp_path / "out" / "baton_source.json").read_text())["package"] == "p"


def test_conversion_is_deterministic_and_keeps_a_finished_folder(model: Transformer, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", model)
    for name in ("a", "b"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / name, progress=False)
    assert trunk_digest(tmp_path / "a") == trunk_digest(tmp_path / "b")
    (tmp_path / "a" / "note").write_text("here first")
    convert_gguf(tmp_path / "m.gguf", tmp_path / "a", progress=False)
    assert (tmp_path / "a" / "note").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "m.gguf"]  # nothing temporary left


def test_quantised_tensors_are_dequantised(model: Transformer, tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", model, quantised=("ffn_down", "attn_q"))
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    stored = dict(load_transformer(tmp_path / "out", "float32").checkpoint_tensors())
    for name, tensor in model.checkpoint_tensors():
        difference = (stored[name] - tensor).abs().max().item()
        lossy = "down_proj" in name or "q_proj" in name
        assert (0 < difference < 0.01) if lossy else difference == 0, name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "mamba"}, "architecture 'mamba'"),
        ({"pre": "llama-bpe"}, "'llama-bpe'"),
        ({"extra": "blk.0.attn_q.bias"}, r"tensor blk\.0\.attn_q\.bias"),
        ({"scaling": True}, "rotary scaling"),
    ],
)
def test_what_is_not_understood_is_told(
    model: Transformer, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    write_gguf(tmp_path / "m.gguf", model, **change)
    with pytest.raises(ModelLoadError, match=message):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out", progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf"]
