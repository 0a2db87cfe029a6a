"""Random schedules: what is asked of an engine or a pair, and of what shape they are, drawn from a seed.

A schedule is data. Prompt lengths are 1 .. 4N+3 and lie around block boundaries; prompts share beginnings,
part within the lookahead, repeat, or go on from an earlier answer; pools are small enough for preemptions.
"""

import random
from dataclasses import dataclass

from cli.schedules.texts import Texts
from common.engine.methods import Method, multi_method, ngram_method, recursive_method
from common.request import SamplingParams


@dataclass(frozen=True)
class Shape:
    """Numbers of an engine; both engines of a pair agree on all but the budget."""

    block_size: int
    state_block_size: int
    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    prefix_caching: bool
    plain_hashes: bool  # with the dropped last block


@dataclass(frozen=True)
class Budget:
    """Most tokens of a step, and of one prompt in it (0: no bound of its own)."""

    tokens: int
    threshold: int


@dataclass(frozen=True)
class Pattern:
    """What becomes of a request's drafts.

    ``right``: share of drafts that are the true continuation, the others certainly wrong; None: what the
    drafter says. ``cut``: chance that a step verifies fewer than were proposed. ``invalid``: chance that one
    of them is no token at all.
    """

    right: float | None = None
    cut: float = 0.0
    invalid: float = 0.0


@dataclass(frozen=True)
class HandOver:
    """``carry``: P computes the whole prompt and samples token L. ``row_lost``: the carry rows do not arrive.
    ``broken_at``: the transfer ends once so many positions were offered; None: it ends well."""

    carry: bool = False
    row_lost: bool = False
    broken_at: int | None = None


@dataclass(frozen=True)
class Ask:
    """One request. ``source`` says how its prompt came about; ``pause`` and ``abort_after`` count steps."""

    source: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    pattern: Pattern
    num_sequences: int = 1
    priority: int = 0
    hold_blocks: bool = False
    pause: int = 0
    abort_after: int | None = None
    hand_over: HandOver | None = None


@dataclass(frozen=True)
class Schedule:
    """``prefill`` None: one engine, nothing is handed over. ``drafter`` is none, mtp, recursive or ngram."""

    seed: int
    drafter: str
    num_drafts: int
    shape: Shape
    budget: Budget
    prefill: Budget | None
    asks: tuple[Ask, ...]

    @property
    def method(self) -> Method:
        match self.drafter:
            case "recursive":
                return recursive_method(self.num_drafts)
            case "ngram":
                return ngram_method(self.num_drafts)
            case _:
                return multi_method(self.num_drafts)


