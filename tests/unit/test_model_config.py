"""config.json -> ModelConfig: what each family means, and what is refused by name."""

from typing import Any

import pytest

from common.errors import ModelLoadError
from common.model.model_config import ModelConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 512,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"]}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32}


def test_families_differ_by_biases_and_query_norms() -> None:
    llama, qwen2, qwen3 = (ModelConfig.from_json(raw) for raw in (LLAMA, QWEN2, QWEN3))
    assert (llama.qkv_bias, llama.o_bias, llama.qk_norm, llama.head_dim) == (False, False, False, 16)
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm, qwen3.head_dim) == (False, False, True, 32)
    biased = ModelConfig.from_json(LLAMA | {"attention_bias": True, "mlp_bias": True})
    assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias) == (True, True, True)


def test_qwen3_head_dim_defaults_to_128() -> None:
    raw = {key: value for key, value in QWEN3.items() if key != "head_dim"}
    assert ModelConfig.from_json(raw).head_dim == 128


def test_windows_from_max_window_layers() -> None:
    raw = QWEN2 | {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 3}
    assert ModelConfig.from_json(raw).layer_windows == (None, None, None, 32)
    assert ModelConfig.from_json(raw | {"use_sliding_window": False}).layer_windows == (None,) * 4


def test_windows_from_layer_types() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    raw = QWEN3 | {"use_sliding_window": True, "sliding_window": 32, "layer_types": kinds}
    assert ModelConfig.from_json(raw).layer_windows == (32, None, 32, None)
    with pytest.raises(ModelLoadError, match="use_sliding_window is false"):
        ModelConfig.from_json(raw | {"use_sliding_window": False})
    with pytest.raises(ModelLoadError, match="3 entries for 4 layers"):
        ModelConfig.from_json(raw | {"layer_types": kinds[:3]})


def test_rope_in_both_spellings() -> None:
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}}
    assert ModelConfig.from_json(LLAMA | old).rope == ModelConfig.from_json(LLAMA | new).rope
    yarn = {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 128}}
    assert ModelConfig.from_json(LLAMA | yarn).rope.factor == 4.0  # 512 / 128


def test_eos_ids_of_both_files_in_order() -> None:
    config = ModelConfig.from_json(LLAMA | {"bos_token_id": 1, "eos_token_id": 2}, {"eos_token_id": [7, 2]})
    assert (config.bos_token_id, config.eos_token_ids) == (1, (7, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": []}, "names nothing"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "'longrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs a factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"layer_types": ["sliding_attention"] * 4}, "not supported for llama"),
        ({"torch_dtype": "int8"}, "dtype 'int8'"),
        ({"eos_token_id": "two"}, "'two'"),
    ],
)
def test_refusals_name_what_is_wrong(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        ModelConfig.from_json(LLAMA | change)


@pytest.mark.parametrize(
    "raw",
    [
        LLAMA | {"attention_bias": True, "mlp_bias": True, "bos_token_id": 1, "eos_token_id": [2, 3]},
        LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}},
        QWEN2 | {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2},
        QWEN3 | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "truncate": False}},
    ],
)
def test_to_json_reads_back_as_the_same(raw: dict[str, Any]) -> None:
    config = ModelConfig.from_json(raw)
    assert ModelConfig.from_json(config.to_json()) == config
