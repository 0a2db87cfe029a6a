"""Sampling and verification: exact in distribution (chi-square), seeded runs independent of drafts."""

import math
import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from common.engine.counter_rng import Purpose, gumbel, request_key, uniform
from common.engine.sampler import (
    DraftDistribution,
    draw_draft,
    process_logits,
    token_logprobs,
    truncated_log_probs,
    verify_greedy,
    verify_seeded,
    verify_unseeded,
)
from common.request import SamplingParams

V = 8
KNOWN, NUM_PROMPT = [1, 2, 2, 5, 5], 3
DRAWS = 2500
Z = 3.72  # one false alarm in ten thousand

REQUEST_KEY = 12109698796523605872
SEED_KEY = 14472116699405680931
UNIFORM = [0.9308555884057983, 0.09957675792866061]
GUMBEL = [1.512162208557129, -0.2734796702861786, 0.37900349497795105]


def chi_square_limit(degrees: int) -> float:
    """Wilson and Hilferty's approximation of the upper 1e-4 quantile."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + Z * math.sqrt(spread)) ** 3


def chi_square_excess(counts: Tensor, probabilities: Tensor) -> float:
    """Statistic over its limit; above 1 the counts do not fit. Infinite where the impossible happened."""
    possible = probabilities > 1e-12
    if int(counts[~possible].sum()):
        return math.inf
    wanted = probabilities[possible] * counts.sum()
    statistic = float(((counts[possible] - wanted) ** 2 / wanted).sum())
    return statistic / chi_square_limit(max(1, int(possible.sum()) - 1))


def fixed_logits(seed: int, *shape: int) -> Tensor:
    return 1.5 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


SAMPLINGS = {
    "plain": SamplingParams(),
    "hot": SamplingParams(temperature=1.7),
    "top-k": SamplingParams(temperature=0.8, top_k=3),
    "top-p": SamplingParams(top_p=0.7),
    "min-p": SamplingParams(min_p=0.2),
    "penalties": SamplingParams(repetition_penalty=1.5, presence_penalty=0.6, frequency_penalty=0.4),
    "everything": SamplingParams(
        temperature=1.2, top_k=6, top_p=0.9, min_p=0.05, frequency_penalty=0.5, logit_bias={3: 1.5}
    ),
}


def speculate(
    sampling: SamplingParams, vocabulary: Tensor | None, claimed: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Many requests draft two tokens and verify them. Returns counts [V] of the first token with its
    distribution, and counts [V, V] of the second after each accepted first with its distribution.

    ``claimed`` mixes a uniform distribution into the q that verification is told: 0 is the truth.
    """
    first, second = fixed_logits(1, V), fixed_logits(2, V, V)
    near = torch.stack((first, second.mean(0))) + 0.5 * fixed_logits(3, 2, V)
    draft_logits = near if vocabulary is None else near[:, vocabulary]
    log_q = truncated_log_probs(draft_logits / sampling.temperature, sampling)
    told = (log_q.exp() * (1 - claimed) + claimed / log_q.shape[-1]).log()
    distribution = DraftDistribution(told, vocabulary)
    log_p = {
        x: process_logits(torch.stack((first, second[x], second[0])), sampling, KNOWN, NUM_PROMPT, (x, 0), ())
        for x in range(V)
    }
    first_counts, second_counts = torch.zeros(V), torch.zeros(V, V)
    position = len(KNOWN)
    for i in range(DRAWS):
        key = request_key(f"r{i}", None)
        drafts = []
        for m in range(2):
            index = draw_draft(log_q[m], vocabulary, sampling, key, position + m, V)
            drafts.append(index if vocabulary is None else int(vocabulary[index]))
        tokens = verify_unseeded(log_p[drafts[0]], drafts, distribution, key, position)
        first_counts[tokens[0]] += 1
        if len(tokens) > 1:
            assert tokens[0] == drafts[0]
            second_counts[tokens[0], tokens[1]] += 1
    truth = torch.stack([log_p[x][1].exp() for x in range(V)])
    return first_counts, log_p[0][0].exp(), second_counts, truth


@pytest.mark.parametrize("name", list(SAMPLINGS))
def test_unseeded_tokens_have_the_targets_distribution(name: str) -> None:
    vocabulary = torch.tensor([0, 2, 3, 5, 6]) if name in ("plain", "everything") else None
    first, p, second, p_second = speculate(SAMPLINGS[name], vocabulary)
    assert chi_square_excess(first, p) < 1
    assert second.sum() > 100, "too few drafts were accepted to say anything"
    for x in range(V):
        if second[x].sum() > 100:
            assert chi_square_excess(second[x], p_second[x]) < 1


def test_the_chi_square_sees_a_wrong_q() -> None:
    """Control: verification is told a q that the drafts were not drawn from."""
    first, p, _, _ = speculate(SAMPLINGS["plain"], None, claimed=0.7)
    assert chi_square_excess(first, p) > 1


