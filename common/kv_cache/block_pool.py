"""The blocks of one KV group: free list, reference counts, and the map from hashes to blocks.

A block is in exactly one of three conditions: null (block 0), owned (reference count > 0), or free. A free
block may still be cached: it keeps its hash until it is handed out again, oldest first, so a prefix hit
can bring it back. Freeing tells nobody anything; losing the last copy of a hash does.
"""

from collections.abc import Iterable

from common.errors import CapacityError, ProtocolViolation
from common.kv_cache.layout import NULL_BLOCK


class BlockPool:
    """``num_blocks`` includes the null block. Not thread-safe: the engine's thread owns it."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise CapacityError(f"a KV pool needs at least 2 blocks, got {num_blocks}; raise kv_cache_mib")
        self.num_blocks = num_blocks
        self._ref_counts = [0] * num_blocks
        self._free: dict[int, None] = dict.fromkeys(range(1, num_blocks))  # in order of eviction
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._quarantined: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Blocks that can be owned: all but the null block and those in quarantine."""
        return self.num_blocks - 1 - len(self._quarantined)

    def allocate(self, count: int) -> tuple[list[int], list[bytes]]:
        """``count`` blocks, now owned once by the caller, and the hashes that were evicted for them.

        Raises CapacityError and changes nothing when fewer are free.
        """
        if count > len(self._free):
            raise CapacityError(f"{count} KV blocks wanted, {len(self._free)} free")
        blocks: list[int] = []
        evicted: list[bytes] = []
        for _ in range(count):
            block = next(iter(self._free))
            del self._free[block]
            self._ref_counts[block] = 1
            digest = self._hash_of.pop(block, None)
            if digest is not None:
                del self._block_of[digest]
                evicted.append(digest)
            blocks.append(block)
        return blocks, evicted

    def share(self, block: int) -> None:
        """One more owner; a cached free block leaves the free list."""
        if block == NULL_BLOCK:
            return
        if self._ref_counts[block] == 0:
            del self._free[block]
        self._ref_counts[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Ends one ownership of each. Give the last block of a sequence first: it is evicted first."""
        for block in blocks:
            if block == NULL_BLOCK:
                continue
            if self._ref_counts[block] <= 0:
                raise ProtocolViolation(f"block {block} freed more often than owned")
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None

    def register(self, block: int, digest: bytes) -> bool:
        """Makes an owned block findable. False when the hash is known already or the block has one."""
        if digest in self._block_of or block in self._hash_of:
            return False
        if self._ref_counts[block] <= 0:
            raise ProtocolViolation(f"block {block} registered without an owner")
        self._block_of[digest] = block
        self._hash_of[block] = digest
        return True

    def lookup(self, digest: bytes) -> int | None:
        return self._block_of.get(digest)

    def quarantine(self, block: int) -> None:
        """Takes an owned block out of circulation: something may still write to it."""
        if self._ref_counts[block] != 1:
            raise ProtocolViolation(f"block {block} has {self._ref_counts[block]} owners, cannot quarantine")
        self._ref_counts[block] = 0
        self._quarantined.add(block)

    def release_quarantine(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._quarantined.remove(block)
            self._free[block] = None

    def clear_hashes(self) -> None:
        """Forgets every cached block; owned ones stay owned."""
        self._hash_of.clear()
        self._block_of.clear()

    def registered(self) -> dict[bytes, int]:
        return dict(self._block_of)

    def ref_count(self, block: int) -> int:
        return self._ref_counts[block]

    def check_invariants(self) -> None:
        owned = {b for b, count in enumerate(self._ref_counts) if count > 0}
        free = set(self._free)
        assert not owned & free, f"owned and free: {owned & free}"
        assert not self._quarantined & (owned | free), "quarantined blocks in circulation"
        assert NULL_BLOCK not in owned | free
        assert len(owned) + len(free) + len(self._quarantined) == self.num_blocks - 1, "blocks lost"
        assert {b: h for h, b in self._block_of.items()} == self._hash_of
        assert NULL_BLOCK not in self._hash_of
        assert not self._quarantined & set(self._hash_of)
