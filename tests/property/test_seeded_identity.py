"""A seeded request gives the same tokens however they come about: alone, batched, preempted, in other
chunks, at any draft depth, handed over. Each way also says what it must have exercised.
"""

import random
from collections.abc import Callable, Sequence
from functools import cache, partial

import pytest

from common.engine.engine import Engine
from common.kv_cache.storage import KVStorage
from common.model.mtp import MtpModules
from common.model.transformer import Transformer
from common.request import Request
from tests.builders import drain, make_engine, make_request, random_modules, random_prompt, random_trunk
from tests.pairing import hand_over

N = 4
PROMPT = random_prompt(21, 77)
NUM_OUTPUTS = 24
SEED = 4_294_967_311
SAMPLINGS: dict[str, dict[str, float]] = {
    "plain": {"temperature": 1.0},
    "truncated": {"temperature": 0.9, "top_k": 20, "top_p": 0.95, "min_p": 0.01},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
}

Make = Callable[[], Request]
"""A fresh copy of the one seeded request."""


@cache
def weights() -> tuple[Transformer, MtpModules]:
    trunk = random_trunk(window=6)
    return trunk, random_modules(trunk, N, windows=[6, None, 6, None])


def engine_with(**options: int | bool) -> tuple[Engine, KVStorage]:
    return make_engine(*weights(), **options)  # type: ignore[arg-type]


def seeded(sampling: str, seed: int = SEED) -> Request:
    return make_request(PROMPT, NUM_OUTPUTS, seed=seed, **SAMPLINGS[sampling])  # type: ignore[arg-type]


@cache
def expected(sampling: str) -> list[int]:
    """Alone, without speculation, the prompt in one chunk."""
    engine, _ = make_engine(weights()[0])
    request = seeded(sampling)
    engine.add(request)
    drain(engine)
    return request.token_ids[len(PROMPT) :]


def run(request: Request, num_others: int = 0, **options: int | bool) -> Engine:
    """``num_others``: older greedy, seeded and unseeded ones of several lengths."""
    engine, _ = engine_with(**options)
    others = [
        make_request(
            random_prompt(5 + 3 * i, i), 20, temperature=(0.0, 0.7, 1.1)[i % 3], seed=(None, 5)[i % 2]
        )
        for i in range(num_others)
    ]
    for each in (*others, request):
        each.arrival_time_s = 0.0  # in the order in which they are added
        engine.add(each)
    drain(engine)
    return engine


def alone(make: Make) -> Sequence[Request]:
    request = make()
    engine = run(request)
    assert 0 < engine.stats.num_accepted < engine.stats.num_draft_tokens
    return [request]


def with_15_others(make: Make) -> Sequence[Request]:
    request = make()
    assert run(request, 15, num_blocks=400, max_num_seqs=16).stats.num_accepted > 0
    return [request]


def preempted(make: Make) -> Sequence[Request]:
    requests = [make() for _ in range(3)]
    for request, num_blocks in zip(requests, (20, 22, 24), strict=True):
        run(request, 2, num_blocks=num_blocks, max_num_seqs=3)
    assert sum(request.num_preemptions for request in requests) > 0
    return requests


def in_other_chunks(make: Make) -> Sequence[Request]:
    requests = [make() for _ in range(4)]
    for request, budget, threshold in zip(requests, (5, 7, 16, 64), (0, 0, 5, 6), strict=True):
        run(request, 2, budget=budget, threshold=threshold)
    return requests


def at_other_depths(make: Make) -> Sequence[Request]:
    """Fewer modules, and a depth that changes from step to step."""
    requests = [make() for _ in range(4)]
    for request, num_modules in zip(requests, (1, 2, 3), strict=False):
        run(request, num_modules=num_modules)
    engine, _ = engine_with()
    engine.add(requests[-1])
    rng, depths = random.Random(3), set()
    while engine.has_work:
        engine.step()
        requests[-1].drafts = requests[-1].drafts[: rng.randint(0, N)]
        depths.add(len(requests[-1].drafts))
    assert len(depths) > 2
    return requests


def handed_over(make: Make) -> Sequence[Request]:
    """Back-off, with the carry row and without."""
    requests = [make(), make()]
    for request in requests:
        prefill, decode = engine_with(), engine_with()
        hand_over(prefill, decode, request, N, ship_carry=request is requests[0])
        drain(decode[0])
        assert decode[0].stats.num_accepted > 0
    return requests


def with_a_warm_cache(make: Make) -> Sequence[Request]:
    engine, _ = engine_with()
    requests = [make(), make()]
    for request in requests:
        engine.add(request)
        drain(engine)
    assert requests[1].num_cached_tokens > 0
    return requests


WAYS = (alone, with_15_others, preempted, in_other_chunks, at_other_depths, handed_over, with_a_warm_cache)


@pytest.mark.parametrize("sampling", list(SAMPLINGS))
@pytest.mark.parametrize("way", WAYS)
def test_a_seeded_request_gives_the_same_tokens(
    way: Callable[[Make], Sequence[Request]], sampling: str
) -> None:
    for request in way(partial(seeded, sampling)):
        assert request.token_ids[len(PROMPT) :] == expected(sampling)


def test_another_seed_gives_other_tokens() -> None:
    request = seeded("plain", SEED + 1)
    run(request)
    assert request.token_ids[len(PROMPT) :] != expected("plain")
