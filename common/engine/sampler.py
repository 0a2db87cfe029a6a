"""From logits to tokens: the processed distribution, and verification of drafts (02-exactness 5).

Greedy: accept while the draft is the argmax. Seeded: target = argmax(log p + g) with g a function of seed
and position, drafts drawn with the same g, accepted iff equal (Gumbel coupling), so the tokens do not
depend on the drafts. Unseeded: accept iff log p(x) > log u + log q(x), else draw from max(p - q, 0).
"""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.engine.counter_rng import Purpose, gumbel, uniform
from common.request import SamplingParams, TokenLogprob

NEG_INF = float("-inf")


@dataclass(frozen=True)
class DraftDistribution:
    """log q [n, Vd] that drafts were drawn from; ids [Vd] maps its columns to tokens (None: identity)."""

    log_q: Tensor
    ids: Tensor | None


def process_logits(
    logits: Tensor,
    sampling: SamplingParams,
    known: Sequence[int],
    num_prompt: int,
    drafts: Sequence[int],
    eos_token_ids: Collection[int],
) -> Tensor:
    """logits [n+1, V], row j predicting the token after ``known + drafts[:j]`` -> log p [n+1, V], float32.

    Order: penalties and bias, minimum length, temperature, top-k, top-p, min-p. Temperature 0 gives the
    penalized logits (only their argmax is used).
    """
    rows = logits.float()
    if sampling.has_penalties or sampling.logit_bias or sampling.min_tokens:
        rows = rows.clone()
        # Rows behind an invalid draft are never used; its id must not be used as an index.
        valid = [d if 0 <= d < rows.shape[-1] else 0 for d in drafts]
        for j in range(rows.shape[0]):
            _adjust(rows[j], sampling, [*known, *valid[:j]], num_prompt, eos_token_ids)
    if sampling.greedy:
        return rows
    return truncated_log_probs(rows / sampling.temperature, sampling)


def truncated_log_probs(rows: Tensor, sampling: SamplingParams) -> Tensor:
    """Log-probabilities [n, V] of temperature-scaled logits after top-k, top-p and min-p."""
    if 0 < sampling.top_k < rows.shape[-1]:
        kth = rows.topk(sampling.top_k, dim=-1).values[..., -1:]
        rows = rows.masked_fill(rows < kth, NEG_INF)
    log_p = rows.log_softmax(-1)
    if sampling.top_p < 1.0:
        ordered, index = log_p.sort(dim=-1, descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()
        cut = (before >= sampling.top_p).scatter(-1, index, before >= sampling.top_p)
        log_p = log_p.masked_fill(cut, NEG_INF)
    if sampling.min_p > 0.0:
        floor = log_p.max(-1, keepdim=True).values + torch.log(torch.tensor(sampling.min_p))
        log_p = log_p.masked_fill(log_p < floor, NEG_INF)
    if sampling.top_p < 1.0 or sampling.min_p > 0.0:
        log_p = log_p.log_softmax(-1)
    return log_p


def _adjust(
    row: Tensor,
    sampling: SamplingParams,
    tokens: Sequence[int],
    num_prompt: int,
    eos_token_ids: Collection[int],
) -> None:
    """Penalties, bias and minimum length, in place on one row [V]. Repetition counts prompt and output,
    presence and frequency count output only."""
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(tokens)), dtype=torch.long)
        values = row[seen]
        penalty = sampling.repetition_penalty
        row[seen] = torch.where(values > 0, values / penalty, values * penalty)
    output = tokens[num_prompt:]
    if output and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = Counter(output)
        ids = torch.tensor(list(counts), dtype=torch.long)
        frequency = torch.tensor([float(c) for c in counts.values()])
        row[ids] -= sampling.presence_penalty + sampling.frequency_penalty * frequency
    for token, bias in sampling.logit_bias.items():
        row[token] += bias
    if len(output) < sampling.min_tokens:
        stops = [*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)]
        row[torch.tensor(stops, dtype=torch.long)] = NEG_INF


