"""The blocks of one group: owned, free, cached; evicted oldest first; nothing lost."""

import pytest

from common.errors import CapacityError, ProtocolViolation
from common.kv_cache.block_pool import BlockPool
from common.kv_cache.layout import NULL_BLOCK


def test_the_null_block_is_never_handed_out() -> None:
    pool = BlockPool(5)
    blocks, evicted = pool.allocate(4)
    assert sorted(blocks) == [1, 2, 3, 4]
    assert evicted == []
    pool.share(NULL_BLOCK)
    pool.free((NULL_BLOCK,))
    assert pool.num_free == 0
    pool.check_invariants()


def test_asking_for_too_much_changes_nothing() -> None:
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(CapacityError, match="3 KV blocks wanted, 2 free"):
        pool.allocate(3)
    assert pool.num_free == 2
    with pytest.raises(CapacityError, match="at least 2 blocks, got 1"):
        BlockPool(1)


def test_a_freed_block_stays_findable_until_it_is_handed_out() -> None:
    pool = BlockPool(3)
    (block,), _ = pool.allocate(1)
    assert pool.register(block, b"hash")
    pool.free((block,))
    assert pool.lookup(b"hash") == block
    pool.share(block)  # a hit brings it back
    assert pool.num_free == 1
    pool.free((block,))
    _, evicted = pool.allocate(2)
    assert evicted == [b"hash"]
    assert pool.lookup(b"hash") is None
    pool.check_invariants()


def test_blocks_are_evicted_in_the_order_in_which_they_were_freed() -> None:
    pool = BlockPool(4)
    blocks, _ = pool.allocate(3)
    for block in blocks:
        pool.register(block, bytes([block]))
    first, second, third = blocks
    pool.free((third, first))  # a sequence's last block first
    pool.free((second,))
    assert pool.allocate(3) == ([third, first, second], [bytes([third]), bytes([first]), bytes([second])])


def test_two_owners() -> None:
    pool = BlockPool(3)
    (block,), _ = pool.allocate(1)
    pool.share(block)
    pool.free((block,))
    assert (pool.ref_count(block), pool.num_free) == (1, 1)
    pool.free((block,))
    assert pool.num_free == 2
    with pytest.raises(ProtocolViolation, match="freed more often than owned"):
        pool.free((block,))


def test_a_hash_has_one_block_and_a_block_one_hash() -> None:
    pool = BlockPool(4)
    (a, b), _ = pool.allocate(2)
    assert pool.register(a, b"x")
    assert not pool.register(b, b"x")
    assert not pool.register(a, b"y")
    assert pool.registered() == {b"x": a}
    pool.free((b,))
    with pytest.raises(ProtocolViolation, match="without an owner"):
        pool.register(b, b"z")


def test_quarantined_blocks_are_in_nobodys_hands() -> None:
    pool = BlockPool(4)
    (a, b), _ = pool.allocate(2)
    pool.quarantine(a)
    pool.check_invariants()
    assert pool.num_free == 1
    pool.share(b)
    with pytest.raises(ProtocolViolation, match="2 owners"):
        pool.quarantine(b)
    pool.free((b, b))
    assert pool.num_free == 2
    pool.release_quarantine((a,))
    assert pool.num_free == 3
    pool.check_invariants()


def test_forgetting_all_hashes_leaves_the_owners() -> None:
    pool = BlockPool(3)
    (block,), _ = pool.allocate(1)
    pool.register(block, b"x")
    pool.clear_hashes()
    assert pool.lookup(b"x") is None
    assert pool.ref_count(block) == 1
    assert pool.register(block, b"x")
    pool.check_invariants()
