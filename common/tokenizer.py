"""Text <-> token ids of one model, its chat template, and a detokenizer for streams.

Reads tokenizer.json, tokenizer_config.json and chat_template.jinja of a checkpoint folder. No torch, no
transformers: the router lives on this.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as TokenizersTokenizer

from common.chat_template import ChatTemplate, find_chat_template
from common.detokenizer import ByteLevelDetokenizer, IncrementalDetokenizer, WindowDetokenizer, byte_of_char
from common.errors import InvalidRequest, ModelLoadError

__all__ = ["IncrementalDetokenizer", "Tokenizer"]

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class Tokenizer:
    """The tokenizer of one model."""

    def __init__(
        self,
        tokenizer: TokenizersTokenizer,
        *,
        named_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        eos_token_ids: Sequence[int] = (),
        digest: str = "",
    ) -> None:
        """`named_tokens` such as {"eos_token": "</s>"}; `eos_token_ids` are those of the model's
        configuration.
        """
        self._tokenizer = tokenizer
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.named_tokens = dict(named_tokens or {})
        self.chat_template = chat_template
        self.digest = digest  # sha256 (hex) of tokenizer.json and the chat template
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        eos = self.token_id(self.named_tokens.get("eos_token", ""))
        self.eos_token_ids = tuple(dict.fromkeys([*eos_token_ids, *([] if eos is None else [eos])]))
        self._token_bytes: dict[int, bytes] = {}

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """The tokenizer of a checkpoint folder; ModelLoadError if tokenizer.json is missing or unreadable."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelLoadError(f"{path} does not exist: a model folder needs tokenizer.json")
        text = path.read_text(encoding="utf-8")
        try:
            tokenizer = TokenizersTokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise ModelLoadError(f"{path} cannot be read: {error}") from error
        config = _json_or_empty(folder / "tokenizer_config.json")
        template = find_chat_template(folder, config)
        return cls(
            tokenizer,
            named_tokens={name: _token_text(config[name]) for name in _NAMED_TOKENS if config.get(name)},
            chat_template=template,
            eos_token_ids=[
                token_id
                for file in ("generation_config.json", "config.json")
                for token_id in _as_list(_json_or_empty(folder / file).get("eos_token_id"))
            ],
            digest=hashlib.sha256(text.encode() + b"\n" + (template or "").encode()).hexdigest(),
        )

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; with special tokens as tokenizer.json's post-processor adds them (many add none)."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become the replacement character."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_id(self, token: str) -> int | None:
        """Id of a token by its exact spelling in the vocabulary."""
        token_id: int | None = self._tokenizer.token_to_id(token) if token else None
        return token_id

    def token_text(self, token_id: int) -> str:
        """How one token reads by itself, special ones included; for logprobs and people."""
        return self.decode([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, exact for byte-level tokenizers; b"" outside the vocabulary."""
        found = self._token_bytes.get(token_id)
        if found is None:
            found = self._token_bytes[token_id] = self._bytes_of(token_id)
        return found

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can work."""
        return self.chat_template is not None

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt text of a conversation; encode it with `add_special_tokens=False`.

        InvalidRequest if the model has no template or the template refuses the messages.
        """
        if self._template is None:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions with a plain prompt", param="messages"
            )
        known = {**self.named_tokens, "add_generation_prompt": add_generation_prompt}
        return self._template.render(messages, **{**known, **variables})

    def detokenizer(self, *, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """A fresh incremental detokenizer for one sequence."""
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        if self._is_byte_level:
            return ByteLevelDetokenizer(self.token_bytes, skipped)
        return WindowDetokenizer(lambda ids: self.decode(ids, skip_special_tokens=False), skipped)

    @cached_property
    def _template(self) -> ChatTemplate | None:
        return None if self.chat_template is None else ChatTemplate(self.chat_template)

    @cached_property
    def _is_byte_level(self) -> bool:
        decoder = json.loads(self._tokenizer.to_str()).get("decoder") or {}
        return bool(decoder.get("type") == "ByteLevel")

    @cached_property
    def _alphabet(self) -> dict[str, int]:
        return byte_of_char()

    def _bytes_of(self, token_id: int) -> bytes:
        token: str | None = self._tokenizer.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if not self._is_byte_level:
            return self.token_text(token_id).encode()
        try:
            return bytes([self._alphabet[char] for char in token])
        except KeyError:  # an added token, spelled in plain text
            return token.encode()


def _token_text(value: Any) -> str:
    return str(value["content"] if isinstance(value, Mapping) else value)


def _as_list(value: Any) -> list[int]:
    return [] if value is None else list(value) if isinstance(value, list) else [value]


def _json_or_empty(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path} cannot be read as JSON: {error}") from error
    return value if isinstance(value, dict) else {}
