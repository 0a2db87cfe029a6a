"""Block tables over KV groups: hits, windows, registering, events, forks (02-exactness 3)."""

import random
from collections.abc import Sequence

import pytest

from common.block_hash import BlockHasher, event_hash
from common.errors import CapacityError
from common.kv_cache.layout import NULL_BLOCK, build_layout, cdiv
from common.kv_cache.manager import BlockCopy, KVCacheManager, pool_sizes
from common.kv_cache.offered_blocks import final_blocks
from common.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from common.request import Request
from tests.fakes import fake_request, make_kv


def stored(kv: KVCacheManager, tokens: Sequence[int], num_modules: int, request_id: str = "w") -> Request:
    """A request that computed all its tokens; its final blocks are registered, and it owns them still."""
    request = fake_request(tokens, request_id=request_id)
    assert kv.allocate(request, len(tokens))
    request.num_computed = len(tokens)
    kv.register_final(request, len(tokens) if num_modules == 0 else max(0, len(tokens) - num_modules))
    return request


# ---- hits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("n", [0, 1, 2, 4, 8])
def test_a_cached_prompt_of_length_l_hits_the_formula(n: int, block_size: int) -> None:
    for length in range(1, 70):
        kv = make_kv(n, block_size=block_size, num_blocks=80)
        tokens = list(range(length))
        kv.free(stored(kv, tokens, n))
        leave = max(n, 1)
        assert kv.match(fake_request(tokens)) == max(0, (length - leave) // block_size * block_size)


@pytest.mark.parametrize("block_size", [1, 4])
@pytest.mark.parametrize("n", [0, 1, 2, 4, 8])
def test_shared_tokens_hit_the_formula(n: int, block_size: int) -> None:
    """S tokens shared with a longer cached prompt, then another continuation."""
    kv = make_kv(n, block_size=block_size, num_blocks=80)
    cached = list(range(60))
    kv.free(stored(kv, cached, n))
    for shared in range(60):
        request = fake_request([*cached[:shared], *range(100, 120)])
        assert kv.match(request) == max(0, (shared - n) // block_size * block_size)


def test_a_hit_leaves_something_below_the_cut_and_below_a_limit() -> None:
    kv = make_kv(0)
    tokens = list(range(40))
    kv.free(stored(kv, tokens, 0))
    assert kv.match(fake_request(tokens, stop_at=36)) == 32
    assert kv.match(fake_request(tokens, stop_at=37)) == 36
    assert kv.match(fake_request(tokens), at_most=23) == 20
    assert kv.match(fake_request(tokens), at_most=24) == 24


def test_without_prefix_caching_nothing_hits_and_nothing_is_told() -> None:
    kv = make_kv(2)
    kv.prefix_caching = False
    kv.free(stored(kv, range(40), 2))
    assert kv.match(fake_request(range(40))) == 0
    assert kv.events.take() == []


def test_adopted_blocks_are_shared_and_survive_their_writer() -> None:
    kv = make_kv(2)
    writer = stored(kv, range(20), 2)
    reader = fake_request(range(20), request_id="reader")
    kv.adopt(reader, kv.match(reader))
    assert reader.num_computed == 16
    assert reader.tables[0] == writer.tables[0][:4]
    kv.check_invariants([writer, reader])
    kv.free(writer)
    kv.check_invariants([reader])
    kv.free(reader)
    assert kv.pools[0].num_free == 64
    assert kv.match(fake_request(range(20))) == 16, "freed, but still findable"


# ---- windows --------------------------------------------------------------------------------------------


def naive_hit(kv: KVCacheManager, request: Request, limit: int) -> int:
    """The longest length at which every group has every block that it still needs."""
    for length in range(limit, 0, -1):
        present = all(
            pool.lookup(digest) is not None
            for pool, group in zip(kv.pools, kv.groups, strict=True)
            for digest in request.block_hashes[group.first_needed_block(length * kv.block_size) : length]
        )
        if present:
            return length
    return 0


def test_the_hit_is_a_fixed_point_over_the_groups() -> None:
    """Random holes in every group: the same hit as trying every length."""
    rng = random.Random(1)
    found = set()
    for _ in range(300):
        n = rng.choice((0, 2, 4))
        kv = make_kv(n, windows=(None, 6, 11), module_windows=[rng.choice((None, 6))] * n, block_size=2)
        tokens = list(range(40))
        writer = stored(kv, tokens, n)
        kv.free(writer)
        reader = fake_request(tokens)
        kv.hash_known(reader)
        for pool in kv.pools:  # lose some hashes
            for digest in reader.block_hashes:
                if rng.random() < 0.12:
                    block = pool._block_of.pop(digest, None)
                    if block is not None:
                        del pool._hash_of[block]
        limit = (40 - max(n, 1)) // 2
        hit = naive_hit(kv, reader, limit)
        assert kv.match(reader) == hit * 2
        found.add(hit)
        kv.adopt(reader, hit * 2)
        kv.check_invariants([reader])
        for group, table in zip(kv.groups, reader.tables, strict=True):
            needed = group.first_needed_block(hit * 2)
            assert all(b == NULL_BLOCK for b in table[:needed])
            assert NULL_BLOCK not in table[needed:]
    assert len(found) > 8, "hits of many lengths"


@pytest.mark.parametrize("n", [0, 2, 4, 8])
def test_windows_free_late(n: int) -> None:
    """The trunk's group keeps W-1 positions, a group with modules N-1 more."""
    layout = build_layout((None, 6, 9), (6,) * n, block_size=1, num_kv_heads=1, head_dim=1, dtype="float32")
    full, with_modules, trunk_only = layout.groups
    assert [full.extra_retained_tokens, trunk_only.extra_retained_tokens] == [0, 0]
    assert with_modules.extra_retained_tokens == max(0, n - 1)
    kv = KVCacheManager(layout, [50, 50, 50], BlockHasher(1, n))
    request = fake_request(range(40))
    for computed in range(1, 40):
        kv.allocate(request, computed)
        request.num_computed = computed
        kv.free_skipped(request)
        kv.check_invariants([request])
        kept = [sum(b != NULL_BLOCK for b in table) for table in request.tables]
        assert kept == [computed, min(computed, 5 + max(0, n - 1)), min(computed, 8)]
        assert NULL_BLOCK not in request.tables[1][-min(computed, 5) :]


def test_a_window_group_never_owns_more_than_its_cap() -> None:
    """The admission cap, the pool's need and the free boundary are one rule: else admission dead-locks."""
    rng = random.Random(2)
    reached = 0
    for _ in range(200):
        n, size, window = rng.choice((0, 2, 4)), rng.choice((1, 3, 4)), rng.choice((1, 5, 9))
        chunk = rng.randint(n + 1, 12)
        kv = make_kv(n, windows=(window,), module_windows=(window,) * n, block_size=size, num_blocks=100)
        group, request = kv.groups[0], fake_request(range(60))
        cap = group.max_blocks(chunk, 60)
        while request.num_computed < 60:
            upto = min(60, request.num_computed + rng.randint(1, chunk))
            assert kv.allocate(request, upto)
            owned = sum(b != NULL_BLOCK for b in request.tables[0])
            assert owned <= cap
            reached += owned == cap
            request.num_computed = upto
            kv.free_skipped(request)
    assert reached > 20, "the cap is tight"


def test_the_longest_request_a_pool_serves() -> None:
    assert make_kv(0, num_blocks=10).max_request_tokens(16, 1000) == 40
    assert make_kv(0, num_blocks=10).max_request_tokens(16, 30) == 30
    assert make_kv(0, windows=(8,), num_blocks=10).max_request_tokens(16, 1000) == 1000
    assert make_kv(0, windows=(8,), num_blocks=5).max_request_tokens(16, 1000) == 20
    assert make_kv(0, windows=(None, 8), num_blocks=10).max_request_tokens(16, 1000) == 40


def test_pool_sizes_say_what_to_change() -> None:
    layout = make_kv(0, windows=(None, 8)).layout
    assert pool_sizes(layout, 0, 7) == [8, 8]
    per_block = layout.bytes_per_block
    assert pool_sizes(layout, 10 * per_block, 0) == [10, 10]
    with pytest.raises(CapacityError, match="kv_cache_mib holds 1 KV blocks"):
        pool_sizes(layout, per_block, 0)


# ---- registering and events -----------------------------------------------------------------------------


def test_only_final_blocks_are_findable() -> None:
    kv = make_kv(4)
    request = fake_request(range(23))
    kv.allocate(request, 23)
    for final, blocks in ((3, 0), (4, 1), (11, 2), (19, 4), (23, 4)):
        kv.register_final(request, final)
        assert len(kv.pools[0].registered()) == blocks
    # The fifth block is final at 23, but its lookahead reaches token 23: nobody knows it yet.
    request.token_ids += [23, 24]
    kv.register_final(request, 21)
    assert len(kv.pools[0].registered()) == 5


def test_events_tell_hashes_tokens_and_lookahead() -> None:
    """Every hash can be made again from its event alone."""
    kv = make_kv(2)
    request = fake_request(range(30))
    kv.allocate(request, 30)
    kv.register_final(request, 9)
    kv.register_final(request, 9)  # nothing new
    kv.register_final(request, 28)
    first, second = kv.events.take()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert (len(first.block_hashes), len(second.block_hashes)) == (2, 5)
    assert first.parent_block_hash is None
    assert second.parent_block_hash == first.block_hashes[-1]
    assert first.group_idx is None
    parent: bytes | None = None
    for event, start in ((first, 0), (second, 8)):
        assert event.token_ids == list(range(start, start + 4 * len(event.block_hashes)))
        assert event.lookahead_token_ids is not None
        for i, lookahead in enumerate(event.lookahead_token_ids):
            tokens = event.token_ids[4 * i : 4 * i + 4]
            assert list(lookahead) == [tokens[-1] + 1, tokens[-1] + 2]
            parent = kv.hasher.hash_block(parent, tokens, lookahead)
            assert event.block_hashes[i] == event_hash(parent)


def test_null_blocks_inside_a_range_keep_tokens_and_hashes_in_step() -> None:
    kv = make_kv(0, windows=(None, 5))
    request = fake_request(range(40))
    kv.allocate(request, 40)
    kv.pools[1].free([request.tables[1][i] for i in (0, 1, 5)])
    for i in (0, 1, 5):
        request.tables[1][i] = NULL_BLOCK
    kv.register_final(request, 40)
    events = [e for e in kv.events.take() if isinstance(e, BlockStored)]
    assert [(e.group_idx, e.token_ids[0], len(e.block_hashes)) for e in events] == [
        (0, 0, 10),
        (1, 8, 3),
        (1, 24, 4),
    ]
    known = [event_hash(d) for d in request.block_hashes]
    for event in events:
        first = event.token_ids[0] // 4
        assert event.block_hashes == known[first : first + len(event.block_hashes)]
        assert event.token_ids == list(range(4 * first, 4 * first + 4 * len(event.block_hashes)))
        assert event.parent_block_hash == (known[first - 1] if first else None)


def test_removed_is_told_with_the_last_copy_only() -> None:
    """Two requests computed the same block; one copy is registered, and only its loss is told."""
    kv = make_kv(0, num_blocks=6)
    first, second = stored(kv, range(8), 0), stored(kv, range(8), 0, "x")
    (event,) = kv.events.take()
    assert isinstance(event, BlockStored)
    kv.free(second)
    third = fake_request(range(50, 66), request_id="y")
    assert kv.allocate(third, 16)  # takes the blocks that held the unregistered copies as well
    assert kv.events.take() == []
    kv.free(first)
    fourth = fake_request(range(60, 68), request_id="z")
    assert kv.allocate(fourth, 8)
    (removed,) = kv.events.take()
    assert isinstance(removed, BlockRemoved)
    assert sorted(map(str, removed.block_hashes)) == sorted(map(str, event.block_hashes))


def test_forgetting_everything_is_one_event() -> None:
    kv = make_kv(0)
    request = stored(kv, range(20), 0)
    kv.events.take()
    kv.reset_prefix_cache()
    assert kv.events.take() == [AllBlocksCleared()]
    assert kv.match(fake_request(range(20))) == 0
    kv.check_invariants([request])


# ---- hand-over ------------------------------------------------------------------------------------------


def test_a_reserved_span_leaves_out_what_the_window_never_reads() -> None:
    kv = make_kv(0, windows=(None, 6))
    request = fake_request(range(40))
    kv.adopt(request, 0)
    assert kv.allocate_span(request, 39, 40)
    assert NULL_BLOCK not in request.tables[0]
    assert request.tables[1][:8] == [NULL_BLOCK] * 8  # 39 - 6 + 1 = 34: from block 8 on
    assert NULL_BLOCK not in request.tables[1][8:]
    assert {g: list(blocks) for g, blocks in final_blocks(request.tables, (4, 4), 28, 40).items()} == {
        0: [7, 8, 9],
        1: [8, 9],
    }


def test_a_hit_that_lies_before_the_window_is_given_back() -> None:
    kv = make_kv(0, windows=(None, 6))
    kv.free(stored(kv, range(12), 0))
    request = fake_request(range(40))
    kv.adopt(request, kv.match(request))
    assert len(request.tables[1]) == 3
    assert kv.allocate_span(request, 39, 40)
    assert request.tables[1][:8] == [NULL_BLOCK] * 8
    request.num_computed = 40
    kv.free_skipped(request)
    kv.check_invariants([request])
    assert kv.pools[1].num_free == 62
    kv.free(request)
    assert [pool.num_free for pool in kv.pools] == [64, 64]


def test_quarantined_blocks_leave_the_request() -> None:
    kv = make_kv(0)
    request = fake_request(range(16))
    kv.allocate(request, 16)
    stuck = request.tables[0][2]
    kv.quarantine(request, {0: (stuck,)})
    assert request.tables[0][2] == NULL_BLOCK
    kv.register_final(request, 16)
    (before, after) = kv.events.take()
    assert isinstance(before, BlockStored)
    assert isinstance(after, BlockStored)
    assert (len(before.block_hashes), len(after.block_hashes)) == (2, 1)
    kv.free(request)
    assert kv.pools[0].num_free == 63
    kv.pools[0].release_quarantine((stuck,))
    assert kv.pools[0].num_free == 64


# ---- forks ----------------------------------------------------------------------------------------------


def parent_of_fork(
    num_modules: int = 4, windows: Sequence[int | None] = (None,)
) -> tuple[KVCacheManager, Request]:
    kv = make_kv(num_modules, windows=windows, module_windows=[windows[-1]] * num_modules)
    parent = fake_request(range(23), request_id="parent")
    assert kv.allocate(parent, 23)
    parent.num_computed = 23
    return kv, parent


def test_a_fork_shares_final_blocks_and_copies_the_rest() -> None:
    kv, parent = parent_of_fork()
    child = fake_request(range(23), request_id="child")
    assert kv.fork(parent, child, 19, 20)  # shared below L - N = 19; the child starts at 20
    assert child.tables[0][:4] == parent.tables[0][:4]
    assert len(child.tables[0]) == cdiv(20, 4)
    assert child.tables[0][4] not in parent.tables[0]
    assert child.num_computed == 20
    kv.check_invariants([parent, child])
    copies = kv.take_copies()
    assert copies == (BlockCopy(0, parent.tables[0][4], child.tables[0][4]),)
    source = parent.tables[0][4]
    kv.free(parent)
    assert kv.pools[0].ref_count(source) == 1, "a source lives until its copy is made"
    kv.copies_done(copies)
    assert kv.pools[0].ref_count(source) == 0
    kv.free(child)
    assert kv.pools[0].num_free == 64


def test_a_fork_that_ends_early_takes_its_copies_with_it() -> None:
    """Its blocks may already be somebody else's, even of a transfer: nothing may be copied into them."""
    kv, parent = parent_of_fork()
    children = [fake_request(range(23), request_id=f"c{i}") for i in range(2)]
    for child in children:
        assert kv.fork(parent, child, 19, 20)
    kv.free(children[0])
    kv.check_invariants([parent, children[1]])
    assert [c.destination for c in kv.take_copies()] == [children[1].tables[0][4]]


def test_a_fork_copies_no_block_that_the_window_freed() -> None:
    kv, parent = parent_of_fork(2, (None, 1))
    kv.free_skipped(parent)
    child = fake_request(range(23), request_id="child")
    free = [pool.num_free for pool in kv.pools]
    assert kv.fork(parent, child, 3, 21)
    assert all(
        (a == NULL_BLOCK) == (b == NULL_BLOCK) for a, b in zip(child.tables[1], parent.tables[1], strict=True)
    )
    kv.check_invariants([parent, child])
    assert kv.pools[0].num_free == free[0] - 6
    assert kv.pools[1].num_free == free[1] - 1


def test_no_room_for_a_fork_changes_nothing() -> None:
    kv = make_kv(2, num_blocks=6)
    parent = fake_request(range(23), request_id="parent")
    assert kv.allocate(parent, 23)
    child = fake_request(range(23), request_id="child")
    assert not kv.fork(parent, child, 19, 21)
    assert not child.tables
    assert kv.take_copies() == ()
    kv.check_invariants([parent])
