"""Carries out a ScheduledBatch: copies blocks, runs the trunk, verifies drafts, runs the speculator.

Everything a request owns in tensors (carry, draft distribution) lives here by request id and goes when
the scheduler says `forgotten`.
"""

from collections.abc import Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from common.engine.attention_plan import PagedAttend, Span
from common.engine.batch import RequestOutput, RunnerOutput, ScheduledBatch, ScheduledRequest
from common.engine.counter_rng import request_key
from common.engine.drafter import Drafter, Drafts, Verified
from common.engine.sampler import (
    DraftDistribution,
    process_logits,
    token_logprobs,
    verify_greedy,
    verify_seeded,
    verify_unseeded,
)
from common.engine.state_plan import PagedRecurrence, StateSpan
from common.kv_cache.storage import KVStorage
from common.model.transformer import Transformer
from common.request import TokenLogprob


class ModelRunner:
    """The real one. ``speculator`` None: no drafts."""

    def __init__(
        self,
        trunk: Transformer,
        storage: KVStorage,
        speculator: Drafter | None,
        eos_token_ids: Collection[int],
    ) -> None:
        self.trunk = trunk
        self.storage = storage
        self.speculator = speculator
        self._eos = tuple(eos_token_ids)
        self._draft_distributions: dict[str, DraftDistribution] = {}
        self._trunk_groups = storage.layout.trunk_groups

    @torch.inference_mode()
    def run(self, batch: ScheduledBatch) -> RunnerOutput:
        for request_id in batch.forgotten:
            self._draft_distributions.pop(request_id, None)
            if self.speculator is not None:
                self.speculator.forget(request_id)
        for copy in batch.copies:
            self.storage.copy_block(copy.group, copy.source, copy.destination)
        if not batch.entries:
            return RunnerOutput(())
        recurrence = self._recurrence(batch.entries)
        hidden = self._trunk_pass(batch.entries, recurrence)
        parts = torch.split(hidden, [e.end - e.start for e in batch.entries])
        logits = self._sampled_logits(batch.entries, parts)
        verified = self._verify(batch.entries, logits)
        if recurrence is not None:
            ends = [
                e.start + e.num_new + v.num_accepted for e, v in zip(batch.entries, verified, strict=True)
            ]
            recurrence.commit(ends)
        drafts = [Drafts() for _ in batch.entries]
        if self.speculator is not None:
            drafts = self.speculator.run(batch.entries, verified, parts)
            self._keep_distributions(batch.entries, drafts)
        return RunnerOutput(
            tuple(
                RequestOutput(v.tokens, v.num_accepted, tuple(d.ids), _logprobs(e, v, rows))
                for e, v, d, rows in zip(batch.entries, verified, drafts, logits, strict=True)
            )
        )

    def carry_rows(self, request_id: str, at_most: int | None = None) -> bytes | None:
        return None if self.speculator is None else self.speculator.carry_rows(request_id, at_most)

    def _recurrence(self, entries: Sequence[ScheduledRequest]) -> PagedRecurrence | None:
        """What recurrent layers need, None for a model without."""
        if self.storage.layout.state_group is None:
            return None
        spans = [StateSpan(e.tables[-1], e.start, e.start + e.num_new, e.end) for e in entries]
        return PagedRecurrence(self.storage, spans)

    def _trunk_pass(self, entries: Sequence[ScheduledRequest], recur: PagedRecurrence | None) -> Tensor:
        """Hidden states [T, D] of all positions of the step, entry after entry."""
        spans = [Span(e.tables, e.start, e.end) for e in entries]
        ids: list[int] = []
        for e in entries:
            ids += e.known[e.start : e.start + e.num_new]
            # An invalid draft is a rejection: it must reach no kernel, and its slot is rewritten later.
            ids += [d if 0 <= d < self.trunk.config.vocab_size else 0 for d in e.drafts]
        positions = torch.from_numpy(np.concatenate([np.arange(s.start, s.end) for s in spans]))
        attend = PagedAttend.over(self.storage, self._trunk_groups, spans)
        hidden: Tensor = self.trunk(torch.tensor(ids), positions, attend, recur)
        return hidden

    def _sampled_logits(
        self, entries: Sequence[ScheduledRequest], parts: Sequence[Tensor]
    ) -> list[Tensor | None]:
        """Logits [n+1, V] of the rows that predict tokens T+1 .. T+n+1, None where nothing is sampled."""
        rows = [p[e.num_new - 1 :] for e, p in zip(entries, parts, strict=True) if e.samples]
        if not rows:
            return [None] * len(entries)
        split = iter(torch.split(self.trunk.logits(torch.cat(rows)), [r.shape[0] for r in rows]))
        return [next(split) if e.samples else None for e in entries]

    def _verify(self, entries: Sequence[ScheduledRequest], logits: Sequence[Tensor | None]) -> list[Verified]:
        verified = []
        for entry, rows in zip(entries, logits, strict=True):
            tokens = () if rows is None else self._verify_one(entry, rows)
            verified.append(Verified(tokens, max(0, len(tokens) - 1)))
        return verified

    def _verify_one(self, entry: ScheduledRequest, rows: Tensor) -> tuple[int, ...]:
        sampling = entry.sampling
        log_p = process_logits(rows, sampling, entry.known, entry.num_prompt, entry.drafts, self._eos)
        if sampling.greedy:
            return verify_greedy(log_p.argmax(-1).tolist(), entry.drafts)
        key = request_key(entry.request_id, sampling.seed)
        first = len(entry.known)
        if sampling.seed is not None:
            return verify_seeded(log_p, entry.drafts, key, first)
        q = self._draft_distributions.get(entry.request_id)
        return verify_unseeded(log_p, entry.drafts, q, key, first)

    def _keep_distributions(self, entries: Sequence[ScheduledRequest], drafts: Sequence[Drafts]) -> None:
        assert self.speculator is not None
        for entry, drafted in zip(entries, drafts, strict=True):
            q = self.speculator.distribution(drafted)
            if q is not None:
                self._draft_distributions[entry.request_id] = q


def _logprobs(
    entry: ScheduledRequest, verified: Verified, rows: Tensor | None
) -> tuple[TokenLogprob, ...] | None:
    if rows is None or entry.sampling.logprobs is None:
        return None
    return token_logprobs(rows, verified.tokens, entry.sampling.logprobs)