def test_tokens_without_drafts_have_the_targets_distribution() -> None:
    log_p = fixed_logits(1, 1, V).log_softmax(-1)
    unseeded, seeded = torch.zeros(V), torch.zeros(V)
    for i in range(DRAWS):
        unseeded[verify_unseeded(log_p, (), None, request_key(f"r{i}", None), 9)[0]] += 1
        seeded[verify_seeded(log_p, (), request_key("r", i), 9)[0]] += 1
    assert chi_square_excess(unseeded, log_p[0].exp()) < 1
    assert chi_square_excess(seeded, log_p[0].exp()) < 1


# ---- seeded: Gumbel coupling ----------------------------------------------------------------------------


def toy_logits(tokens: Sequence[int]) -> Tensor:
    """A model of two tokens of memory."""
    return fixed_logits(100 + tokens[-1] * V + tokens[-2], V)


def seeded_run(seed: int, count: int, depth: Sequence[int], good: float) -> tuple[list[int], int]:
    """``count`` tokens; each step verifies as many drafts as ``depth`` says, in turn.

    A draft is the drafter's coupled draw with probability ``good``, else any token. Returns tokens and the
    number of accepted drafts.
    """
    sampling = SamplingParams(seed=seed, temperature=0.9, top_p=0.95)
    rng, key = random.Random(seed), request_key("any", seed)
    tokens, accepted, step = [1, 2], 0, 0
    while len(tokens) < count + 2:
        drafts: list[int] = []
        for _ in range(depth[step % len(depth)]):
            near = toy_logits([*tokens, *drafts]) + 0.3 * fixed_logits(step, V)  # the drafter's opinion
            log_q = truncated_log_probs(near / sampling.temperature, sampling)
            coupled = draw_draft(log_q, None, sampling, key, len(tokens) + len(drafts), V)
            drafts.append(coupled if rng.random() < good else rng.randrange(-1, V + 2))
        prefixes = [[*tokens, *drafts[:j]] for j in range(len(drafts) + 1)]
        safe = [[min(max(t, 0), V - 1) for t in prefix] for prefix in prefixes]
        rows = torch.stack([toy_logits(prefix) for prefix in safe])
        log_p = process_logits(rows, sampling, tokens, 2, drafts, ())
        new = verify_seeded(log_p, drafts, key, len(tokens))
        tokens += new
        accepted += len(new) - 1
        step += 1
    return tokens[2 : count + 2], accepted


def test_seeded_tokens_do_not_depend_on_drafts() -> None:
    for seed in range(12):
        alone, _ = seeded_run(seed, 30, (0,), 1.0)
        runs = [seeded_run(seed, 30, depth, good) for depth in ((4,), (0, 3, 1), (2,)) for good in (1.0, 0.5)]
        assert all(tokens == alone for tokens, _ in runs)
        assert runs[0][1] > 5, "coupled drafts are often right"
    assert len({tuple(seeded_run(seed, 30, (0,), 1.0)[0]) for seed in range(12)}) == 12


def test_a_draft_vocabulary_is_coupled_by_token() -> None:
    """A drafter that agrees with the trunk proposes the trunk's own draw wherever it has the word."""
    ids = torch.tensor([1, 4, 6, 7])
    log_p = fixed_logits(1, 1, V).log_softmax(-1)
    agree = 0
    for seed in range(200):
        sampling, key = SamplingParams(seed=seed), request_key("r", seed)
        token = verify_seeded(log_p, (), key, 5)[0]
        draft = int(ids[draw_draft(log_p[0][ids], ids, sampling, key, 5, V)])
        if token in ids.tolist():
            assert draft == token
            agree += 1
    assert agree > 50


# ---- numbers --------------------------------------------------------------------------------------------


def test_random_numbers_are_a_function_of_key_position_and_purpose() -> None:
    """Pinned: another node, another version must draw the same."""
    assert request_key("r", None) == REQUEST_KEY
    assert request_key("whatever", 7) == request_key("r", 7) == SEED_KEY
    assert request_key("r", None) != request_key("s", None)
    assert uniform(SEED_KEY, 3, Purpose.ACCEPT, 2).tolist() == pytest.approx(UNIFORM, abs=1e-15)
    assert gumbel(SEED_KEY, 3, Purpose.SAMPLE, 3).tolist() == pytest.approx(GUMBEL, abs=1e-6)
    drawn = {
        uniform(key, position, purpose, 1)[0]
        for key in (SEED_KEY, 2**64 - 1, 0)
        for position in (0, 1, 2, 2**31)
        for purpose in Purpose
    }
    assert len(drawn) == 3 * 4 * len(Purpose)
    # The number of numbers asked for does not change them: a smaller vocabulary is a prefix.
    assert (
        gumbel(SEED_KEY, 3, Purpose.SAMPLE, 50)[:3].tolist()
        == gumbel(SEED_KEY, 3, Purpose.SAMPLE, 3).tolist()
    )


# ---- greedy, invalid drafts, processing -----------------------------------------------------------------


