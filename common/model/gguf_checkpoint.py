"""GGUF (llama architecture) -> an ordinary checkpoint folder that any engine loads.

Quantised blocks are dequantised to bf16, the rows of q and k go back from interleaved to half-split rotary
pairs, and the tokenizer is rebuilt from the metadata. The folder appears at once or not at all: it is
written beside its place and renamed. Same input, same bytes: the trunk's digest does not depend on where
it was converted.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor, dequantize
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from common.errors import ModelLoadError
from common.model.checkpoint_files import trunk_digest
from common.model.gguf_tokenizer import tokenizer_files
from common.model.model_config import ModelConfig, RopeConfig

_OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def convert_gguf(
    gguf: Path, folder: Path, *, source: Mapping[str, str] | None = None, progress: bool = True
) -> None:
    """Writes the checkpoint folder for `gguf`, atomically; `source` is noted in baton_source.json.

    ModelLoadError names an architecture, tensor or tokenizer that is not understood. A folder that another
    process finished meanwhile is kept.
    """
    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    names = {tensor.name: _checkpoint_name(tensor.name) for tensor in reader.tensors}
    config = _config(fields, tied="output.weight" not in names)
    files = tokenizer_files(fields, config.max_position_embeddings)

    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        bar = tqdm(reader.tensors, desc=f"converting {gguf.name}", unit="tensor", disable=not progress)
        tensors = {names[tensor.name]: _tensor(tensor, config) for tensor in bar}
        save_file(tensors, temporary / "model.safetensors", {"format": "pt"})
        (temporary / "model.safetensors").chmod(0o644)
        files.tokenizer.save(str(temporary / "tokenizer.json"))
        _write(
            temporary / "config.json",
            config.to_json() | {"pad_token_id": files.generation.get("pad_token_id")},
        )
        _write(temporary / "generation_config.json", files.generation)
        _write(temporary / "tokenizer_config.json", files.config)
        _write(temporary / "baton_source.json", dict(source or {}) | {"gguf": gguf.name})
        trunk_digest(temporary)  # leaves the digest file
        with contextlib.suppress(OSError):  # not empty: another process was faster
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{folder} cannot be written: is something else there?")


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _checkpoint_name(name: str) -> str:
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    kind, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    if kind == "blk" and layer.isdecimal() and part in _IN_BLOCK:
        return f"model.layers.{layer}.{_IN_BLOCK[part]}"
    raise ModelLoadError(f"GGUF tensor {name} is not supported")


def _config(fields: Mapping[str, Any], tied: bool) -> ModelConfig:
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise ModelLoadError(f"GGUF architecture {architecture!r} is not supported, only 'llama'")
    scaling = [name for name in fields if name.startswith("llama.rope.scaling.")]
    if scaling:
        raise ModelLoadError(f"GGUF rotary scaling is not supported: {', '.join(scaling)}")
    hidden_size, num_heads = int(fields["llama.embedding_length"]), int(fields["llama.attention.head_count"])
    num_layers = int(fields["llama.block_count"])
    return ModelConfig(
        family="llama",
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(fields["llama.attention.head_count_kv"]),
        head_dim=int(fields.get("llama.rope.dimension_count", hidden_size // num_heads)),
        intermediate_size=int(fields["llama.feed_forward_length"]),
        rms_norm_eps=float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # stored as fp32
        rope=RopeConfig(theta=float(fields.get("llama.rope.freq_base", 10000.0))),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tie_word_embeddings=tied,
        layer_windows=(None,) * num_layers,
        max_position_embeddings=int(fields["llama.context_length"]),
        bos_token_id=int(fields["tokenizer.ggml.bos_token_id"]),
        eos_token_ids=(int(fields["tokenizer.ggml.eos_token_id"]),),
        dtype="bfloat16",
    )


def _tensor(tensor: ReaderTensor, config: ModelConfig) -> Tensor:
    """bf16, in the layout of a checkpoint."""
    out = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
    if tensor.name.endswith("attn_q.weight"):
        out = half_split_rows(out, config.num_heads)
    elif tensor.name.endswith("attn_k.weight"):
        out = half_split_rows(out, config.num_kv_heads)
    return out.to(torch.bfloat16).contiguous()


def half_split_rows(weight: Tensor, num_heads: int) -> Tensor:
    """Rows of each head from interleaved rotary pairs (0, h, 1, h+1, ...) to half-split order: [H*Dh, D]."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)
