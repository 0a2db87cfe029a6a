"""Chained hashes of KV blocks, with lookahead.

A block is positions s .. e-1, e = s + B; its hash covers its parent's hash, its tokens, the k tokens
after it (which the drafter's KV in the block was computed from) and the extra keys over both. So it
exists once tokens up to e+k-1 are known, and whoever hits it reads draft KV that is exact for him.

``blake2b`` (default) is chosen by measurement: cryptographic, because caches are shared by tenants, and
with B = 16 parent, tokens and up to 8 lookahead tokens fill one 128-byte BLAKE2b block, so that
lookahead costs nothing. ``sha256_cbor`` and ``xxhash_cbor`` are the bytes that other engines hash.
"""

import hashlib
import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import cbor2
import msgspec
import xxhash

from common.errors import ConfigError
from common.extra_keys import ExtraKeys, HashKeys

__all__ = ["ALGORITHMS", "BlockHasher", "ExtraKeys", "event_hash"]

_CBOR_DIGESTS: dict[str, Callable[[bytes], bytes]] = {
    "sha256_cbor": lambda data: hashlib.sha256(data).digest(),
    "xxhash_cbor": lambda data: xxhash.xxh3_128_digest(data),
}
ALGORITHMS = ("blake2b", *_CBOR_DIGESTS)

_DIGEST_BYTES = 32  # of blake2b: no two tenants' blocks collide, by chance or by work
_TOKEN_BYTES = 4


def event_hash(digest: bytes) -> int:
    """The integer that KV events publish for a digest: its last 8 bytes, big-endian."""
    return int.from_bytes(digest[-8:], "big")


