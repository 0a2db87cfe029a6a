"""Recurrences over whole sequences from zero states: for training and for the one-shot oracle.

The counterpart of `DenseAttention`. With `record` it keeps every layer's state at the positions asked for,
which is what the comparison of states recomputes.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.gated_delta import gated_delta
from kernels.short_conv import short_conv


class DenseRecurrence:
    """`record`, when given, receives {(layer, part, p): state after p positions} for every p of `at`; part 0
    is the convolution, part 1 the matrices of a delta net. Each is [B, ...] in fp32."""

    def __init__(
        self, record: dict[tuple[int, int, int], Tensor] | None = None, at: Sequence[int] = ()
    ) -> None:
        self.record = record
        self.at = sorted(set(at))

    def short_conv(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """x [*, T, C] -> [*, T, C]."""
        channels, kernel = weight.shape
        state = torch.zeros(*x.shape[:-2], channels, kernel - 1, device=x.device)
        return self._run(
            layer, 0, x.shape[-2], state, lambda s, piece: short_conv(x[..., piece, :], weight, s)
        )

    def gated_delta(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor
    ) -> Tensor:
        """q, k [*, T, H, Dk], v [*, T, H, Dv], gates [*, T, H] -> [*, T, H, Dv]."""
        state = torch.zeros(*q.shape[:-3], q.shape[-2], q.shape[-1], v.shape[-1], device=q.device)

        def run(state: Tensor, piece: slice) -> tuple[Tensor, Tensor]:
            vectors = [t[..., piece, :, :] for t in (q, k, v)]
            gates = [t[..., piece, :] for t in (log_decay, beta)]
            return gated_delta(vectors[0], vectors[1], vectors[2], gates[0], gates[1], state)

        return self._run(layer, 1, q.shape[-3], state, run)

    def _run(
        self,
        layer: int,
        part: int,
        length: int,
        state: Tensor,
        run: Callable[[Tensor, slice], tuple[Tensor, Tensor]],
    ) -> Tensor:
        """In one piece, or in pieces where states are recorded."""
        parts, start = [], 0
        time_dim = -2 if part == 0 else -3
        for end in (*(p for p in self.at if 0 < p < length), length):
            out, state = run(state, slice(start, end))
            parts.append(out)
            start = end
            if self.record is not None:
                self.record[layer, part, end] = state
        return torch.cat(parts, time_dim)
