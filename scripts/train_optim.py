"""The optimiser of all training here: Muon for the matrices of decoder blocks, AdamW for the rest.

Muon replaces a matrix's momentum by the nearest (semi-)orthogonal matrix, found by Newton-Schulz iteration;
matrices of one shape are iterated together, which is most of its speed on a CPU. Fused matrices (q/k/v,
gate/up) are treated as the matrices they are made of. The learning rate is constant, then falls linearly.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from common.model.transformer import DecoderBlock

FLOOR = 0.03  # of the peak learning rate, at the end
_A, _B, _C = 3.4445, -4.7750, 2.0315  # Newton-Schulz coefficients of the published Muon


def learning_rate(peak: float, step: int, progress: float, constant: float, warmup_steps: int = 60) -> float:
    """Linear warm-up, `peak` until `progress` reaches `constant` (both 0..1), then down to FLOOR at 1."""
    left = 1.0 if progress < constant else (1 - progress) / (1 - constant) * (1 - FLOOR) + FLOOR
    return peak * min(1.0, (step + 1) / warmup_steps) * left


@torch.no_grad()
def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """[n, rows, columns] with rows <= columns -> the same with singular values near one."""
    x: Tensor = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * (gram @ gram)) @ x
    return x


def block_matrices(blocks: Iterable[DecoderBlock]) -> Iterator[tuple[nn.Parameter, list[int]]]:
    """(matrix, rows of each of the matrices it is made of) for all of a block's weights."""
    for block in blocks:
        q, kv = block.num_heads * block.head_dim, block.num_kv_heads * block.head_dim
        yield block.qkv_weight, [q, kv, kv]
        yield block.o_weight, [block.o_weight.shape[0]]
        yield block.gate_up_weight, [block.gate_up_weight.shape[0] // 2] * 2
        yield block.down_weight, [block.down_weight.shape[0]]


class Muon:
    """Nesterov momentum, orthogonalised, scaled so that an update has about the size AdamW's would have."""

    def __init__(
        self,
        matrices: Iterable[tuple[nn.Parameter, list[int]]],
        weight_decay: float,
        momentum: float = 0.95,
    ) -> None:
        self.weight_decay, self.momentum = weight_decay, momentum
        self.matrices = list(matrices)
        self.buffers = [torch.zeros_like(parameter) for parameter, _ in self.matrices]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update from the gradients in hand."""
        by_shape: dict[tuple[int, ...], list[tuple[Tensor, Tensor, bool]]] = {}
        for (parameter, rows), buffer in zip(self.matrices, self.buffers, strict=True):
            if parameter.grad is None:
                continue
            buffer.mul_(self.momentum).add_(parameter.grad)
            update = parameter.grad.add(buffer, alpha=self.momentum)
            for target, part in zip(torch.split(parameter, rows), torch.split(update, rows), strict=True):
                tall = part.shape[0] > part.shape[1]
                flat = part.T if tall else part
                by_shape.setdefault(tuple(flat.shape), []).append((target, flat, tall))
        for shape, group in by_shape.items():
            scale = lr * 0.2 * math.sqrt(max(shape))
            for (target, _, tall), o in zip(
                group, orthogonalise(torch.stack([f for _, f, _ in group])), strict=True
            ):
                target.mul_(1 - lr * self.weight_decay).sub_(o.T if tall else o, alpha=scale)


class Optimiser:
    """Muon for `matrices`, AdamW (without decay) for every other parameter in `parameters`."""

    def __init__(
        self,
        matrices: Iterable[tuple[nn.Parameter, list[int]]],
        parameters: Iterable[nn.Parameter],
        weight_decay: float,
    ) -> None:
        self.muon = Muon(matrices, weight_decay)
        owned = {id(parameter) for parameter, _ in self.muon.matrices}
        self.parameters = list(parameters)
        rest = [p for p in self.parameters if id(p) not in owned]
        self.adamw = torch.optim.AdamW(rest, lr=1.0, betas=(0.9, 0.95), weight_decay=0.0)

    def step(self, lr: float, adamw_scale: float = 1.0) -> None:
        """Clips the gradient to norm 1, updates, clears it. `adamw_scale` multiplies AdamW's rate."""
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        for group in self.adamw.param_groups:
            group["lr"] = lr * adamw_scale
        self.muon.step(lr)
        self.adamw.step()
        for parameter in self.parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {"muon": self.muon.buffers, "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of `state_dict` for the same parameters in the same order."""
        for buffer, saved in zip(self.muon.buffers, state["muon"], strict=True):
            buffer.copy_(saved)
        self.adamw.load_state_dict(state["adamw"])