@dataclass(frozen=True)
class BlockHasher:
    """Hashes blocks of ``block_size`` tokens with ``num_lookahead`` tokens of lookahead.

    Hashers that differ in any field give different hashes for every block. Equal on all nodes that
    are to share blocks; ``seed`` may be a secret: who does not know it cannot compute any hash.
    Thread-safe, holds no state of requests.
    """

    block_size: int
    num_lookahead: int = 0
    algorithm: str = "blake2b"
    seed: str = ""

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ConfigError(
                f"unknown hash algorithm {self.algorithm!r}; choose from {', '.join(ALGORITHMS)}"
            )
        if not 1 <= self.block_size < 1 << 32:
            raise ConfigError(f"block size is {self.block_size}; it must be at least 1")
        if not 0 <= self.num_lookahead < 1 << 16:
            raise ConfigError(f"hash lookahead is {self.num_lookahead}; it must be 0 to 65535")

    @cached_property
    def none_hash(self) -> bytes:
        """The parent of every first block; tells the seed apart, not the block size or lookahead."""
        if self.algorithm == "blake2b":
            return hashlib.blake2b(
                self.seed.encode(), digest_size=_DIGEST_BYTES, person=b"baton root"
            ).digest()
        return self._cbor_digest(self.seed)

    @cached_property
    def fingerprint(self) -> str:
        """Equal iff two hashers of one block size give equal hashes (but for chance); does not give a secret
        seed away."""
        seed = hashlib.sha256(self.none_hash).hexdigest()[:16]
        return f"{self.algorithm}-k{self.num_lookahead}-{seed}"

    def extend(self, hashes: list[bytes], token_ids: Sequence[int], extra: ExtraKeys | None = None) -> None:
        """Append the hashes of all blocks whose tokens *and lookahead* are in ``token_ids``.

        Resumes at ``len(hashes)``: called after every step with the growing list of known tokens it
        costs O(new tokens). ``token_ids`` holds known tokens only, never drafts; an id outside
        0 .. 2^32-1 raises ValueError.
        """
        first = len(hashes)
        end = (len(token_ids) - self.num_lookahead) // self.block_size
        if end <= first:
            return
        start = first * self.block_size
        window = token_ids[start : end * self.block_size + self.num_lookahead]
        if self.algorithm != "blake2b":
            self._extend_cbor(hashes, window, start, extra)
            return
        packed = _pack(window)
        num_keyed = 0  # leading blocks of the window that may have extra keys
        if extra is not None:
            num_keyed = int(first == 0) if extra.first_block_only else end - first
        self._extend_packed(hashes, packed, start, num_keyed, extra)

    def hash_block(
        self,
        parent: bytes | None,
        tokens: Sequence[int],
        lookahead: Sequence[int] = (),
        extra_keys: HashKeys | None = None,
    ) -> bytes:
        """The hash of one block from what its KV event tells (see ``common.extra_keys.from_event_form``).

        ``parent`` None is a first block. Raises ValueError unless there are B tokens and k of lookahead.
        """
        if len(tokens) != self.block_size or len(lookahead) != self.num_lookahead:
            raise ValueError(
                f"{len(tokens)} tokens and {len(lookahead)} of lookahead do not make a block of "
                f"{self.block_size} with lookahead {self.num_lookahead}"
            )
        parent = parent or self.none_hash
        if self.algorithm != "blake2b":
            return self._hash_cbor(parent, tokens, lookahead, extra_keys)
        hasher = self._template.copy()
        hasher.update(parent + _pack(tokens) + _pack(lookahead) + _encode_keys(extra_keys))
        return hasher.digest()

    @cached_property
    def _template(self) -> hashlib.blake2b:
        """A fresh hasher with B, k and seed in BLAKE2b's parameter block, where they cost nothing.

        Copying it is half the cost of building one. Parent, tokens and lookahead have fixed lengths and
        the keys come last, so their plain concatenation is unambiguous.
        """
        return hashlib.blake2b(
            digest_size=_DIGEST_BYTES,
            person=b"baton v1" + struct.pack("<IHxx", self.block_size, self.num_lookahead),
            salt=hashlib.blake2b(self.seed.encode(), digest_size=16, person=b"baton salt").digest(),
        )

    def _extend_packed(
        self, hashes: list[bytes], packed: bytes, start: int, num_keyed: int, extra: ExtraKeys | None
    ) -> None:
        copy = self._template.copy
        append = hashes.append
        parent = hashes[-1] if hashes else self.none_hash
        stride = self.block_size * _TOKEN_BYTES
        covered = stride + self.num_lookahead * _TOKEN_BYTES
        for index, offset in enumerate(range(0, len(packed) - covered + 1, stride)):
            hasher = copy()
            hasher.update(parent)
            hasher.update(packed[offset : offset + covered])
            if extra is not None and index < num_keyed:
                block_start = start + index * self.block_size
                covered_end = block_start + self.block_size + self.num_lookahead
                hasher.update(_encode_keys(extra.keys_for(block_start, covered_end)))
            parent = hasher.digest()
            append(parent)

    def _extend_cbor(
        self, hashes: list[bytes], window: Sequence[int], start: int, extra: ExtraKeys | None
    ) -> None:
        parent = hashes[-1] if hashes else self.none_hash
        covered = self.block_size + self.num_lookahead
        for offset in range(0, len(window) - covered + 1, self.block_size):
            tokens = window[offset : offset + self.block_size]
            lookahead = window[offset + self.block_size : offset + covered]
            keys = None
            if extra is not None:
                keys = extra.keys_for(start + offset, start + offset + covered)
            parent = self._hash_cbor(parent, tokens, lookahead, keys)
            hashes.append(parent)

    def _hash_cbor(
        self, parent: bytes, tokens: Sequence[int], lookahead: Sequence[int], keys: HashKeys | None
    ) -> bytes:
        # The keys stay nested as one element: a flat form could equal a plain hash with other keys.
        extra = (keys, *lookahead) if self.num_lookahead else keys
        return self._cbor_digest((parent, tuple(tokens), extra))

    def _cbor_digest(self, value: object) -> bytes:
        return _CBOR_DIGESTS[self.algorithm](cbor2.dumps(value, canonical=True))


def _pack(token_ids: Sequence[int]) -> bytes:
    """Little-endian u32 each."""
    try:
        packed = array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(
            f"token ids must be integers from 0 to 2^32-1 ({error}); drafts are never hashed"
        ) from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _encode_keys(keys: HashKeys | None) -> bytes:
    """Empty for no keys, else an unambiguous encoding of what events publish: not the adapter's path."""
    if keys is None:
        return b""
    return msgspec.msgpack.encode([key[:2] if key[0] == "lora" else key for key in keys])
