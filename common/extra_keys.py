"""What a block hash covers besides token ids: adapter, images, cache salt, prompt embeddings.

Two forms, both flat and in this order: the *hash form* tags every key (``("lora", name, path)``,
``("mm", identifier, offset)``, ``("cache_salt", salt)``, ``("prompt_embeds", digest)``); the *event
form* is what ``BlockStored.extra_keys`` publishes (name, ``[identifier, offset]``, salt, digest). The
event form has no adapter path; together with ``lora_name`` it gives the hash form back. Blocks of a salted
request are published with ``WITHHELD`` instead (docs/kv-events.md).
"""

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

HashKeys = tuple[tuple[Any, ...], ...]
"""Extra keys of one block in the hash form, never empty (no keys is None)."""


WITHHELD = ("",)
"""Event form of a block whose salt, keys and tokens are not told. No other block has it: an empty salt is
no salt, so a reader that goes by the keys matches it with nothing."""


@dataclass(frozen=True)
class MultimodalItem:
    """Positions offset .. offset+length-1 of the prompt stand for one image, clip or sound."""

    identifier: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True)
class PromptEmbeddings:
    """Raw embedding rows of a prompt's first positions, ``row_bytes`` bytes each."""

    data: bytes
    row_bytes: int

    def digest(self, start: int, end: int) -> bytes | None:
        """SHA-256 of the rows start .. end-1, None when the prompt has none of them."""
        rows = self.data[start * self.row_bytes : end * self.row_bytes]
        return sha256(rows).digest() if rows else None


@dataclass(frozen=True)
class ExtraKeys:
    """The extra keys of one request. ``multimodal`` items must not overlap.

    ``lora_path`` only enters the algorithms that other engines share: those hash it, although no event
    carries it. An empty ``cache_salt`` is no salt.
    """

    lora_name: str | None = None
    cache_salt: str | None = None
    multimodal: tuple[MultimodalItem, ...] = ()
    prompt_embeddings: PromptEmbeddings | None = None
    lora_path: str = ""

    @classmethod
    def of(cls, lora_name: str | None, cache_salt: str | None) -> "ExtraKeys | None":
        """The keys of a text request, None where it has none."""
        if lora_name is None and not cache_salt:
            return None
        return cls(lora_name=lora_name, cache_salt=cache_salt)

    def __post_init__(self) -> None:
        items = tuple(sorted(self.multimodal, key=lambda item: item.offset))
        for left, right in itertools.pairwise(items):
            if left.end > right.offset:
                raise ValueError(
                    f"multimodal items {left} and {right} overlap; give each position to one item only"
                )
        object.__setattr__(self, "multimodal", items)

    @property
    def first_block_only(self) -> bool:
        """Whether no block but the first can have a key (the salt reaches the others by chaining)."""
        return self.lora_name is None and not self.multimodal and self.prompt_embeddings is None

    def keys_for(self, start: int, end: int) -> HashKeys | None:
        """Keys over positions start .. end-1 in the hash form, None when there are none.

        ``end`` includes the lookahead: a block's keys cover all tokens that its hash covers. Offsets are
        relative to ``start``, so negative for an item that began in an earlier block.
        """
        keys: list[tuple[Any, ...]] = []
        if self.lora_name is not None:
            keys.append(("lora", self.lora_name, self.lora_path))
        first = bisect_right(self.multimodal, start, key=lambda item: item.end)
        for item in self.multimodal[first:]:
            if item.offset >= end:
                break
            keys.append(("mm", item.identifier, item.offset - start))
        if start == 0 and self.cache_salt:
            keys.append(("cache_salt", self.cache_salt))
        if self.prompt_embeddings is not None:
            digest = self.prompt_embeddings.digest(start, end)
            if digest is not None:
                keys.append(("prompt_embeds", digest))
        return tuple(keys) or None


def to_event_form(keys: HashKeys | None) -> list[Any] | None:
    """What ``BlockStored.extra_keys`` carries for one block."""
    if keys is None:
        return None
    return [list(key[1:]) if key[0] == "mm" else key[1] for key in keys]


def from_event_form(
    event_keys: Sequence[Any] | None, lora_name: str | None = None, lora_path: str = ""
) -> HashKeys | None:
    """The hash form of one block's published keys. ``lora_name`` is the event's field of that name.

    Raises ValueError for a key of a type that no publisher writes.
    """
    if not event_keys:
        return None
    if tuple(event_keys) == WITHHELD:
        raise ValueError(
            "the keys of a salted request's block are withheld: its event does not give the hash"
        )
    keys: list[tuple[Any, ...]] = []
    rest = list(event_keys)
    if lora_name is not None and rest[0] == lora_name:
        keys.append(("lora", rest.pop(0), lora_path))
    for key in rest:
        match key:
            case str():
                keys.append(("cache_salt", key))
            case bytes():
                keys.append(("prompt_embeds", key))
            case [str() as identifier, int() as offset]:
                keys.append(("mm", identifier, offset))
            case _:
                raise ValueError(
                    f"extra key {key!r} is neither a name, a salt, a digest nor [identifier, offset]"
                )
    return tuple(keys)