def draw(seed: int, num_modules: int, texts: Texts, *, pair: bool, num_asks: int = 4) -> Schedule:
    """The schedule of a seed, for a model with N modules."""
    rng = random.Random(f"{seed} {num_modules} {pair}")
    drafter, num_drafts = _drafter(rng, num_modules)
    lookahead = num_modules if drafter == "mtp" else min(num_modules, 1)
    block_size = rng.choice((1, 4, 4, 5) if num_modules < 8 else (1, 4, 5, 8))
    unit = block_size * rng.choice((1, 1, 2, 3))
    top = max(4 * num_modules + 3, 2 * unit + lookahead + 1)
    asks: list[Ask] = []
    for _ in range(num_asks):
        asks.append(_ask(rng, texts, asks, num_modules, unit, top, pair))
    longest = max(len(a.prompt) + a.sampling.max_tokens for a in asks) + num_drafts + 1
    prompts = max(len(a.prompt) for a in asks)
    tight = -(-(prompts + rng.randint(2, num_drafts + 6)) // unit) * unit // block_size  # ends requests early
    small = max(tight, -(-longest // block_size) + 1)
    shape = Shape(
        block_size=block_size,
        state_block_size=unit,
        num_blocks=rng.choice((tight, small, small + 2, small + small // 3, small + small // 2, 3 * small))
        + 1,
        max_num_seqs=rng.choice((2, 4, 6)),
        max_model_len=prompts + rng.randint(2, num_modules + 6) if rng.random() < 0.2 else 4 * longest,
        prefix_caching=rng.random() < 0.95,
        plain_hashes=0 < lookahead <= block_size and rng.random() < 0.35,
    )
    budgets = [_budget(rng, lookahead) for _ in range(2)]
    return Schedule(seed, drafter, num_drafts, shape, budgets[0], budgets[1] if pair else None, tuple(asks))


def _drafter(rng: random.Random, num_modules: int) -> tuple[str, int]:
    if num_modules == 0:
        return ("ngram", 4) if rng.random() < 0.4 else ("none", 0)
    if num_modules == 1 and rng.random() < 0.4:
        return "recursive", rng.randint(2, 5)
    return "mtp", num_modules


def _budget(rng: random.Random, lookahead: int) -> Budget:
    least = lookahead + 1
    tokens = rng.choice((least, least + 1, lookahead + 4, 2 * lookahead + 5, 24, 64))
    return Budget(tokens, rng.choice((0, 0, least, lookahead + 3)))


def _ask(
    rng: random.Random, texts: Texts, before: list[Ask], num_modules: int, unit: int, top: int, pair: bool
) -> Ask:
    source, prompt = _prompt(rng, texts, before, num_modules, unit, top)
    max_tokens = rng.choice((1, 2, 6, 10, num_modules + 1, num_modules + 4, 2 * num_modules + 3))
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    num_sequences, kind = 1, rng.random()
    if kind < 0.25:  # seeded; a few of several sequences
        seed = rng.randrange(1000)
        sampling = SamplingParams(
            max_tokens=max_tokens, temperature=0.9, seed=seed, top_k=rng.choice((0, 20))
        )
        num_sequences = rng.choice((1, 1, 2))
    elif kind < 0.28:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.9)
    elif kind < 0.40:
        stop = rng.choice(texts.after(prompt, max_tokens))
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=(stop,))
    scripted = sampling.greedy and rng.random() < 0.6
    return Ask(
        source,
        prompt,
        sampling,
        Pattern(
            right=rng.choice((0.0, 0.5, 0.8, 0.9, 1.0)) if scripted else None,
            cut=rng.choice((0.0, 0.0, 0.3, 0.7)),
            invalid=rng.choice((0.0, 0.0, 0.0, 0.1)),
        ),
        num_sequences,
        priority=rng.choice((0, 0, 0, 1)),
        hold_blocks=num_sequences == 1 and rng.random() < 0.15,
        pause=rng.choice((0, 0, 0, 1, 3, 12)),
        abort_after=rng.randint(0, 8) if rng.random() < 0.08 else None,
        hand_over=_hand_over(rng, len(prompt), num_sequences) if pair and rng.random() < 0.85 else None,
    )


def _hand_over(rng: random.Random, length: int, num_sequences: int) -> HandOver:
    broken_at = rng.randint(0, length) if rng.random() < 0.12 else None
    carry = num_sequences == 1 and rng.random() < 0.4
    return HandOver(carry=carry, row_lost=rng.random() < 0.3, broken_at=broken_at)


def _prompt(
    rng: random.Random, texts: Texts, before: list[Ask], num_modules: int, unit: int, top: int
) -> tuple[str, tuple[int, ...]]:
    """(how it came about, tokens), at most ``top`` + N + 2 long."""
    kind = rng.random()
    if before and kind < 0.15:
        return "repeat", rng.choice(before).prompt
    if before and kind < 0.35:
        earlier = rng.choice(before)
        answer = texts.after(earlier.prompt, earlier.sampling.max_tokens) if earlier.sampling.greedy else []
        tail = texts.beginning(rng.randrange(10, 12), rng.randint(0, 2))
        return "turn", (*earlier.prompt, *answer, *tail)[: top + num_modules + 2]
    near = rng.choice((unit, unit, 2 * unit)) + rng.choice((-1, 0, 0, 1, num_modules - 1, num_modules))
    length = rng.randint(1, 4 * num_modules + 3) if rng.random() < 0.5 else min(max(1, near), top)
    shared = texts.beginning(rng.randrange(2), length)
    if kind < 0.65:  # parts from others with the same beginning
        return "foreign", (*shared, *texts.beginning(rng.randrange(10, 13), rng.randint(1, num_modules + 2)))
    return "shared", tuple(shared)
