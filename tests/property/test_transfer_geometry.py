"""Every (layer, module, head, token) of the decode node's cache is covered exactly once, whatever block sizes
and tensor-parallel degrees the nodes have; and the bytes arrive where the model's own storage looks for them.
"""

import itertools
import re
from collections import Counter

import numpy as np
import pytest
import torch

from common.errors import ConfigError
from common.kv_cache.layout import KVLayout, build_layout
from common.kv_cache.storage import KVStorage
from kv_transfer.geometry import GroupGeometry, GroupMap, HeadShare, difference, head_range, sources
from kv_transfer.plan import GroupPool, view_of
from kv_transfer.relayout import gather_mapped, scatter_mapped

SIZES = (1, 2, 4)
HEADS = (1, 2, 3, 8)
HEAD_DIM = 2
TOKENS = 16  # of the prompt: whole blocks of every size below
BLOCK_SIZES = ((4, 4), (2, 4), (4, 2), (2, 8), (8, 2))
SPLITS = [
    (heads, p, d)
    for heads, p, d in itertools.product(HEADS, SIZES, SIZES)
    if all(heads % size == 0 or size % heads == 0 for size in (p, d))
]


def layout_of(block_size: int, num_kv_heads: int) -> KVLayout:
    """Two groups, each with layers of the trunk and a module: layers 0, 2 and module 1; layer 1, module 0."""
    return build_layout(
        [None, 6, None],
        [6, None],
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        dtype="float32",
    )


def geometry_of(layout: KVLayout, num_kv_heads: int, rank: int, size: int) -> list[GroupGeometry]:
    return [
        GroupGeometry(
            group.block_size,
            group.block_bytes,
            HeadShare(2 * len(group.layers), num_kv_heads, HEAD_DIM * 4, rank, size),
        )
        for group in layout.kv_groups
    ]