def verify_greedy(best: Sequence[int], drafts: Sequence[int]) -> tuple[int, ...]:
    """``best[j]`` is the argmax after j drafts -> accepted drafts and one token more."""
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == best[accepted]:
        accepted += 1
    return tuple(best[: accepted + 1])


def verify_seeded(log_p: Tensor, drafts: Sequence[int], key: int, first: int) -> tuple[int, ...]:
    """log_p [n+1, V] of positions first .. first+n -> accepted drafts and one token more."""
    tokens: list[int] = []
    rows = log_p.numpy()
    for j in range(len(drafts) + 1):
        noise = gumbel(key, first + j, Purpose.SAMPLE, log_p.shape[-1]).numpy()
        tokens.append(int((rows[j] + noise).argmax()))
        if j < len(drafts) and drafts[j] != tokens[-1]:
            break
    return tuple(tokens)


def verify_unseeded(
    log_p: Tensor, drafts: Sequence[int], q: DraftDistribution | None, key: int, first: int
) -> tuple[int, ...]:
    """As `verify_seeded`, by accept or residual; ``q`` has one row a draft (None iff there are none)."""
    tokens: list[int] = []
    rows = log_p.numpy()  # a few small operations a draft: NumPy's cost a third of torch's
    for j, draft in enumerate(drafts):
        assert q is not None, "drafts of a sampled request come with their distribution"
        log_q = _full_log_q(q, j, log_p.shape[-1]).numpy()
        valid = 0 <= draft < log_p.shape[-1]
        u = uniform(key, first + j, Purpose.ACCEPT, 1)[0]
        if valid and rows[j, draft] > math.log(u) + log_q[draft]:
            tokens.append(draft)
            continue
        residual = np.maximum(np.exp(rows[j]) - np.exp(log_q), 0.0)
        noise = gumbel(key, first + j, Purpose.RESIDUAL, log_p.shape[-1]).numpy()
        # Rounding can leave nothing of p - q where p equals q: then p itself is the right draw.
        with np.errstate(divide="ignore"):
            source = np.log(residual) if residual.any() else rows[j]
        tokens.append(int((source + noise).argmax()))
        return tuple(tokens)
    noise = gumbel(key, first + len(drafts), Purpose.SAMPLE, log_p.shape[-1]).numpy()
    return (*tokens, int((rows[len(drafts)] + noise).argmax()))


def _full_log_q(q: DraftDistribution, j: int, vocab_size: int) -> Tensor:
    if q.ids is None:
        return q.log_q[j]
    return torch.full((vocab_size,), NEG_INF).scatter(0, q.ids, q.log_q[j])


def draw_draft(
    log_q: Tensor, ids: Tensor | None, sampling: SamplingParams, key: int, position: int, vocab_size: int
) -> int:
    """Index into log_q [Vd] of the draft for ``position``: coupled to the trunk's noise where seeded."""
    if sampling.greedy:
        return int(log_q.argmax())
    if sampling.seed is not None:
        noise = gumbel(key, position, Purpose.SAMPLE, vocab_size)
        noise = noise if ids is None else noise[ids]
    else:
        noise = gumbel(key, position, Purpose.DRAFT, log_q.shape[-1])
    return int((log_q + noise).argmax())


def token_logprobs(logits: Tensor, tokens: Sequence[int], num_top: int) -> tuple[TokenLogprob, ...]:
    """Log-probabilities of ``tokens`` (row j of logits [n, V] predicts tokens[j]) under the bare model."""
    log_p = logits[: len(tokens)].float().log_softmax(-1)
    chosen = log_p.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    if num_top == 0:
        return tuple(TokenLogprob(lp) for lp in chosen)
    values, ids = log_p.topk(num_top, dim=-1)
    return tuple(
        TokenLogprob(lp, tuple(zip(i, v, strict=True)))
        for lp, i, v in zip(chosen, ids.tolist(), values.tolist(), strict=True)
    )
