"""Runs the N MTP modules after a trunk step: fills their KV exactly and proposes the next drafts.

Rules and words are those of 02-exactness 1. For a request whose step computed positions q.. with T0 the
last known token before it, a accepted drafts and T the last known token now, the modules run over rows
F .. T-1 (mid-prefill: .. e-1), F = max(0, min(q, K+1-N)), K = T0 + a. Rows below q come from the carry.
Slots that are exact already, and slots that read a token nobody knows, are not written.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.engine.attention_plan import PagedAttend, Span
from common.engine.batch import ScheduledRequest
from common.engine.counter_rng import request_key
from common.engine.drafter import Choice, Drafts, Verified
from common.engine.sampler import DraftDistribution, draw_draft, truncated_log_probs
from common.engine.speculation import Speculation, multi_module
from common.kv_cache.storage import KVStorage
from common.model.mtp import MtpModules


@dataclass(frozen=True)
class Rows:
    """The drafter's rows of one entry in a step: positions first .. end-1.

    ``exact_upto`` is K, ``last_known`` T.
    """

    first: int
    end: int
    start: int  # q
    exact_upto: int
    last_known: int
    hidden: Tensor  # [end - first, D], what module 0 reads
    next_ids: np.ndarray  # token of position first+1+i at i; unknown ones 0 until drafted


class MtpSpeculator:
    """Stateless but for the carry: the trunk's hidden rows of positions max(0, T-N+1)..T-1 by request."""

    def __init__(
        self, modules: MtpModules, num_modules: int, storage: KVStorage, choose: Choice | None = None
    ) -> None:
        self.speculation: Speculation = multi_module(num_modules)
        self._choose = choose
        self._modules = modules
        self._storage = storage
        self.num_modules = num_modules
        self._carry: dict[str, Tensor] = {}
        first_layer = storage.layout.num_layers
        self._module_groups = sorted({storage.layout.locate(first_layer + m)[0] for m in range(num_modules)})

    def forget(self, request_id: str) -> None:
        self._carry.pop(request_id, None)

    def carry_rows(self, request_id: str, at_most: int | None = None) -> bytes | None:
        """The last carry rows as bytes: what a hand-over ships (None for N <= 1, where none is missing)."""
        carry = self._carry.get(request_id)
        if carry is None or carry.shape[0] == 0:
            return None
        rows = carry if at_most is None else carry[-at_most:]
        return bytes(rows.contiguous().view(torch.uint8).numpy().tobytes())

    def run(
        self, entries: Sequence[ScheduledRequest], verified: Sequence[Verified], hidden: Sequence[Tensor]
    ) -> list[Drafts]:
        return self.run_modules(entries, verified, hidden)[0]

    def run_modules(
        self, entries: Sequence[ScheduledRequest], verified: Sequence[Verified], hidden: Sequence[Tensor]
    ) -> tuple[list[Drafts], list[Rows], Tensor]:
        """The pass itself: (drafts, rows, last module's output [D] of every entry that samples)."""
        rows = [self.rows(e, v, h) for e, v, h in zip(entries, verified, hidden, strict=True)]
        spans = [Span(e.tables, r.first, r.end) for e, r in zip(entries, rows, strict=True)]
        attend = PagedAttend.over(self._storage, self._module_groups, spans)
        positions = torch.from_numpy(np.concatenate([np.arange(s.start, s.end) for s in spans]))
        last = np.cumsum([len(s) for s in spans]) - 1
        drafting = [i for i, e in enumerate(entries) if e.samples]
        last_rows = torch.from_numpy(last[drafting])
        state = torch.cat([r.hidden for r in rows])
        drafts = [Drafts() for _ in entries]
        for m in range(self.num_modules):
            ids = torch.from_numpy(
                np.concatenate([r.next_ids[m : m + len(s)] for r, s in zip(rows, spans, strict=True)])
            )
            pads = np.concatenate([self.pads(r, m, e.samples) for r, e in zip(rows, entries, strict=True)])
            paged = attend.with_pads(torch.from_numpy(pads)) if pads.any() else attend
            state = self._modules.forward_module(m, state, ids, positions, paged)
            if drafting:
                logits = self._modules.draft_logits(m, state[last_rows])
                self.draw(m, entries, rows, drafting, logits, drafts)
        return drafts, rows, state[last_rows]

    def first_row(self, entry: ScheduledRequest, exact_upto: int) -> int:
        """F: re-prefill starts here. Slots below it are exact, whatever was accepted (02-exactness 1)."""
        return max(0, min(entry.start, exact_upto + 1 - self.num_modules))

    def pads(self, rows: Rows, m: int, samples: bool) -> np.ndarray:
        """True where module m must not write: exact already, or reading a token nobody knows yet."""
        positions = np.arange(rows.first, rows.end)
        reads = positions + m + 1
        pads = (positions < rows.start) & (reads <= rows.exact_upto)
        if not samples:
            pads |= reads > rows.last_known
        return pads

    def has_carry(self, request_id: str) -> bool:
        """Whether the request has been through a step here."""
        return request_id in self._carry

    def rows(self, entry: ScheduledRequest, verified: Verified, hidden: Tensor) -> Rows:
        n, q = self.num_modules, entry.start
        before = len(entry.known) - 1  # T0
        exact_upto = before + verified.num_accepted  # K
        last_known = before + len(verified.tokens)  # T
        end = q + entry.num_new + verified.num_accepted
        first = self.first_row(entry, exact_upto)
        carry = self._take_carry(entry, hidden)
        kept = hidden[: end - q]
        if q - first > carry.shape[0]:
            raise AssertionError(f"{entry.request_id}: {q - first} carry rows wanted, {carry.shape[0]} there")
        joined = torch.cat((carry, kept)) if carry.shape[0] else kept
        if n > 1:
            self._carry[entry.request_id] = joined[-(n - 1) :].clone()
        needed = end - first
        tokens = [*entry.known[first + 1 : end + n], *verified.tokens][: last_known - first]
        next_ids = np.zeros(needed + n, dtype=np.int64)
        next_ids[: min(len(tokens), needed + n)] = tokens[: needed + n]
        return Rows(first, end, q, exact_upto, last_known, joined[-needed:], next_ids)

    def _take_carry(self, entry: ScheduledRequest, hidden: Tensor) -> Tensor:
        if entry.handover_carry is not None:
            flat = torch.frombuffer(bytearray(entry.handover_carry), dtype=torch.uint8)
            return flat.view(hidden.dtype).view(-1, hidden.shape[-1])
        carry = self._carry.get(entry.request_id)
        return hidden[:0] if carry is None else carry

    def draw(
        self,
        m: int,
        entries: Sequence[ScheduledRequest],
        rows: Sequence[Rows],
        drafting: Sequence[int],
        logits: Tensor,
        drafts: list[Drafts],
    ) -> None:
        """Draft m+1 (token T+m+1) of every drafting entry, put where the later modules read it."""
        best = logits.argmax(-1)
        ids = self._modules.draft_ids(best).tolist()
        for row, i in enumerate(drafting):
            sampling = entries[i].sampling
            token = ids[row]
            position = rows[i].last_known + m + 1
            if not sampling.greedy:
                log_q = truncated_log_probs(logits[row].float() / sampling.temperature, sampling)
                key = request_key(entries[i].request_id, sampling.seed)
                vocab = self._modules.trunk.config.vocab_size
                index = draw_draft(log_q, self._modules.draft_vocab, sampling, key, position, vocab)
                token = int(self._modules.draft_ids(torch.tensor(index)))
                drafts[i].log_q.append(log_q)
            if self._choose is not None:
                token = self._choose(entries[i].request_id, position, token)
            drafts[i].ids.append(token)
            if m < self.num_modules:
                rows[i].next_ids[position - rows[i].first - 1] = token

    def distribution(self, drafts: Drafts) -> DraftDistribution | None:
        """What a sampled request's drafts were drawn from, for the next verification."""
        if not drafts.log_q:
            return None
        return DraftDistribution(torch.stack(drafts.log_q), self._modules.draft_vocab)
