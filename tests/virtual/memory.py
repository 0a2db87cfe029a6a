"""KV pools whose every block tells what it holds, and a ledger that watches who owns it.

A block is filled with (transfer, generation, group, position), repeated. What is given back is overwritten at
once, and looked at when it is taken again: a late write, a stale read and a block of somebody else all show.
"""

import random
from collections.abc import Iterable, Mapping

import numpy as np

from kv_transfer.plan import GroupPool, KvPools
from tests.virtual.lanes import Fabric

BLOCK_SIZES = (16, 32)  # tokens, by group
BLOCK_BYTES = (64, 96)
_FREE = 0xF4EEF4EE
_WORDS = 4


def make_pools(num_blocks: int) -> KvPools:
    """The second group has blocks of twice the tokens, so half as many are needed."""
    counts = (num_blocks, num_blocks // 2)
    return KvPools(
        tuple(
            GroupPool(np.zeros((count, size), np.uint8), tokens)
            for count, size, tokens in zip(counts, BLOCK_BYTES, BLOCK_SIZES, strict=True)
        )
    )


class Memory:
    """All blocks of a node. ``owners``: (group, block) -> transfer; absent: free."""

    def __init__(self, fabric: Fabric, num_blocks: int, rng: random.Random) -> None:
        self.pools = make_pools(num_blocks)
        self.owners: dict[tuple[int, int], str] = {}
        self._fabric = fabric
        self._random = rng
        self._words = [pool.array_NB.view(np.uint32) for pool in self.pools.groups]
        self._free = [list(range(pool.num_blocks)) for pool in self.pools.groups]
        self._starts = [pool.array_NB.__array_interface__["data"][0] for pool in self.pools.groups]
        for words in self._words:
            words[:] = _FREE

    def take(self, counts: Mapping[int, int], owner: str) -> dict[int, list[int]] | None:
        """Blocks by group, now ``owner``'s; None, and nothing taken, where there are too few."""
        if any(len(self._free[g]) < count for g, count in counts.items()):
            return None
        taken = {}
        for g, count in counts.items():
            free = self._free[g]
            if self._random.random() < 0.5:
                self._random.shuffle(free)  # else often consecutive: received in place
            ids, self._free[g] = free[:count], free[count:]
            for block in ids:
                self._check_free(g, block, f"taken by {owner}")
                self.owners[g, block] = owner
            taken[g] = ids
        return taken

    def _check_free(self, g: int, block: int, when: str) -> None:
        if not (self._words[g][block] == _FREE).all():
            self._fabric.world.problem(
                f"a free block was written: group {g}, block {block} holds {self.holds(g, block)}, {when}"
            )

    def give_back(self, group: int, blocks: Iterable[int], owner: str) -> None:
        for block in blocks:
            if self.owners.pop((group, block), None) != owner:
                self._fabric.world.problem(f"{owner} gives back what it does not own: {group}, {block}")
                continue
            start = self._starts[group] + block * BLOCK_BYTES[group]
            if self._fabric.touches(start, start + BLOCK_BYTES[group]):
                self._fabric.world.problem(f"{owner} frees block {block} of group {group} while bytes move")
            self._words[group][block] = _FREE
            self._free[group].append(block)

    def fill(self, group: int, block: int, transfer: int, generation: int, position: int) -> None:
        mark = np.array((transfer, generation, group, position), np.uint32)
        self._words[group][block] = np.resize(mark, len(self._words[group][block]))

    def holds(self, group: int, block: int) -> tuple[int, ...] | str:
        """(transfer, generation, group, position), or what else is there."""
        words = self._words[group][block]
        mark = words[:_WORDS]
        if not (words == np.resize(mark, len(words))).all():
            return f"a mixture: {words.tolist()}"
        return "nothing" if mark[0] == _FREE else tuple(int(word) for word in mark)

    def whole(self) -> list[str]:
        """What is wrong with a pool that should be free from end to end."""
        wrong = [f"{owner} still owns {g}, {block}" for (g, block), owner in self.owners.items()]
        for g, words in enumerate(self._words):
            wrong += [
                f"group {g}, block {block} holds {self.holds(g, int(block))} though nobody owns it"
                for block in np.flatnonzero((words != _FREE).any(axis=1))
                if (g, int(block)) not in self.owners
            ]
            if len(self._free[g]) != len(set(self._free[g])):
                wrong.append(f"group {g} has blocks twice in its free list")
        return wrong


def mark_of(view: memoryview) -> tuple[int, ...] | None:
    """The mark at the start of what is sent; None for what is too short to be KV."""
    if len(view) < BLOCK_BYTES[0]:
        return None
    return tuple(int(word) for word in np.frombuffer(view[: 4 * _WORDS], np.uint32))
