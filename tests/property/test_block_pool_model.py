"""The block pool against a naive model: plain lists, searched every time."""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.errors import CapacityError
from common.kv_cache.block_pool import BlockPool

NUM_BLOCKS = 9


@dataclass
class NaivePool:
    """Free blocks in order of eviction; owners and (block, hash) pairs as lists."""

    free: list[int] = field(default_factory=lambda: list(range(1, NUM_BLOCKS)))
    owners: list[int] = field(default_factory=list)
    hashes: list[tuple[int, bytes]] = field(default_factory=list)
    stuck: list[int] = field(default_factory=list)


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool, self.naive = BlockPool(NUM_BLOCKS), NaivePool()

    @rule(count=st.integers(0, NUM_BLOCKS))
    def allocate(self, count: int) -> None:
        if count > len(self.naive.free):
            with pytest.raises(CapacityError):
                self.pool.allocate(count)
            return
        expected, self.naive.free = self.naive.free[:count], self.naive.free[count:]
        evicted = [h for b in expected for block, h in self.naive.hashes if block == b]
        self.naive.hashes = [(b, h) for b, h in self.naive.hashes if b not in expected]
        self.naive.owners += expected
        assert self.pool.allocate(count) == (expected, evicted)

    @precondition(lambda self: self.naive.owners)
    @rule(choice=st.randoms(use_true_random=False))
    def free(self, choice: random.Random) -> None:
        blocks = [choice.choice(self.naive.owners)]
        if choice.random() < 0.5:
            blocks = sorted(set(self.naive.owners), key=lambda b: choice.random())
        for block in blocks:
            self.naive.owners.remove(block)
            if block not in self.naive.owners:
                self.naive.free.append(block)
        self.pool.free(blocks)

    @precondition(lambda self: self.naive.owners)
    @rule(choice=st.randoms(use_true_random=False), digest=st.sampled_from([b"a", b"b", b"c", b"d", b"e"]))
    def register(self, choice: random.Random, digest: bytes) -> None:
        block = choice.choice(self.naive.owners)
        new = all(b != block and h != digest for b, h in self.naive.hashes)
        if new:
            self.naive.hashes.append((block, digest))
        assert self.pool.register(block, digest) is new

    @precondition(lambda self: self.naive.hashes)
    @rule(choice=st.randoms(use_true_random=False))
    def hit(self, choice: random.Random) -> None:
        block, digest = choice.choice(self.naive.hashes)
        assert self.pool.lookup(digest) == block
        self.pool.share(block)
        if block in self.naive.free:
            self.naive.free.remove(block)
        self.naive.owners.append(block)

    @precondition(lambda self: self.naive.owners)
    @rule(choice=st.randoms(use_true_random=False))
    def quarantine(self, choice: random.Random) -> None:
        known = {b for b, _ in self.naive.hashes}
        lone = [b for b in self.naive.owners if self.naive.owners.count(b) == 1 and b not in known]
        if lone:
            block = choice.choice(lone)
            self.naive.owners.remove(block)
            self.naive.stuck.append(block)
            self.pool.quarantine(block)

    @rule()
    def end_quarantine(self) -> None:
        self.pool.release_quarantine(self.naive.stuck)
        self.naive.free += self.naive.stuck
        self.naive.stuck = []

    @rule()
    def clear(self) -> None:
        self.pool.clear_hashes()
        self.naive.hashes = []

    @invariant()
    def agrees(self) -> None:
        self.pool.check_invariants()
        assert self.pool.num_free == len(self.naive.free)
        assert self.pool.registered() == {h: b for b, h in self.naive.hashes}
        for block in range(NUM_BLOCKS):
            assert self.pool.ref_count(block) == self.naive.owners.count(block)


TestBlockPool = PoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
