"""Tokenizer files from the metadata of a GGUF file.

GGUF keeps a byte-level BPE as token and merge lists and names the rule that splits text beforehand; only
rules whose exact split is known here are accepted, since another split gives other tokens without any
error.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from common.errors import ModelLoadError

_CONTROL = 3  # token type of special tokens in GGUF
_NORMAL = 1


@dataclass(frozen=True)
class TokenizerFiles:
    """What the checkpoint folder gets."""

    tokenizer: Tokenizer  # tokenizer.json
    config: dict[str, Any]  # tokenizer_config.json
    generation: dict[str, Any]  # generation_config.json


def tokenizer_files(fields: Mapping[str, Any], context_length: int) -> TokenizerFiles:
    """Rebuilds the tokenizer from the `tokenizer.*` fields; ModelLoadError if its kind is not known here."""
    model, rule = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if model != "gpt2" or rule != "smollm":
        raise ModelLoadError(
            f"GGUF tokenizer model {model!r} with pre-tokenizer {rule!r} is not supported, "
            "only 'gpt2' with 'smollm'"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    types: list[int] = fields["tokenizer.ggml.token_type"]
    unknown_types = sorted(set(types) - {_NORMAL, _CONTROL})
    if unknown_types:
        raise ModelLoadError(
            f"GGUF tokenizer has token types {unknown_types}, only normal and control are known"
        )
    tokenizer = _byte_level_bpe(tokens, fields["tokenizer.ggml.merges"])
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    if tokenizer.get_vocab_size() != len(tokens):
        raise ModelLoadError(f"GGUF tokenizer has {len(tokens)} tokens, rebuilt {tokenizer.get_vocab_size()}")
    ids = {role: int(fields[f"tokenizer.ggml.{key}_token_id"]) for role, key in _ROLES if _has(fields, key)}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
        **{f"{role}_token": tokens[token_id] for role, token_id in ids.items()},
        "additional_special_tokens": special,
    }
    template = fields.get("tokenizer.chat_template")
    if template:
        config["chat_template"] = template
    generation = {f"{role}_token_id": ids[role] for role in ("bos", "eos", "pad") if role in ids}
    return TokenizerFiles(tokenizer, config, generation)


_ROLES = (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))


def _has(fields: Mapping[str, Any], key: str) -> bool:
    return f"tokenizer.ggml.{key}_token_id" in fields


def _byte_level_bpe(tokens: list[str], merges: list[str]) -> Tokenizer:
    """The 'smollm' rule: every digit by itself, then the GPT-2 split over bytes, no space put in front."""
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
