"""Short convolution and gated delta rule: formula, chunked form and steps agree, wherever they are cut."""

import pytest
import torch
from torch import Tensor

from kernels.gated_delta import gated_delta, gated_delta_step
from kernels.short_conv import short_conv, short_conv_step

Delta = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def delta_inputs(length: int, *lead: int, seed: int = 0, heads: int = 3, dk: int = 4, dv: int = 5) -> Delta:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*lead, length, heads, *shape, generator=g, dtype=torch.float64)

    k = torch.nn.functional.normalize(normal(dk), dim=-1)
    return normal(dk), k, normal(dv), -normal().abs(), normal().sigmoid()


def by_formula(inputs: Delta, state: Tensor) -> tuple[Tensor, Tensor]:
    """S_t = a (I - b k k^T) S + b k v^T, o = S^T q, in fp64 with explicit matrices; inputs [T, H, ...]."""
    outs = []
    for q, k, v, log_decay, beta in zip(*inputs, strict=True):
        heads = []
        new = []
        for h in range(q.shape[0]):
            forget = torch.eye(q.shape[1], dtype=q.dtype) - beta[h] * torch.outer(k[h], k[h])
            s = log_decay[h].exp() * forget @ state[h] + beta[h] * torch.outer(k[h], v[h])
            heads.append(s.T @ q[h])
            new.append(s)
        state = torch.stack(new)
        outs.append(torch.stack(heads))
    return torch.stack(outs), state


@pytest.mark.parametrize("length", [1, 2, 7, 16, 17])
@pytest.mark.parametrize("chunk", [1, 4, 16, 64])
def test_chunked_delta_rule_is_the_formula(length: int, chunk: int) -> None:
    inputs = delta_inputs(length, seed=length)
    start = torch.randn(3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected, last = by_formula(inputs, start)
    out, state = gated_delta(*inputs, start, chunk)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(state, last)


def test_delta_steps_are_the_formula() -> None:
    inputs = delta_inputs(9)
    state = torch.zeros(3, 4, 5, dtype=torch.float64)
    expected, last = by_formula(inputs, state)
    for t in range(9):
        q, k, v, log_decay, beta = (x[t][None] for x in inputs)
        out, new = gated_delta_step(q, k, v, log_decay, beta, state[None])
        state = new[0]
        torch.testing.assert_close(out[0], expected[t])
    torch.testing.assert_close(state, last)


def test_delta_rule_goes_on_where_it_was_cut_and_in_fp32() -> None:
    inputs = delta_inputs(50)
    singles = tuple(x.float() for x in inputs)
    whole, last = gated_delta(*inputs, torch.zeros(3, 4, 5, dtype=torch.float64))
    state, parts = torch.zeros(3, 4, 5), []
    for a, b in ((0, 1), (1, 20), (20, 37), (37, 50)):
        q, k, v, log_decay, beta = (x[a:b] for x in singles)
        out, state = gated_delta(q, k, v, log_decay, beta, state, 8)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts).double(), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state.double(), last, atol=1e-5, rtol=1e-5)


def test_delta_rule_survives_total_forgetting() -> None:
    """A decay of nearly nothing: exponents of differences must not overflow above the diagonal."""
    q, k, v, _, beta = delta_inputs(12)
    harsh = torch.full((12, 3), -80.0, dtype=torch.float64)
    start = torch.ones(3, 4, 5, dtype=torch.float64)
    expected, last = by_formula((q, k, v, harsh, beta), start)
    out, state = gated_delta(q.float(), k.float(), v.float(), harsh.float(), beta.float(), start.float())
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state.double(), last, atol=1e-5, rtol=1e-5)


def test_delta_rule_takes_batches() -> None:
    batched = delta_inputs(6, 2)
    zeros = torch.zeros(3, 4, 5, dtype=torch.float64)
    out, state = gated_delta(*batched, zeros.expand(2, -1, -1, -1))
    for b in range(2):
        q, k, v, log_decay, beta = (x[b] for x in batched)
        single, last = gated_delta(q, k, v, log_decay, beta, zeros)
        torch.testing.assert_close(out[b], single)
        torch.testing.assert_close(state[b], last)


@pytest.mark.parametrize("kernel", [1, 2, 4])
@pytest.mark.parametrize("length", [1, 2, 3, 9])
def test_short_conv_is_the_sum_and_its_steps_agree(kernel: int, length: int) -> None:
    g = torch.Generator().manual_seed(kernel)
    x = torch.randn(length, 6, generator=g)
    weight, state = torch.randn(6, kernel, generator=g), torch.randn(6, kernel - 1, generator=g)
    past = torch.cat((state.T, x))
    expected = torch.stack([(past[t : t + kernel] * weight.T).sum(0) for t in range(length)])
    out, last = short_conv(x, weight, state)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(last, past[length:].T)
    steps = state[None]
    for t in range(length):
        y, steps = short_conv_step(x[t][None], weight, steps)
        torch.testing.assert_close(y[0], expected[t])
    torch.testing.assert_close(steps[0], last)
    batched, _ = short_conv(torch.stack((x, -x)), weight, torch.stack((state, -state)))
    torch.testing.assert_close(batched, torch.stack((expected, -expected)))
