"""Are the recurrent state of a request and its checkpoints what one uninterrupted run would hold?"""

from collections.abc import Sequence

import torch

from common.kv_cache.layout import NULL_BLOCK
from common.kv_cache.storage import KVStorage
from common.model.dense_attention import DenseAttention
from common.model.dense_recurrence import DenseRecurrence
from common.model.transformer import Transformer


@torch.inference_mode()
def state_max_diff(
    trunk: Transformer,
    storage: KVStorage,
    token_ids: Sequence[int],
    num_computed: int,
    tables: Sequence[Sequence[int]],
) -> float:
    """Largest |stored - one pass| over the running state and all checkpoints of a request that is paused or
    held; 0 for a model without recurrent layers.

    A request that ended inside an accepted run has no running state for ``num_computed``: that is left out.
    """
    spec = storage.layout.state_group
    if spec is None or not tables:
        return 0.0
    rows, positions = storage.rows(len(storage.layout.groups) - 1), {}
    for i, block in enumerate(tables[-1]):
        position = min((i + 1) * spec.block_size, num_computed)
        if block == NULL_BLOCK or position <= i * spec.block_size:
            continue  # given back, or not reached yet
        found = int(rows[block].view(torch.int32)[0])
        if found > position == num_computed:
            continue
        assert found == position, f"block {i} holds the state after {found} positions, not {position}"
        positions[position] = block
    if not positions:
        return 0.0
    record: dict[tuple[int, int, int], torch.Tensor] = {}
    end = max(positions)
    dense = DenseAttention(trunk.config.layer_windows)
    trunk(
        torch.tensor([list(token_ids[:end])]),
        torch.arange(end)[None],
        dense,
        DenseRecurrence(record, list(positions)),
    )
    worst = 0.0
    for (layer, part, position), state in record.items():
        if position in positions:
            stored = rows[positions[position], spec.slices[layer][part]]
            worst = max(worst, float((stored - state.flatten()).abs().max()))
    return worst
