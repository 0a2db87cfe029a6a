"""The memory behind the block pools: one tensor a KV group, block after block.

A block's rows are ordered layer, K before V, token; a row is the KV heads of one token. A block of recurrent
state is one row: see `state_group`. The same bytes are what `kernels` indexes by row and what a KV transfer
moves by block.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.kv_cache.layout import KVLayout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class KVStorage:
    """Zero-filled pools; ``num_blocks[g]`` includes the null block."""

    def __init__(self, layout: KVLayout, num_blocks: list[int]) -> None:
        self.layout = layout
        self._pools: list[Tensor] = []
        for group, count in zip(layout.groups, num_blocks, strict=True):
            shape = (count * group.block_rows, group.row_numbers)
            self._pools.append(torch.zeros(shape, dtype=TORCH_DTYPES[group.dtype]))

    def block_rows(self, group: int) -> int:
        """Rows of one block: layers x (K, V) x tokens; one of state."""
        return self.layout.groups[group].block_rows

    def rows(self, group: int) -> Tensor:
        """[rows, KV * Dh], or [num_blocks, numbers of a state]: what kernels read and write."""
        return self._pools[group]

    def block_bytes(self, group: int) -> npt.NDArray[np.uint8]:
        """[num_blocks, block_bytes], the same memory: what a transfer reads and writes."""
        flat = self._pools[group].view(torch.uint8).view(-1, self.layout.groups[group].block_bytes)
        array: npt.NDArray[np.uint8] = flat.numpy()
        return array

    def copy_block(self, group: int, source: int, destination: int) -> None:
        n = self.block_rows(group)
        rows = self._pools[group]
        rows[destination * n : (destination + 1) * n].copy_(rows[source * n : (source + 1) * n])

    def read(self, layer: int, table: list[int], start: int, end: int) -> tuple[Tensor, Tensor]:
        """K and V [end - start, KV, Dh] of one global layer at positions start .. end-1 of a table."""
        group, index = self.layout.locate(layer)
        spec = self.layout.kv_groups[group]
        size = spec.block_size
        offset = index * 2 * size
        base = [table[p // size] * self.block_rows(group) + p % size + offset for p in range(start, end)]
        k_rows = torch.tensor(base, dtype=torch.long)
        rows = self._pools[group]
        shape = (end - start, spec.num_kv_heads, spec.head_dim)
        return rows[k_rows].view(shape), rows[k_rows + size].view(shape)
