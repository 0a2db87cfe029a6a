"""The gated delta rule: a matrix-valued memory that forgets, and overwrites what it held under a key.

    S_t = a_t (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T            o_t = S_t^T q_t

(Gated Delta Networks, Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464.) `gated_delta_step` is that
formula. `gated_delta` runs a stretch in chunks: within a chunk the writes u_t = b_t (v_t - a_t S_{t-1}^T k_t)
solve one unit-triangular system (Yang et al. 2024, arXiv:2406.06484), and only the chunk's last state is
formed. The state is S and cannot be rewound; everything is computed in its dtype, fp32. Decays are given as
log a_t <= 0.
"""

import torch
from torch import Tensor

CHUNK = 64


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """q, k [*, T, H, Dk], v [*, T, H, Dv], log_decay and beta [*, T, H], state fp32 [*, H, Dk, Dv] ->
    o [*, T, H, Dv] and the state after position T-1."""
    dtype = v.dtype
    heads_first = [t.to(state.dtype).transpose(-3, -2) for t in (q, k, v)]  # [*, H, T, D]
    gates = [t.to(state.dtype).transpose(-2, -1) for t in (log_decay, beta)]  # [*, H, T]
    parts = []
    for start in range(0, v.shape[-3], chunk):
        piece = slice(start, start + chunk)
        q_c, k_c, v_c = (t[..., piece, :] for t in heads_first)
        log_c, beta_c = (t[..., piece] for t in gates)
        out, state = _chunk(q_c, k_c, v_c, log_c, beta_c, state)
        parts.append(out)
    return torch.cat(parts, -2).transpose(-3, -2).to(dtype), state


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One chunk, heads first: q, k [*, H, c, Dk], v [*, H, c, Dv], gates [*, H, c], state [*, H, Dk, Dv]."""
    total = log_decay.cumsum(-1)  # log of the decay from the chunk's start to after each position
    since = total.exp()[..., None]
    later = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=q.device).triu(1)
    between = total[..., :, None] - total[..., None, :]  # decay from position j (column) to i (row)
    between = between.masked_fill(later, -torch.inf).exp()
    overlap = (k @ k.transpose(-1, -2) * between * beta[..., None]).tril(-1)
    wanted = beta[..., None] * (v - since * (k @ state))
    writes = torch.linalg.solve_triangular(overlap, wanted, upper=False, unitriangular=True)
    out = since * (q @ state) + (q @ k.transpose(-1, -2) * between) @ writes
    to_end = (total[..., -1:] - total).exp()[..., None]
    return out, since[..., -1:, :] * state + (to_end * k).transpose(-1, -2) @ writes


def gated_delta_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One position of S sequences: q, k [S, H, Dk], v [S, H, Dv], log_decay and beta [S, H], state fp32
    [S, H, Dk, Dv] -> o [S, H, Dv] and the next states."""
    dtype = v.dtype
    q, k, v = (t.to(state.dtype) for t in (q, k, v))
    state = state * log_decay.to(state.dtype).exp()[..., None, None]
    held = (k[..., None, :] @ state).squeeze(-2)
    write = beta.to(state.dtype)[..., None] * (v - held)
    state = state + k[..., :, None] * write[..., None, :]
    return (q[..., None, :] @ state).squeeze(-2).to(dtype), state