def tables(block_size: int, start: int) -> list[int]:
    """Block ids of the prompt, neither in order nor the same on both nodes."""
    return [start + (5 * i + 3) % (TOKENS // block_size) for i in range(TOKENS // block_size)]


def number(layer: int, is_value: int, head: int, token: int) -> torch.Tensor:
    """What a head of a token holds: no two are alike."""
    base = (((layer * 2 + is_value) * 8 + head) * TOKENS + token) * HEAD_DIM
    return torch.arange(base + 1, base + 1 + HEAD_DIM, dtype=torch.float32)


def expected(layer: int, is_value: int, heads: range) -> torch.Tensor:
    """[TOKENS, heads, HEAD_DIM]"""
    return torch.stack(
        [torch.stack([number(layer, is_value, head, t) for head in heads]) for t in range(TOKENS)]
    )


def filled(layout: KVLayout, heads: range) -> KVStorage:
    """A rank's storage with the prompt in it, written through the views that the model reads."""
    storage = KVStorage(layout, [TOKENS + 2] * len(layout.groups))
    for g, group in enumerate(layout.kv_groups):
        table = tables(group.block_size, 1)
        rows = storage.rows(g).view(TOKENS + 2, len(group.layers), 2, group.block_size, len(heads), HEAD_DIM)
        for i, layer in enumerate(group.layers):
            for is_value in (0, 1):
                wanted = expected(layer, is_value, heads)
                for t in range(TOKENS):
                    rows[table[t // group.block_size], i, is_value, t % group.block_size] = wanted[t]
    return storage


def pool_of(storage: KVStorage, g: int, geometry: GroupGeometry) -> GroupPool:
    return GroupPool(storage.block_bytes(g), geometry.block_size, geometry.inside)


@pytest.mark.parametrize(("heads", "p_size", "d_size"), SPLITS)
def test_every_layer_module_head_and_token_is_covered_exactly_once(
    heads: int, p_size: int, d_size: int
) -> None:
    for (p_block, d_block), rank in itertools.product(BLOCK_SIZES, range(d_size)):
        held = head_range(heads, rank, d_size)
        layout = layout_of(d_block, len(held))
        storage = KVStorage(layout, [TOKENS + 2] * 2)
        written = [np.zeros_like(storage.block_bytes(g)) for g in range(2)]
        geometry = geometry_of(layout, heads, rank, d_size)
        for source_rank in sources(heads, p_size, rank, d_size):
            p_heads = head_range(heads, source_rank, p_size)
            p_layout = layout_of(p_block, len(p_heads))
            source = filled(p_layout, p_heads)
            p_geometry = geometry_of(p_layout, heads, source_rank, p_size)
            assert difference(p_geometry, geometry) is None
            for g in range(2):
                pair = GroupMap(p_geometry[g], geometry[g])
                blocks = dict(enumerate(tables(p_block, 1)))
                positions, placed = range(TOKENS // d_block), tables(d_block, 2)
                packed = gather_mapped(pair, pool_of(source, g, p_geometry[g]), positions, blocks)
                assert len(packed) == len(positions) * pair.bytes_per_block
                scatter_mapped(pair, pool_of(storage, g, geometry[g]), placed, packed)
                marks = np.zeros_like(written[g])
                ones = view_of(np.ones(len(packed), np.uint8))
                scatter_mapped(pair, GroupPool(marks, d_block, geometry[g].inside), placed, ones)
                written[g] += marks
        for g, group in enumerate(layout.kv_groups):
            table = tables(d_block, 2)
            assert (written[g][table] == 1).all()
            assert (
                written[g].sum() == TOKENS // d_block * group.block_bytes
            )  # nothing beside the prompt's blocks
            for layer in group.layers:
                k, v = storage.read(layer, table, 0, TOKENS)
                assert torch.equal(k, expected(layer, 0, held)), layer
                assert torch.equal(v, expected(layer, 1, held)), layer


@pytest.mark.parametrize(("heads", "p_size", "d_size"), SPLITS)
def test_each_head_is_asked_of_one_rank_that_holds_it_and_the_load_is_even(
    heads: int, p_size: int, d_size: int
) -> None:
    load: Counter[int] = Counter(dict.fromkeys(range(p_size), 0))
    for rank in range(d_size):
        asked = sources(heads, p_size, rank, d_size)
        assert [h for part in asked.values() for h in part] == list(head_range(heads, rank, d_size))
        for source, part in asked.items():
            assert set(part) <= set(head_range(heads, source, p_size))
            load[source] += len(part)
    assert max(load.values()) - min(load.values()) <= 1


@pytest.mark.parametrize(("heads", "size"), [(3, 2), (3, 4), (2, 3), (8, 3)])
def test_an_uneven_split_is_refused_by_name(heads: int, size: int) -> None:
    with pytest.raises(ConfigError, match=f"{heads} KV heads cannot be shared evenly by {size}"):
        head_range(heads, 0, size)


def share(planes: int = 4, heads: int = 8, rank: int = 0, size: int = 1) -> HeadShare:
    return HeadShare(planes, heads, 8, rank, size)


def geometry(block_size: int, inside: HeadShare) -> GroupGeometry:
    return GroupGeometry(block_size, inside.planes * block_size * inside.token_bytes, inside)


@pytest.mark.parametrize(
    ("source", "destination", "alike"),
    [
        (geometry(16, share()), geometry(16, share()), True),
        (geometry(16, share(heads=1, rank=1, size=2)), geometry(16, share(heads=1, rank=3, size=4)), True),
        (geometry(16, share()), geometry(32, share()), False),
        (geometry(32, share()), geometry(16, share()), False),
        (geometry(16, share()), geometry(16, share(rank=1, size=2)), False),
        (geometry(16, share(rank=2, size=4)), geometry(32, share(rank=1, size=2)), False),
    ],
)
def test_only_equal_blocks_need_no_rearranging(
    source: GroupGeometry, destination: GroupGeometry, alike: bool
) -> None:
    assert GroupMap(source, destination).is_identity == alike


def test_what_cannot_be_mapped_is_refused_by_name() -> None:
    kv, state = geometry(16, share()), GroupGeometry(64, 1000)
    assert difference([kv, state], [geometry(48, share(rank=1, size=2)), state]) is None
    for theirs, why in (
        ([kv], "there are 2 KV groups and 1"),
        ([geometry(24, share()), state], "KV group 0: block_size is 16 and 24"),
        ([geometry(16, share(planes=6)), state], "KV group 0: planes is 4 and 6"),
        ([geometry(16, share(heads=4)), state], "KV group 0: num_kv_heads is 8 and 4"),
        ([kv, GroupGeometry(128, 1000)], "KV group 1: .*must be equal"),
        ([kv, kv], "KV group 1: .*must be equal"),
    ):
        found = difference([kv, state], theirs)
        assert found is not None
        assert re.search(why, found), found
    with pytest.raises(ConfigError, match="is not 4 planes x 16 tokens x 64 bytes"):
        GroupGeometry(16, 4095, share())
