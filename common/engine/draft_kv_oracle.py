"""The main oracle: is the drafter's KV what one uninterrupted run would hold?

Every module's KV is recomputed in a single dense pass over the known tokens and compared with the pool at
all exact slots: module m at p with p + m + 1 <= T (02-exactness 6). fp32: below 1e-4.
"""

from collections.abc import Sequence

import torch

from common.kv_cache.layout import NULL_BLOCK
from common.kv_cache.storage import KVStorage
from common.model.dense_attention import DenseAttention
from common.model.dense_recurrence import DenseRecurrence
from common.model.mtp import MtpModules
from common.model.transformer import Transformer


@torch.inference_mode()
def draft_kv_max_diff(
    trunk: Transformer,
    modules: MtpModules,
    num_modules: int,
    storage: KVStorage,
    token_ids: Sequence[int],
    num_computed: int,
    tables: Sequence[Sequence[int]],
) -> float:
    """Largest |pool - one pass| over K and V of all exact slots of a request that is paused or held."""
    known = torch.tensor([list(token_ids)])
    last = len(token_ids) - 1  # T
    windows = (*trunk.config.layer_windows, *modules.config.windows)
    record: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    dense = DenseAttention(windows, record)
    positions = torch.arange(last + 1)[None]
    hidden = trunk(known, positions, dense, DenseRecurrence())
    worst = 0.0
    for m in range(num_modules):
        end = min(last - m, num_computed)  # exact slots: p <= T - m - 1
        if last - m < 1:
            break
        # Row p of module m reads token p+m+1; rows whose token is unknown are no longer there.
        hidden = modules.forward_module(
            m, hidden[:, : last - m], known[:, m + 1 :], positions[:, : last - m], dense
        )
        layer = trunk.config.num_layers + m
        k, v = record[layer]
        first = _first_present(storage, layer, tables)
        if end <= first:
            continue
        group, _ = storage.layout.locate(layer)
        pool_k, pool_v = storage.read(layer, list(tables[group]), first, end)
        for ours, theirs in ((pool_k, k), (pool_v, v)):
            worst = max(worst, float((ours.float() - theirs[0, first:end].float()).abs().max()))
    return worst


def _first_present(storage: KVStorage, layer: int, tables: Sequence[Sequence[int]]) -> int:
    """First position whose block was not freed by its window."""
    group, _ = storage.layout.locate(layer)
    freed = sum(1 for block in tables[group] if block == NULL_BLOCK)
    return freed * storage.layout.kv_groups[group].block_size
