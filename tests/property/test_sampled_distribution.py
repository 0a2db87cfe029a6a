"""Sampled speculation is exact in distribution: chi-square over 32 tokens and 50,000 draws (02-exactness 5).

Drafts are drawn and verified by the functions that the runner calls; what comes out is compared with the
distribution that a step without speculation samples from. Seeded requests: the same over 50,000 seeds.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from common.engine.counter_rng import request_key
from common.engine.sampler import (
    DraftDistribution,
    draw_draft,
    process_logits,
    truncated_log_probs,
    verify_seeded,
    verify_unseeded,
)
from common.request import SamplingParams

V = 32
DRAWS = 50_000
KNOWN, NUM_PROMPT = (1, 2, 2, 5, 5, 9, 30, 5), 3
P_VALUE = 0.001

SAMPLINGS = {
    "temperature": SamplingParams(temperature=1.4),
    "top-k": SamplingParams(temperature=0.8, top_k=7),
    "top-p": SamplingParams(top_p=0.75),
    "min-p": SamplingParams(min_p=0.1),
    "penalties": SamplingParams(repetition_penalty=1.5, presence_penalty=0.6, frequency_penalty=0.4),
}


def fixed_logits(seed: int, *shape: int) -> Tensor:
    return 1.5 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def p_value(counts: Tensor, probabilities: Tensor) -> float:
    """That draws from ``probabilities`` [V] differ at least as much; 0 where the impossible was drawn.

    Tokens expected fewer than 5 times are counted together, as the test requires.
    """
    if int(counts[probabilities == 0].sum()):
        return 0.0
    wanted = probabilities.double() * counts.sum()
    rare = wanted < 5
    wanted = torch.cat((wanted[~rare], wanted[rare].sum()[None]))
    counts = torch.cat((counts[~rare].double(), counts[rare].sum()[None].double()))
    wanted, counts = wanted[wanted > 0], counts[wanted > 0]
    statistic = ((counts - wanted) ** 2 / wanted).sum()
    degrees = torch.tensor(len(wanted) - 1, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees / 2, statistic / 2))


@dataclass(frozen=True)
class Target:
    """What the trunk says after KNOWN (row 0) and after each possible draft (row 1), processed."""

    log_p: tuple[Tensor, ...]  # by draft, [2, V]

    @classmethod
    def of(cls, sampling: SamplingParams) -> "Target":
        first, second = fixed_logits(1, V), fixed_logits(2, V, V)
        return cls(
            tuple(
                process_logits(torch.stack((first, second[x])), sampling, KNOWN, NUM_PROMPT, (x,), ())
                for x in range(V)
            )
        )

    @property
    def first(self) -> Tensor:
        """[V]: what a step without drafts samples from."""
        return self.log_p[0][0].exp()


def drafter_log_q(sampling: SamplingParams) -> Tensor:
    """[1, V]: near the trunk, never equal to it, with the request's own temperature and truncation."""
    near = fixed_logits(1, V) + 0.7 * fixed_logits(3, V)
    return truncated_log_probs(near[None] / sampling.temperature, sampling)


@dataclass(frozen=True)
class Counts:
    first: Tensor  # [V] of the token after KNOWN
    second: Tensor  # [V, V] of the one after it, by accepted draft
    num_rejected: int


def unseeded(sampling: SamplingParams, claimed: float = 0.0, draws: int = DRAWS) -> Counts:
    """So many requests that verify one draft each. ``claimed``: how much of a uniform distribution is mixed
    into the q that verification is told; 0 is the truth."""
    target, log_q = Target.of(sampling), drafter_log_q(sampling)
    told = DraftDistribution((log_q.exp() * (1 - claimed) + claimed / V).log(), None)
    first, second, position = torch.zeros(V), torch.zeros(V, V), len(KNOWN)
    rejected, row = 0, log_q[0]
    for i in range(draws):
        key = request_key(f"r{i}", None)
        draft = draw_draft(row, None, sampling, key, position, V)
        tokens = verify_unseeded(target.log_p[draft], (draft,), told, key, position)
        first[tokens[0]] += 1
        if len(tokens) > 1:
            second[draft, tokens[1]] += 1
        else:
            rejected += 1
    return Counts(first, second, rejected)


def seeded(sampling: SamplingParams) -> tuple[Counts, int]:
    """The same over 50,000 seeds, with coupled drafts; and how many of their first tokens differ from those
    that the same seeds give without speculation."""
    target, log_q, position = Target.of(sampling), drafter_log_q(sampling), len(KNOWN)
    first, second = torch.zeros(V), torch.zeros(V, V)
    rejected = differ = 0
    alone, row = target.log_p[0][:1], log_q[0]
    for i in range(DRAWS):
        key = request_key("r", i)
        draft = draw_draft(row, None, SEEDED, key, position, V)
        tokens = verify_seeded(target.log_p[draft], (draft,), key, position)
        first[tokens[0]] += 1
        if len(tokens) > 1:
            second[draft, tokens[1]] += 1
        else:
            rejected += 1
        if i % 10 == 0:
            differ += verify_seeded(alone, (), key, position) != tokens[:1]
    return Counts(first, second, rejected), differ


SEEDED = SamplingParams(seed=0)  # tells `draw_draft` to couple; the key holds the seed itself


def check(counts: Counts, target: Target) -> None:
    assert counts.first.sum() == DRAWS
    assert DRAWS // 20 < counts.num_rejected < DRAWS * 19 // 20, "both ways out are taken"
    assert p_value(counts.first, target.first) > P_VALUE
    draft = int(counts.second.sum(1).argmax())
    assert counts.second[draft].sum() > 2000
    assert p_value(counts.second[draft], target.log_p[draft][1].exp()) > P_VALUE


@pytest.mark.parametrize("name", list(SAMPLINGS))
def test_speculation_leaves_the_distribution_as_it_is(name: str) -> None:
    check(unseeded(SAMPLINGS[name]), Target.of(SAMPLINGS[name]))


@pytest.mark.parametrize("name", ["top-p", "penalties"])
def test_seeds_are_distributed_as_the_target_and_each_keeps_its_token(name: str) -> None:
    counts, differ = seeded(SAMPLINGS[name])
    check(counts, Target.of(SAMPLINGS[name]))
    assert differ == 0


def test_a_wrong_q_fails_the_test() -> None:
    """Control: verification is told a q that the drafts were not drawn from; a fifth of it shows soon."""
    sampling = SAMPLINGS["temperature"]
    assert p_value(unseeded(sampling, claimed=0.2, draws=10_000).first, Target.of(sampling).first) < P_VALUE


def test_a_wrong_target_fails_the_test() -> None:
    """Control: the statistic tells settings apart that are close."""
    drawn = torch.multinomial(
        Target.of(SamplingParams(temperature=1.4)).first,
        DRAWS,
        replacement=True,
        generator=torch.Generator().manual_seed(5),
    )
    counts = torch.bincount(drawn, minlength=V).float()
    assert p_value(counts, Target.of(SamplingParams(temperature=1.4)).first) > P_VALUE
    assert p_value(counts, Target.of(SamplingParams(temperature=1.5)).first) < P_VALUE
