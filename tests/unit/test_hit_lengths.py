"""How much of a prompt hits, with lookahead hashes and with plain ones: formulas on tables of lengths."""

import random
from collections.abc import Sequence

import pytest

from common.block_hash import BlockHasher
from common.engine.methods import check_dropped_block
from common.engine.rules import final_upto
from common.engine.speculation import multi_module
from common.errors import ConfigError
from common.kv_cache.layout import RecurrentLayer, build_layout
from common.kv_cache.manager import KVCacheManager
from common.request import Request
from tests.fakes import fake_request

LOOKAHEADS = (0, 1, 2, 4, 8)
BLOCK_SIZES = (4, 16, 544)
SETTINGS = [(k, size, plain) for k in LOOKAHEADS for size in BLOCK_SIZES for plain in (False, True)]
REFUSED = [(k, size) for k in LOOKAHEADS for size in BLOCK_SIZES if size < k]


def lengths_for(block_size: int) -> list[int]:
    """At least 200: everything near the first five block boundaries, the shortest, and others at random."""
    near = {i * block_size + d for i in range(6) for d in range(-10, 11)}
    rng = random.Random(block_size)
    while len(found := {n for n in near if n >= 1}) < 210:
        near.add(rng.randint(1, max(300, 5 * block_size)))
    return sorted(found)


def make_manager(k: int, block_size: int, plain: bool, num_tokens: int, state: int = 0) -> KVCacheManager:
    """As `engine.build` makes it for N = k modules; ``plain`` is `disable_lookahead_block_hashes`."""
    layout = build_layout(
        (None,),
        (None,) * k,
        block_size=block_size,
        num_kv_heads=1,
        head_dim=1,
        dtype="float32",
        recurrent_layers=(RecurrentLayer(1, (1, 1)),) if state else (),
        state_block_size=state,
    )
    sizes = [num_tokens // block_size + 3] * len(layout.groups)
    return KVCacheManager(
        layout,
        sizes,
        BlockHasher(block_size, 0 if plain else k),
        drop_last_block=plain and k > 0,
        num_unhashed=k if plain else 0,
    )


def compute(kv: KVCacheManager, k: int, tokens: Sequence[int], num_outputs: int) -> None:
    """A prompt that went on for ``num_outputs`` sampled tokens and ended."""
    request: Request = fake_request(tokens)
    request.token_ids += [1 << 20] * num_outputs
    assert kv.allocate(request, request.num_tokens - 1)
    request.num_computed = request.num_tokens - 1
    kv.register_final(request, final_upto(request, k))
    kv.free(request)


def is_refused(k: int, block_size: int, plain: bool) -> bool:
    """With plain hashes the block that is dropped must cover what the drafter looks ahead."""
    if not plain or k <= block_size:
        return False
    with pytest.raises(ConfigError, match=f"looks {k} tokens ahead"):
        check_dropped_block(block_size, multi_module(k))
    return True


@pytest.mark.parametrize(("k", "block_size", "plain"), SETTINGS)
def test_a_cached_prompt_of_l_tokens(k: int, block_size: int, plain: bool) -> None:
    """Lookahead hashes reach it whatever followed. Plain ones need the k - 1 tokens after a block too before
    it is final, and nothing in the hash says so: a prompt that ended at once is cached to L + 1 - k only."""
    if is_refused(k, block_size, plain):
        return
    table = lengths_for(block_size)
    assert len(table) >= 200
    for length in table:
        for num_outputs in (1, k + 1):
            kv = make_manager(k, block_size, plain, length + k)
            compute(kv, k, range(length), num_outputs)
            if plain and k:
                usable = length - 1 if num_outputs > 1 else min(length - 1, length + 1 - k)
                formula = max(0, usable // block_size * block_size - block_size)
            else:
                formula = max(0, (length - max(k, 1)) // block_size * block_size)
            assert kv.match(fake_request(range(length))) == formula, (length, num_outputs)


@pytest.mark.parametrize(("k", "block_size", "plain"), SETTINGS)
def test_s_tokens_shared_with_a_longer_cached_prompt(k: int, block_size: int, plain: bool) -> None:
    if is_refused(k, block_size, plain):
        return
    table = lengths_for(block_size)
    longest = table[-1] + block_size + k + 1
    kv = make_manager(k, block_size, plain, longest)
    compute(kv, k, range(longest), 1)
    for shared in table:
        reader = fake_request([*range(shared), *range(1 << 16, (1 << 16) + block_size + k + 1)])
        if plain and k:
            formula = max(0, shared // block_size * block_size - block_size)
        else:
            formula = max(0, (shared - k) // block_size * block_size)
        assert kv.match(reader) == formula, shared


def test_which_pairs_of_lookahead_and_block_size_the_start_refuses() -> None:
    assert REFUSED == [(8, 4)]
    assert all(is_refused(k, size, True) for k, size in REFUSED)


@pytest.mark.parametrize("block_size", [16, 544])
@pytest.mark.parametrize(
    ("k", "plain", "hit"),
    [(0, False, 1088), (0, True, 1088)]
    + [(k, plain, 544 if plain else 1088) for k in (1, 2, 4, 8) for plain in (False, True)],
)
def test_1367_tokens_of_a_hybrid_at_unit_544(k: int, plain: bool, hit: int, block_size: int) -> None:
    """Hits end at a checkpoint of the recurrent state, whatever the block size of attention; the drop takes
    a whole unit."""
    kv = make_manager(k, block_size, plain, 1367 + k, state=544)
    assert kv.layout.hit_unit == 544
    compute(kv, k, range(1367), k + 1)
    assert kv.match(fake_request(range(1367))) == hit


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("plain", [False, True])
def test_a_hybrid_below_at_and_above_two_units(k: int, plain: bool) -> None:
    for length in range(2 * 544 - 1, 2 * 544 + k + 2):
        kv = make_manager(k, 16, plain, length + k, state=544)
        compute(kv, k, range(length), k + 1)
        hit = (length - 1) // 544 * 544 - 544 if plain else (length - k) // 544 * 544
        assert kv.match(fake_request(range(length))) == hit
