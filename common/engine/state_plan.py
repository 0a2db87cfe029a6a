"""The engine's recurrences: states come from blocks, and go back once it is known which drafts were right.

A step reads the state that each request's known positions left, and keeps aside what may have to be stored:
the state at every checkpoint it passes, at its last known position and at each draft's. Nothing is written to
a block before verification, since a state cannot be rewound (02-exactness 3). Every stored state names the
position it stands after; one that does not fit its reader is an error, never a wrong token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from common.kv_cache.storage import KVStorage
from kernels.gated_delta import gated_delta, gated_delta_step
from kernels.short_conv import short_conv, short_conv_step

SHORT = 16  # sequences with at most this many positions run together, one position after the other


@dataclass(frozen=True)
class StateSpan:
    """Positions start .. known_end-1 of known tokens, then drafts up to end-1.

    ``table`` is the state group's.
    """

    table: Sequence[int]
    start: int
    known_end: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start

    def marks(self, interval: int) -> list[int]:
        """Positions after which the state is kept aside, ascending."""
        first = (self.start // interval + 1) * interval
        return [*range(first, self.known_end, interval), *range(self.known_end, self.end + 1)]


@dataclass(frozen=True)
class _Move:
    """One position of all short sequences that have it: ``rows`` of the pass; after it the states of the
    sequences ``kept`` (as sorted) go to the rows ``aside``."""

    rows: Tensor
    kept: list[int]
    aside: list[int]


@dataclass(frozen=True)
class _Stretch:
    """Rows first .. end-1 of one long sequence, and the row that its state goes to."""

    first: int
    end: int
    aside: int


class PagedRecurrence:
    """A pass's `Recur`. ``commit`` it once, after verification."""

    def __init__(self, storage: KVStorage, spans: Sequence[StateSpan]) -> None:
        spec = storage.layout.state_group
        assert spec is not None
        self._spec = spec
        self._spans = spans
        self._rows = storage.rows(len(storage.layout.groups) - 1)
        self._marks = [span.marks(spec.block_size) for span in spans]
        self._initial = self._read()
        num_marks = sum(map(len, self._marks))
        self._aside = torch.empty(num_marks, self._rows.shape[1], device=self._rows.device)
        positions = [position for marks in self._marks for position in marks]
        self._aside.view(torch.int32)[:, 0] = torch.tensor(positions, dtype=torch.int32)
        self._plan()

    def short_conv(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        def many(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return short_conv(x, weight, state)

        def one(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            return short_conv_step(x, weight, state)

        return self._run(layer, 0, many, one, x)

    def gated_delta(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor
    ) -> Tensor:
        def many(
            state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor
        ) -> tuple[Tensor, Tensor]:
            return gated_delta(q, k, v, log_decay, beta, state)

        def one(
            state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor
        ) -> tuple[Tensor, Tensor]:
            return gated_delta_step(q, k, v, log_decay, beta, state)

        return self._run(layer, 1, many, one, q, k, v, log_decay, beta)

    def commit(self, ends: Sequence[int]) -> None:
        """Stores checkpoints passed and the running state; ``ends[i]``: positions of span i that count,
        known ones and accepted drafts."""
        size, at = self._spec.block_size, 0
        sources: list[int] = []
        blocks: list[int] = []
        for span, marks, end in zip(self._spans, self._marks, ends, strict=True):
            for i, position in enumerate(marks):
                if position == end or (position < end and position % size == 0):
                    sources.append(at + i)
                    blocks.append(span.table[(position - 1) // size])
            at += len(marks)
        self._rows[torch.tensor(blocks)] = self._aside[torch.tensor(sources)]

    def _read(self) -> Tensor:
        """[S, numbers]: the state before each span; zeros at position 0, whatever its block held before."""
        size = self._spec.block_size
        blocks = [span.table[(span.start - 1) // size] if span.start else 0 for span in self._spans]
        initial = self._rows[torch.tensor(blocks)]
        for i, span in enumerate(self._spans):
            if span.start == 0:
                initial[i].zero_()
        found = initial.view(torch.int32)[:, 0].tolist()
        for span, block, position in zip(self._spans, blocks, found, strict=True):
            if position != span.start:
                raise AssertionError(
                    f"state block {block} holds the state after {position} positions, the one after "
                    f"{span.start} is needed: it was reused or never written"
                )
        return initial

    def _plan(self) -> None:
        """Which rows run together. Short spans are sorted by length, so that those still going at any
        position are the first ones."""
        firsts, asides = _starts([len(s) for s in self._spans]), _starts([len(m) for m in self._marks])
        short = [i for i, span in enumerate(self._spans) if len(span) <= SHORT]
        self._order = sorted(short, key=lambda i: -len(self._spans[i]))
        self._moves: list[_Move] = []
        for step in range(len(self._spans[self._order[0]]) if self._order else 0):
            going = [i for i in self._order if len(self._spans[i]) > step]
            kept, aside = [], []
            for place, i in enumerate(going):
                position = self._spans[i].start + step + 1
                if position in self._marks[i]:
                    kept.append(place)
                    aside.append(asides[i] + self._marks[i].index(position))
            self._moves.append(_Move(torch.tensor([firsts[i] + step for i in going]), kept, aside))
        self._stretches: dict[int, list[_Stretch]] = {}
        for i, span in enumerate(self._spans):
            if len(span) > SHORT:
                bounds = [firsts[i] + p - span.start for p in (span.start, *self._marks[i])]
                self._stretches[i] = [
                    _Stretch(a, b, asides[i] + j) for j, (a, b) in enumerate(pairwise(bounds))
                ]

    def _run(
        self,
        layer: int,
        part: int,
        many: Callable[..., tuple[Tensor, Tensor]],
        one: Callable[..., tuple[Tensor, Tensor]],
        *inputs: Tensor,
    ) -> Tensor:
        """One part of one layer's state through all positions of the pass."""
        place = self._spec.slices[layer][part]
        shape = self._spec.shapes[layer][part]
        aside, parts = self._aside[:, place], []
        rows: list[Tensor] = []
        if self._order:
            state = self._initial[self._order, place].view(-1, *shape)
            for move in self._moves:
                going = move.rows.shape[0]
                out, state = one(state[:going], *(t[move.rows] for t in inputs))
                parts.append(out)
                rows.append(move.rows)
                if move.kept:
                    aside[move.aside] = state[move.kept].flatten(1)
        for i, stretches in self._stretches.items():
            state = self._initial[i, place].view(shape)
            for s in stretches:
                out, state = many(state, *(t[s.first : s.end] for t in inputs))
                parts.append(out)
                rows.append(torch.arange(s.first, s.end))
                aside[s.aside] = state.flatten()
        joined = torch.cat(parts)
        result = torch.empty_like(joined)
        result[torch.cat(rows)] = joined
        return result


def _starts(lengths: Sequence[int]) -> list[int]:
    """Where each of them begins when they lie one after the other."""
    starts, at = [], 0
    for length in lengths:
        starts.append(at)
        at += length
    return starts
