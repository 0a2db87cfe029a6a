"""The gate of a SwiGLU layer."""

import torch.nn.functional as F
from torch import Tensor


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [*, 2I] = (gate, up) side by side -> [*, I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up
