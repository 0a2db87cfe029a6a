"""One MTP module applied N times: it drafts token T+1 as usual, then goes on from its own output.

Its lookahead is 1. Slots at p >= T come from its own output; the next step rewrites them from the trunk,
since it runs the module over all positions from T on, so nothing provisional is ever read as exact.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from common.engine.attention_plan import PagedAttend, Span
from common.engine.batch import ScheduledRequest
from common.engine.drafter import Choice, Drafts, Verified
from common.engine.speculation import recursive_module
from common.engine.speculator import MtpSpeculator, Rows
from common.kv_cache.storage import KVStorage
from common.model.mtp import MtpModules


class RecursiveSpeculator(MtpSpeculator):
    """``num_drafts`` from module 0 of ``modules``."""

    def __init__(
        self, modules: MtpModules, num_drafts: int, storage: KVStorage, choose: Choice | None = None
    ) -> None:
        super().__init__(modules, 1, storage, choose)
        self.speculation = recursive_module(num_drafts)

    def run(
        self, entries: Sequence[ScheduledRequest], verified: Sequence[Verified], hidden: Sequence[Tensor]
    ) -> list[Drafts]:
        drafts, rows, state = self.run_modules(entries, verified, hidden)
        drafting = [i for i, e in enumerate(entries) if e.samples]
        for depth in range(1, self.speculation.num_drafts):
            going = [k for k, i in enumerate(drafting) if self._has_slot(entries[i], rows[i], depth)]
            drafting, state = [drafting[k] for k in going], state[going]
            if not drafting:
                break
            state = self._go_on(depth, entries, rows, drafting, state, drafts)
        return drafts

    def _go_on(
        self,
        depth: int,
        entries: Sequence[ScheduledRequest],
        rows: Sequence[Rows],
        drafting: Sequence[int],
        state: Tensor,
        drafts: list[Drafts],
    ) -> Tensor:
        """One more application, at position T-1+depth of every drafting entry; its output [S, D]."""
        starts = [rows[i].last_known - 1 + depth for i in drafting]
        spans = [Span(entries[i].tables, p, p + 1) for i, p in zip(drafting, starts, strict=True)]
        attend = PagedAttend.over(self._storage, self._module_groups, spans)
        ids = torch.tensor([drafts[i].ids[depth - 1] for i in drafting])
        valid = ids.clamp(0, self._modules.trunk.config.vocab_size - 1)  # a scripted draft may be nonsense
        positions = torch.from_numpy(np.array(starts, dtype=np.int64))
        state = self._modules.forward_module(0, state, valid, positions, attend)
        self.draw(depth, entries, rows, drafting, self._modules.draft_logits(0, state), drafts)
        return state

    def _has_slot(self, entry: ScheduledRequest, rows: Rows, depth: int) -> bool:
        """Near the end of the longest sequence there are fewer slots than drafts: drafts are cut."""
        size = self._storage.layout.block_size
        covered = min(len(entry.tables[g]) for g in self._module_groups) * size
        return rows.last_known - 1 + depth < covered
