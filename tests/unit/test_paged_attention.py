"""The paged CPU attention and its plan against the obvious reference: odd sizes, windows, mixed spans."""

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from common.engine.attention_plan import SHORT, PagedAttend, Span, plan_group
from common.kv_cache.layout import build_layout
from common.kv_cache.storage import KVStorage
from kernels import reference
from kernels.paged_attention import paged_attention, store_kv

LAYERS = 3


def make_storage(block_size: int, kv_heads: int, head_dim: int, window: int | None, blocks: int) -> KVStorage:
    """One group of LAYERS layers, filled with random numbers, the null block included."""
    layout = build_layout(
        (window,) * LAYERS,
        (),
        block_size=block_size,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype="float32",
    )
    storage = KVStorage(layout, [blocks + 1])
    storage.rows(0).copy_(torch.randn(storage.rows(0).shape))
    return storage


def make_spans(lengths: Sequence[tuple[int, int]], block_size: int, rng: random.Random) -> list[Span]:
    """(start, queries) -> spans over scattered blocks; what a window freed is not modelled here."""
    needed = [-(-(start + count) // block_size) for start, count in lengths]
    ids = list(range(1, sum(needed) + 1))
    rng.shuffle(ids)
    spans = []
    for (start, count), blocks in zip(lengths, needed, strict=True):
        spans.append(Span([[ids.pop() for _ in range(blocks)]], start, start + count))
    return spans


def expected(storage: KVStorage, spans: Sequence[Span], q: Tensor, layer: int) -> Tensor:
    spec = storage.layout.kv_groups[0]
    return reference.paged_attention(
        q,
        storage.rows(0),
        [s.tables[0] for s in spans],
        [range(s.start, s.end) for s in spans],
        block_rows=storage.block_rows(0),
        layer_offset=layer * 2 * spec.block_size,
        block_size=spec.block_size,
        num_kv_heads=spec.num_kv_heads,
        window=spec.window,
    )


def fast(storage: KVStorage, spans: Sequence[Span], q: Tensor, layer: int) -> Tensor:
    spec = storage.layout.kv_groups[0]
    plan = plan_group(spec, storage.block_rows(0), 0, spans)
    return paged_attention(
        q,
        storage.rows(0),
        plan.batches,
        layer * 2 * spec.block_size,
        spec.block_size,
        spec.num_kv_heads,
    )


MIXES: dict[str, list[tuple[int, int]]] = {
    "one query": [(0, 1)],
    "decodes of equal length": [(9, 1), (9, 1)],
    "decodes": [(0, 1), (7, 1), (31, 1), (16, 1)],
    "decodes with drafts": [(5, 5), (33, 3), (16, 1), (0, 2)],
    "one chunk": [(3, SHORT + 9)],
    "chunks": [(0, SHORT + 1), (20, 40)],
    "chunk in the middle": [(12, 1), (0, 37), (29, 5), (8, SHORT)],
}


@pytest.mark.parametrize("window", [None, 1, 3, 17])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("mix", list(MIXES))
def test_equals_the_reference(mix: str, block_size: int, window: int | None) -> None:
    torch.manual_seed(1)
    rng = random.Random(mix)
    heads, kv_heads, head_dim = rng.choice(((4, 2, 8), (3, 3, 5), (6, 1, 7), (1, 1, 16)))
    spans = make_spans(MIXES[mix], block_size, rng)
    storage = make_storage(block_size, kv_heads, head_dim, window, 200)
    q = torch.randn(sum(map(len, spans)), heads, head_dim)
    layer = rng.randrange(LAYERS)
    torch.testing.assert_close(fast(storage, spans, q, layer), expected(storage, spans, q, layer))


def test_queries_need_not_be_contiguous() -> None:
    torch.manual_seed(2)
    rng = random.Random(2)
    for lengths in ([(4, 1), (9, 1)], [(4, 3), (9, 2), (0, 20)]):
        spans = make_spans(lengths, 4, rng)
        storage = make_storage(4, 2, 8, None, 40)
        total = sum(map(len, spans))
        strided = torch.randn(8, total, 4).permute(1, 2, 0)
        assert not strided.is_contiguous()
        close = fast(storage, spans, strided, 1)
        torch.testing.assert_close(close, expected(storage, spans, strided.contiguous(), 1))


def test_many_random_batches() -> None:
    rng = random.Random(3)
    for seed in range(40):
        torch.manual_seed(seed)
        block_size = rng.choice((1, 3, 4, 16))
        window = rng.choice((None, rng.randint(1, 30)))
        lengths = [
            (rng.randint(0, 40), rng.choice((1, 1, 2, 5, 16, 17, 33))) for _ in range(rng.randint(1, 6))
        ]
        spans = make_spans(lengths, block_size, rng)
        storage = make_storage(block_size, 2, 4, window, 600)
        q = torch.randn(sum(map(len, spans)), 4, 4)
        torch.testing.assert_close(fast(storage, spans, q, 2), expected(storage, spans, q, 2))


def test_what_a_window_cannot_see_may_be_null() -> None:
    """Blocks before the first query's window are freed: their entries in the table are never read."""
    torch.manual_seed(4)
    storage = make_storage(4, 2, 8, 6, 40)
    (span,) = make_spans([(21, 5)], 4, random.Random(4))
    q = torch.randn(5, 4, 8)
    full = fast(storage, [span], q, 0)
    freed = Span([[0, 0, 0, 0, *span.tables[0][4:]]], 21, 26)  # positions below 16 = 21 - 6 + 1
    assert torch.equal(fast(storage, [freed], q, 0), full)


def test_store_writes_its_layer_and_nothing_else() -> None:
    storage = make_storage(4, 2, 8, None, 10)
    before = storage.rows(0).clone()
    spec = storage.layout.kv_groups[0]
    spans = make_spans([(3, 4), (0, 2)], 4, random.Random(5))
    plan = plan_group(spec, storage.block_rows(0), 0, spans)
    k, v = torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    store_kv(storage.rows(0), plan.store, 1 * 2 * 4, 4, k, v)
    row = 0
    for span in spans:
        read_k, read_v = storage.read(1, list(span.tables[0]), span.start, span.end)
        assert torch.equal(read_k, k[row : row + len(span)])
        assert torch.equal(read_v, v[row : row + len(span)])
        row += len(span)
    assert int((storage.rows(0) != before).any(1).sum()) == 2 * 6


def test_pads_write_to_the_null_block_only() -> None:
    torch.manual_seed(6)
    storage = make_storage(4, 2, 8, None, 10)
    spans = make_spans([(3, 4)], 4, random.Random(6))
    attend = PagedAttend.over(storage, [0], spans).with_pads(torch.tensor([True, False, True, False]))
    before = [storage.read(0, list(spans[0].tables[0]), p, p + 1)[0].clone() for p in range(3, 7)]
    k = torch.randn(4, 2, 8)
    attend(0, torch.randn(4, 4, 8), k, torch.randn(4, 2, 8))
    for i, p in enumerate(range(3, 7)):
        now = storage.read(0, list(spans[0].tables[0]), p, p + 1)[0]
        assert torch.equal(now, before[i] if i % 2 == 0 else k[i : i + 1])


def test_block_bytes_are_the_rows() -> None:
    storage = make_storage(4, 2, 8, None, 5)
    raw = storage.block_bytes(0)
    assert raw.shape == (6, storage.layout.kv_groups[0].block_bytes)
    raw[2] = 0
    n = storage.block_rows(0)
    assert not storage.rows(0)[2 * n : 3 * n].any()
    assert storage.rows(0)[3 * n : 4 * n].any()
    storage.copy_block(0, 3, 2)
    assert torch.equal(storage.rows(0)[2 * n : 3 * n], storage.rows(0)[3 * n : 4 * n])
