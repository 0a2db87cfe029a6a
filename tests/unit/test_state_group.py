"""Groups of recurrent state, and of other block sizes, in layout and KV manager (02-exactness 3)."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from common.block_hash import BlockHasher, event_hash
from common.errors import ConfigError
from common.kv_cache.layout import (
    NULL_BLOCK,
    KVGroupSpec,
    KVLayout,
    RecurrentLayer,
    StateGroupSpec,
    build_layout,
)
from common.kv_cache.manager import KVCacheManager, pool_sizes
from common.kv_cache.offered_blocks import final_blocks
from common.kv_events import BlockRemoved, BlockStored
from common.request import Request
from tests.fakes import fake_request, make_fake_engine, make_kv, outputs_of

CONV = RecurrentLayer(1, (32, 3))
DELTA = RecurrentLayer(2, (64, 3), (2, 8, 12))


def layout_of(state_block_size: int = 0, block_size: int = 4, windows: Sequence[int | None] = ()) -> KVLayout:
    return build_layout(
        {0: None, 3: 6},
        windows,
        block_size=block_size,
        num_kv_heads=2,
        head_dim=8,
        dtype="bfloat16",
        recurrent_layers=(CONV, DELTA),
        state_block_size=state_block_size,
    )


# ---- layout ---------------------------------------------------------------------------------------------


def test_the_state_group_is_the_last_and_modules_count_on_from_all_layers() -> None:
    layout = layout_of(8, windows=(None, 6, 9))
    assert [group.layers for group in layout.groups] == [(0, 4), (3, 5), (6,), (1, 2)]
    assert layout.num_layers == 4
    assert layout.trunk_groups == (0, 1)
    assert layout.locate(3) == (1, 0)
    state = layout.state_group
    assert state is layout.groups[-1]
    assert state is not None
    assert state.extra_retained_tokens == 2
    assert len(layout.kv_groups) == 3


def test_a_states_numbers_lie_one_part_after_the_other() -> None:
    state = layout_of(8).state_group
    assert state is not None
    assert state.slices == {1: (slice(4, 100),), 2: (slice(100, 292), slice(292, 484))}
    assert state.row_numbers == 484
    assert state.block_bytes == 4 * 484
    assert replace(state, recurrent_layers=(RecurrentLayer(0, (3, 3)),)).row_numbers == 16  # 4 + 9, padded


def test_a_checkpoint_takes_no_more_than_the_kv_before_it() -> None:
    layout = layout_of()  # 2 layers x 2 x 4 tokens x 16 numbers x 2 bytes = 512 a block; a state has 1936
    assert layout.groups[-1].block_size == 16
    assert layout.groups[-1].block_bytes <= 4 * sum(g.block_bytes for g in layout.kv_groups)
    assert layout.block_size == 4
    assert layout.hit_unit == 16


def test_sizes_and_fingerprint_follow_the_groups() -> None:
    layout = layout_of(16)
    assert layout.bytes_per_block == 512 + 484
    assert pool_sizes(layout, 100 * layout.bytes_per_block, 0) == [100, 100, 25]
    assert pool_sizes(layout, 0, 7) == [8, 8, 8]
    described = layout.describe()
    assert described["state_group"] == "1:((32,3),),2:((64,3),(2,8,12))@16"
    assert described["kv_groups"] == "full:0;6:3"
    assert layout_of(8).describe() != described
    plain = build_layout([None], (), block_size=4, num_kv_heads=1, head_dim=1, dtype="float32")
    assert plain.describe()["state_group"] == "none"


def test_block_sizes_must_fit_each_other() -> None:
    with pytest.raises(ConfigError, match="blocks of 6 tokens, which is no multiple of the smallest, 4"):
        layout_of(6)
    with pytest.raises(ConfigError, match="without any attention layer"):
        build_layout(
            {}, (), block_size=4, num_kv_heads=1, head_dim=1, dtype="float32", recurrent_layers=(CONV,)
        )


@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_what_is_kept_begins_with_the_last_final_checkpoint_and_fits_the_cap(extra: int, size: int) -> None:
    """The running state, whatever is not final yet, and the checkpoint before: never more than the cap."""
    state = StateGroupSpec((CONV,), size, extra)
    for computed in range(1, 100):
        first = state.first_needed_block(computed)
        final = computed - extra
        assert first <= max(0, (computed - 1) // size)
        assert first <= max(0, final // size - 1), "the last final checkpoint is kept"
        assert (first + 2) * size + size > final or first == 0, "and no more than one before it"
        for in_flight in (1, 7, 30):
            owned = -(-(computed + in_flight) // size) - first
            assert owned <= state.max_blocks(in_flight, 1000)


# ---- hits -----------------------------------------------------------------------------------------------


def cached(kv: KVCacheManager, length: int, num_modules: int) -> Request:
    """A prompt of that length that was computed in one step and ended."""
    request = fake_request(range(length), request_id="w")
    assert kv.allocate(request, length)
    request.num_computed = length
    kv.register_final(request, length if num_modules == 0 else max(0, length - num_modules))
    kv.free(request)
    return request


@pytest.mark.parametrize(("block_size", "state"), [(544, 544), (16, 544), (4, 12), (4, 4)])
@pytest.mark.parametrize("n", [0, 1, 2, 4, 8])
def test_a_cached_prompt_hits_all_whole_units(n: int, block_size: int, state: int) -> None:
    """No collapse to zero hits below, at and above 2 units, and no lost unit."""
    leave = max(n, 1)
    for length in (1, state, 2 * state - 1, 2 * state, *range(2 * state + leave - 1, 2 * state + leave + 2)):
        kv = make_kv(n, block_size=block_size, state_block_size=state, windows=(None, 7), num_blocks=140)
        cached(kv, length, n)
        assert kv.match(fake_request(range(length))) == max(0, (length - leave) // state * state)


def test_1367_tokens_at_unit_544_hit_1088() -> None:
    for n in (1, 2, 4, 8):
        for block_size in (16, 544):
            kv = make_kv(n, block_size=block_size, state_block_size=544, num_blocks=140)
            cached(kv, 1367, n)
            assert kv.match(fake_request(range(1367))) == 1088


def test_a_hit_ends_at_a_stored_state() -> None:
    """Attention has all of it; a state that was lost shortens the hit to the one before, not to nothing."""
    kv = make_kv(0, block_size=4, state_block_size=8)
    request = cached(kv, 41, 0)
    assert kv.match(fake_request(range(41))) == 40
    pool = kv.pools[-1]
    for unit, expected in ((5, 32), (3, 32), (4, 16)):  # checkpoints after 40, 24 and 32 positions
        block = pool.lookup(request.block_hashes[2 * unit - 1])
        assert block is not None
        del pool._block_of[pool._hash_of.pop(block)]
        assert kv.match(fake_request(range(41))) == expected
    reader = fake_request(range(41))
    kv.adopt(reader, kv.match(reader))
    assert reader.num_computed == 16
    assert reader.tables[-1] == [NULL_BLOCK, pool.lookup(request.block_hashes[3])]
    assert len(reader.tables[0]) == 4
    kv.check_invariants([reader])


def test_groups_of_attention_may_have_other_block_sizes_too() -> None:
    """Hits are multiples of the least common multiple, here of 4, 6 (window) and 8 (state): of 24; and the
    unit of hashes is the smallest."""
    base = make_kv(0, block_size=2, windows=(None, 7), state_block_size=8).layout
    sizes = (4, 6, 8)
    groups = tuple(replace(g, block_size=s) for g, s in zip(base.groups, sizes, strict=True))
    with pytest.raises(ConfigError, match="no multiple of the smallest"):
        KVLayout(groups, base.num_layers, 0)
    groups = (replace(groups[0], block_size=2), *groups[1:])
    layout = KVLayout(groups, base.num_layers, 0)
    assert layout.hit_unit == 24
    kv = KVCacheManager(layout, [60, 60, 60], BlockHasher(2))
    for length in (24, 25, 47, 48, 49, 80):
        cached(kv, length, 0)
        assert kv.match(fake_request(range(length))) == (length - 1) // 24 * 24
        reader = fake_request(range(length))
        kv.adopt(reader, kv.match(reader))
        assert [len(t) for t in reader.tables] == [reader.num_computed // g.block_size for g in groups]
        assert kv.allocate(reader, length)
        kv.check_invariants([reader])
        kv.free(reader)


def test_events_of_larger_blocks_chain_with_the_others() -> None:
    kv = make_kv(2, block_size=4, state_block_size=8)
    hasher = BlockHasher(4, 2)
    request = cached(kv, 26, 2)
    full, state = kv.events.take()
    assert isinstance(full, BlockStored)
    assert isinstance(state, BlockStored)
    assert (full.group_idx, full.block_size, len(full.block_hashes)) == (0, 4, 6)
    assert (state.group_idx, state.block_size, len(state.block_hashes)) == (1, 8, 3)
    assert state.block_hashes == full.block_hashes[1::2]
    assert state.block_hashes[0] == event_hash(
        hasher.hash_block(request.block_hashes[0], range(4, 8), [8, 9])
    )
    assert state.token_ids == list(range(24))
    assert state.lookahead_token_ids == [[8, 9], [16, 17], [24, 25]]
    assert state.parent_block_hash is None
    other = fake_request(range(100, 100 + 4 * 62), request_id="other")
    assert kv.allocate(other, 4 * 62)
    gone = [event for event in kv.events.take() if isinstance(event, BlockRemoved)]
    assert {event.group_idx for event in gone} == {0}, "the state pool has blocks for twice the tokens"


# ---- life of a request's states -------------------------------------------------------------------------


def test_states_of_a_request_come_and_go() -> None:
    """Told step by step: chunked prompt, decode over a checkpoint, preemption, resume from the checkpoint."""
    engine, _ = make_fake_engine(0, block_size=4, state_block_size=8, budget=12)
    kv = engine.scheduler.kv
    request = fake_request(range(20), 30)
    engine.add(request)
    engine.step()  # 1. positions 0..11: one checkpoint, running state in the second block
    assert [b != NULL_BLOCK for b in request.tables[-1]] == [True, True]
    assert len(kv.pools[-1].registered()) == 1
    engine.step()  # 2. 12..19 and the first token: two checkpoints
    assert len(request.tables[-1]) == 3
    assert len(kv.pools[-1].registered()) == 2
    while request.num_computed < 34:  # 3. a checkpoint every 8 tokens; old ones leave, findable
        engine.step()
    assert [b != NULL_BLOCK for b in request.tables[-1]] == [False, False, False, True, True]
    assert len(kv.pools[-1].registered()) == 4
    engine.scheduler._preempt(request)  # 4. the running state is gone with the blocks
    assert kv.pools[-1].num_free == kv.pools[-1].num_blocks - 1
    engine.step()
    engine.step()  # 5. back from the checkpoint after 32 positions
    assert request.num_computed > 34
    assert request.tables[-1][:3] == [NULL_BLOCK] * 3
    while engine.has_work:
        engine.step()
        engine.check_invariants()
    assert len(outputs_of(request)) == 30


@pytest.mark.parametrize("n", [0, 1, 4, 8])
@pytest.mark.parametrize("size", [1, 4])
def test_no_checkpoint_leaves_before_it_could_be_registered(n: int, size: int) -> None:
    """Blocks are final N-1 positions late: in decode, too, every checkpoint is kept so long."""
    engine, _ = make_fake_engine(n, block_size=size, state_block_size=size, num_blocks=80)
    request = fake_request(range(5), 50)
    engine.add(request)
    final = 0
    while engine.has_work:
        (update,) = engine.step().updates
        final = update.final_upto
    assert final == 55 - max(n, 1)
    assert len(engine.scheduler.kv.pools[-1].registered()) == final // size


def test_a_hand_over_wants_the_running_state_and_the_checkpoint_before_it() -> None:
    for n, length, wanted in ((4, 30, [2, 3]), (4, 28, [2, 3]), (4, 27, [1, 2]), (0, 25, [2]), (0, 5, [0])):
        engine, _ = make_fake_engine(n, block_size=4, state_block_size=8)
        cut = length - max(1, n - 1)
        request = fake_request(range(length))
        engine.reserve(request, cut)
        assert list(engine.wanted("r", cut)[1]) == wanted, (n, length)
        assert list(engine.wanted("r", cut)[0]) == list(range(-(-cut // 4)))
        assert wanted[-1] == (cut - 1) // 8


def test_blocks_are_offered_when_they_end_and_the_last_with_the_cut() -> None:
    tables = [[11, 12, 13, 14], [NULL_BLOCK, 22, 23]]
    assert final_blocks(tables, (4, 8), 0, 9) == {0: {0: 11, 1: 12}, 1: {}}
    assert final_blocks(tables, (4, 8), 9, 13, partial=True) == {0: {2: 13, 3: 14}, 1: {1: 22}}
    assert final_blocks(tables, (4, 8), 9, 17, partial=True) == {0: {2: 13, 3: 14}, 1: {1: 22, 2: 23}}


def test_kv_specs_are_what_they_were() -> None:
    """Rows and bytes of an attention group do not depend on the state group beside it."""
    group = layout_of(8).groups[0]
    assert isinstance(group, KVGroupSpec)
    assert (group.block_rows, group.row_numbers, group.block_bytes) == (8, 16, 256)
    assert group.keeps_all
