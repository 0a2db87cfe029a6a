"""Prompts that sit on the edges: lengths around N and the block size, and turns that hit both caches."""

import random
from dataclasses import dataclass

from cli.bench_prompts import shuffled_text
from common.tokenizer import Tokenizer


@dataclass(frozen=True)
class CheckPrompt:
    """``follows``: index of the prompt whose tokens and answer this turn continues; its ids come after."""

    token_ids: tuple[int, ...]
    follows: int | None = None


def check_prompts(
    tokenizer: Tokenizer, count: int, num_modules: int, block_size: int, max_tokens: int, seed: int = 0
) -> list[CheckPrompt]:
    """``count`` prompts: lengths 1..2N, B-1, B, B+1, 3B, then longer ones of which every second goes on
    from the one before. All at most ``max_tokens`` long."""
    rng = random.Random(seed)
    edges = [*range(1, 2 * num_modules + 1), block_size - 1, block_size, block_size + 1, 3 * block_size]
    lengths = [n for n in edges if 0 < n <= max_tokens][:count]
    prompts = [CheckPrompt(_ids(tokenizer, rng, n)) for n in lengths]
    while len(prompts) < count:
        turn = len(prompts)
        if turn > len(lengths) and prompts[-1].follows is None:
            prompts.append(CheckPrompt(_ids(tokenizer, rng, rng.randint(5, 40)), follows=turn - 1))
        else:
            longest = max(2, min(12 * block_size, max_tokens // 2))
            prompts.append(
                CheckPrompt(_ids(tokenizer, rng, rng.randint(min(4 * block_size, longest), longest)))
            )
    return prompts


def _ids(tokenizer: Tokenizer, rng: random.Random, length: int) -> tuple[int, ...]:
    ids = tokenizer.encode(shuffled_text(rng, 8 * length + 40), add_special_tokens=False)
    return tuple(ids[:length])
