"""From block tables to what the attention kernels index: made once a pass, used by every layer of a group."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.kv_cache.layout import KVGroupSpec
from common.kv_cache.storage import KVStorage
from kernels.paged_attention import QueryBatch, paged_attention, store_kv

SHORT = 16  # sequences with at most this many queries are padded into one batch


@dataclass(frozen=True)
class Span:
    """Queries of one sequence in a pass: positions start .. end-1."""

    tables: Sequence[Sequence[int]]
    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class GroupPlan:
    """store [T]: base row of every query's own slot. The rest is `paged_attention`'s."""

    store: Tensor
    batches: tuple[QueryBatch, ...]


def plan_group(spec: KVGroupSpec, block_rows: int, group: int, spans: Sequence[Span]) -> GroupPlan:
    """Plans one group; the rows of a pass are the spans' queries, one span after the other."""
    tables = [np.asarray(span.tables[group], dtype=np.int64) for span in spans]
    stores = [
        _base_rows(table, np.arange(span.start, span.end), spec, block_rows)
        for table, span in zip(tables, spans, strict=True)
    ]
    store = torch.from_numpy(np.concatenate(stores))
    firsts = np.cumsum([0, *(len(span) for span in spans)])
    short = [i for i, span in enumerate(spans) if len(span) <= SHORT]
    pieces = [short] if short else []
    pieces += [[i] for i, span in enumerate(spans) if len(span) > SHORT]
    whole = len(pieces) == 1
    batches = tuple(
        _query_batch(
            spec, block_rows, [tables[i] for i in piece], [spans[i] for i in piece], firsts[piece], whole
        )
        for piece in pieces
    )
    return GroupPlan(store, batches)


def _base_rows(table: np.ndarray, positions: np.ndarray, spec: KVGroupSpec, block_rows: int) -> np.ndarray:
    blocks, offsets = np.divmod(positions, spec.block_size)
    return np.asarray(table[blocks] * block_rows + offsets)


def _query_batch(
    spec: KVGroupSpec,
    block_rows: int,
    tables: Sequence[np.ndarray],
    spans: Sequence[Span],
    firsts: np.ndarray,
    whole: bool,
) -> QueryBatch:
    """``firsts``: row of each span's first query. ``whole``: these spans are all rows of the pass."""
    window = spec.window
    starts = np.array([span.start for span in spans])
    lengths = np.array([len(span) for span in spans])
    low = np.zeros_like(starts) if window is None else np.maximum(0, starts - window + 1)
    num_keys = starts + lengths - low
    longest, most = int(lengths.max()), int(num_keys.max())
    keys = np.zeros((len(spans), most), dtype=np.int64)
    for i, table in enumerate(tables):
        keys[i, : num_keys[i]] = _base_rows(table, np.arange(low[i], low[i] + num_keys[i]), spec, block_rows)
    query = starts[:, None] + np.arange(longest)[None]  # [S, Lq] positions
    query = np.minimum(query, (starts + lengths - 1)[:, None])  # padding repeats the last query
    key = low[:, None] + np.arange(most)[None]  # [S, M] positions
    mask = None
    if longest > 1 or (num_keys != most).any():
        sees = key[:, None, :] <= query[:, :, None]
        if window is not None:
            sees &= key[:, None, :] > query[:, :, None] - window
        mask = torch.from_numpy(sees[:, None])
    padded = bool((lengths != longest).any())
    rows = valid = None
    if padded or not whole:
        row = firsts[:, None] + np.minimum(np.arange(longest)[None], (lengths - 1)[:, None])
        rows = torch.from_numpy(row.astype(np.int64))
        if padded:
            valid = torch.from_numpy(np.arange(longest)[None] < lengths[:, None])
    return QueryBatch(len(spans), longest, rows, valid, torch.from_numpy(keys), mask)


class PagedAttend:
    """The engine's `Attend`: writes the pass's KV, then attends over the pages.

    ``store`` in `with_store` replaces the slots written to: MTP modules re-run slots that must not change.
    """

    def __init__(self, storage: KVStorage, plans: dict[int, GroupPlan]) -> None:
        self._storage = storage
        self._plans = plans

    @classmethod
    def over(cls, storage: KVStorage, groups: Sequence[int], spans: Sequence[Span]) -> "PagedAttend":
        layout = storage.layout
        return cls(
            storage,
            {g: plan_group(layout.kv_groups[g], storage.block_rows(g), g, spans) for g in groups},
        )

    def with_pads(self, pads: Tensor) -> "PagedAttend":
        """The same pass, but tokens where ``pads`` [T] is true write to the null block."""
        offsets = torch.arange(pads.shape[0])
        plans = {
            g: GroupPlan(
                torch.where(pads, offsets % self._storage.layout.groups[g].block_size, plan.store),
                plan.batches,
            )
            for g, plan in self._plans.items()
        }
        return PagedAttend(self._storage, plans)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group, index = self._storage.layout.locate(layer)
        spec, plan = self._storage.layout.kv_groups[group], self._plans[group]
        offset = index * 2 * spec.block_size
        rows = self._storage.rows(group)
        store_kv(rows, plan.store, offset, spec.block_size, k, v)
        return paged_attention(q, rows, plan.batches, offset, spec.block_size, spec.num_kv_heads)