def test_greedy() -> None:
    assert verify_greedy([4, 5, 6], [4, 5]) == (4, 5, 6)  # all accepted: a bonus token
    assert verify_greedy([4, 5, 6], [4, 7]) == (4, 5)
    assert verify_greedy([4, 5, 6], [0, 5]) == (4,)
    assert verify_greedy([4], []) == (4,)


@pytest.mark.parametrize("invalid", [-1, V, 10**9])
@pytest.mark.parametrize("sampling", [SAMPLINGS["penalties"], SamplingParams(temperature=0.0, min_tokens=9)])
def test_invalid_drafts_are_rejections(invalid: int, sampling: SamplingParams) -> None:
    drafts = (2, invalid, 3)
    log_p = process_logits(fixed_logits(5, 4, V), sampling, KNOWN, NUM_PROMPT, drafts, (7,))
    log_p[0] = torch.where(torch.arange(V) == 2, 0.0, float("-inf"))  # the first draft is certain
    key = request_key("r", 1)
    uniform_q = DraftDistribution(torch.full((3, V), -math.log(V)), None)
    for tokens in (
        verify_greedy(log_p.argmax(-1).tolist(), drafts),
        verify_seeded(log_p, drafts, key, len(KNOWN)),
        verify_unseeded(log_p, drafts, uniform_q, key, len(KNOWN)),
    ):
        assert len(tokens) == 2
        assert tokens[0] == 2
        assert 0 <= tokens[1] < V


def probabilities(sampling: SamplingParams, logits: Tensor, drafts: Sequence[int] = ()) -> Tensor:
    return process_logits(logits, sampling, KNOWN, NUM_PROMPT, drafts, (7,)).exp()


def test_truncation() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.25, 0.05, 0.2]]).log()
    for sampling, kept in (
        (SamplingParams(top_k=2), [0, 0.4, 0.25, 0, 0]),
        (SamplingParams(top_p=0.6), [0, 0.4, 0.25, 0, 0]),
        (SamplingParams(top_p=0.35), [0, 0.4, 0, 0, 0]),
        (SamplingParams(top_p=1e-9), [0, 0.4, 0, 0, 0]),
        (SamplingParams(min_p=0.5), [0, 0.4, 0.25, 0, 0.2]),
        (SamplingParams(top_k=3, min_p=0.6), [0, 0.4, 0.25, 0, 0]),
        (SamplingParams(top_k=99), [0.1, 0.4, 0.25, 0.05, 0.2]),
    ):
        wanted = torch.tensor([kept]) / sum(kept)
        torch.testing.assert_close(probabilities(sampling, logits), wanted)


def test_penalties_follow_the_accepted_drafts() -> None:
    """Row j sees known tokens and drafts before j; presence and frequency count outputs, repetition all."""
    logits = torch.full((3, V), 2.0)
    rows = process_logits(
        logits, SamplingParams(temperature=0.0, presence_penalty=0.5), KNOWN, NUM_PROMPT, (6, 0), ()
    )
    assert [row.tolist().count(1.5) for row in rows] == [1, 2, 3]  # 5; 5 and 6; 5, 6 and 0
    rows = process_logits(
        logits, SamplingParams(temperature=0.0, frequency_penalty=0.5), KNOWN, NUM_PROMPT, (5, 0), ()
    )
    assert rows[:, 5].tolist() == [1.0, 0.5, 0.5]
    rows = process_logits(
        logits, SamplingParams(temperature=0.0, repetition_penalty=2.0), KNOWN, NUM_PROMPT, (6, 0), ()
    )
    assert [row.tolist().count(1.0) for row in rows] == [3, 4, 5]  # 1, 2, 5 of the known ones
    assert torch.equal(logits, torch.full((3, V), 2.0)), "the runner's logits are not touched"


def test_minimum_length_and_bias() -> None:
    sampling = SamplingParams(min_tokens=4, stop_token_ids=(3,), logit_bias={2: 5.0})
    p = probabilities(sampling, torch.zeros(3, V), (0, 0))  # 2, 3 and 4 outputs so far
    assert p[0, 3] == p[0, 7] == p[1, 3] == p[1, 7] == 0
    assert p[2, 3] > 0
    assert p[2, 7] > 0
    assert p[:, 2].min() > 0.9
    ignoring = SamplingParams(min_tokens=4, ignore_eos=True)
    assert probabilities(ignoring, torch.zeros(1, V))[0, 7] > 0


def test_logprobs_are_the_bare_models() -> None:
    logits = fixed_logits(9, 3, V)
    log_p = logits.log_softmax(-1)
    plain = token_logprobs(logits, (4, 1), 0)
    assert [t.logprob for t in plain] == pytest.approx([float(log_p[0, 4]), float(log_p[1, 1])])
    assert all(t.top == () for t in plain)
    (first, _) = token_logprobs(logits, (4, 1), 3)
    assert [i for i, _ in first.top] == log_p[0].argsort(descending=True)[:3].tolist()
    assert [v for _, v in first.top] == pytest.approx(log_p[0].sort(descending=True).values[:3].tolist())
