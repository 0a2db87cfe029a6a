"""Other ways to draft - one module applied N times, n-gram look-up - and plain hashes with the dropped block.

Tokens, draft KV and hits, aggregated and through the hand-over, whatever is accepted.
"""

import random
from collections.abc import Callable

import pytest

from common.config import EngineOptions
from common.engine.draft_kv_oracle import draft_kv_max_diff
from common.engine.drafter import Choice
from common.engine.engine import Engine
from common.engine.methods import (
    Method,
    check_dropped_block,
    choose_method,
    multi_method,
    ngram_method,
    recursive_method,
)
from common.engine.model_runner import ModelRunner
from common.engine.ngram_drafter import NgramDrafter, NgramIndex
from common.engine.recursive_speculator import RecursiveSpeculator
from common.engine.speculator import MtpSpeculator
from common.errors import ConfigError
from common.kv_cache.storage import KVStorage
from common.request import Request
from tests.builders import (
    VOCAB,
    drain,
    greedy_tokens,
    make_engine,
    make_request,
    random_modules,
    random_prompt,
    random_trunk,
    run_to_end,
)
from tests.pairing import HANDOFFS, Handoff, hand_over

LIMIT, SEEN = 1e-4, 1e-2
TRUNK = random_trunk()
MODULES = {n: random_modules(TRUNK, n) for n in (1, 2, 4)}
METHODS: dict[str, tuple[Method, int]] = {  # name: (method, modules in the folder)
    "one module once": (recursive_method(1), 1),
    "one module four times": (recursive_method(4), 1),
    "one module eight times": (recursive_method(8), 1),
    "n-gram": (ngram_method(4), 1),
    "four modules": (multi_method(4), 4),
}


def kv_diff(pair: tuple[Engine, KVStorage], request: Request, method: Method, folder: int) -> float:
    if method.num_modules == 0:
        return 0.0
    return draft_kv_max_diff(
        TRUNK,
        MODULES[folder],
        method.num_modules,
        pair[1],
        request.token_ids,
        request.num_computed,
        request.tables,
    )


def truth_of(prompt: list[int]) -> Callable[[int], int]:
    """The token at a position of the uninterrupted run."""
    tokens = [*prompt, *greedy_tokens(TRUNK, prompt, 48)]
    return lambda position: tokens[position] if position < len(tokens) else 0


def scripted(pair: tuple[Engine, KVStorage], choose: Choice) -> None:
    runner = pair[0].runner
    assert isinstance(runner, ModelRunner)
    assert isinstance(runner.speculator, MtpSpeculator | NgramDrafter)
    runner.speculator._choose = choose  # the injection point of tests


def sometimes(truth: Callable[[int], int], rate: float, rng: random.Random) -> Choice:
    """Right about so often, else certainly wrong."""
    return lambda request_id, position, token: (truth(position) + (rng.random() >= rate)) % VOCAB


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("rate", [0.0, 0.6, 1.0])
def test_tokens_and_draft_kv_are_exact_whatever_is_accepted(name: str, rate: float) -> None:
    method, folder = METHODS[name]
    rng = random.Random(f"{name}{rate}")
    for length in (1, 2, 4, 5, 11, 16, 23):
        prompt = random_prompt(length, length)
        truth = truth_of(prompt)
        pair = make_engine(TRUNK, MODULES[folder], budget=rng.choice((9, 16, 64)), method=method)
        scripted(pair, sometimes(truth, rate, rng))
        request = make_request(prompt, 24, hold_blocks=True)
        assert run_to_end(pair[0], request) == greedy_tokens(TRUNK, prompt, 24)
        assert kv_diff(pair, request, method, folder) < LIMIT
        if rate == 1.0 and name != "n-gram":
            assert request.spec.num_accepted == request.spec.num_draft_tokens > 0
        if rate == 0.0:
            assert request.spec.num_accepted == 0


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("carry", [True, False])
@pytest.mark.parametrize("handoff", HANDOFFS)
def test_the_hand_over_is_exact_for_every_method(name: str, handoff: Handoff, carry: bool) -> None:
    method, folder = METHODS[name]
    prefill = make_engine(TRUNK, MODULES[folder], budget=16, method=method)
    decode = make_engine(TRUNK, MODULES[folder], budget=16, method=method)
    for length in (1, 2, 4, 5, 8, 17, 30):
        prompt = random_prompt(length, 100 + length)
        request = make_request(prompt, 16, hold_blocks=True)
        lookahead = method.speculation.lookahead
        hand_over(prefill, decode, request, lookahead, handoff=handoff, ship_carry=carry)
        if handoff == "carry" and name != "n-gram":
            assert len(request.drafts) == method.speculation.num_drafts
        drain(decode[0])
        assert request.token_ids[length:] == greedy_tokens(TRUNK, prompt, 16)
        assert kv_diff(decode, request, method, folder) < LIMIT
        decode[0].release(request.request_id)


def test_drafts_of_one_module_end_where_the_sequence_must() -> None:
    """Near the longest sequence there is no slot to go on in: drafts are cut, tokens are right."""
    method = recursive_method(8)
    pair = make_engine(TRUNK, MODULES[1], method=method, max_model_len=20)
    request = make_request(random_prompt(9, 3), 64, hold_blocks=True)
    assert run_to_end(pair[0], request) == greedy_tokens(TRUNK, random_prompt(9, 3), 11)
    assert kv_diff(pair, request, method, 1) < LIMIT


def test_seeded_tokens_do_not_depend_on_the_method() -> None:
    prompt = random_prompt(12, 7)
    said = set()
    for method, folder in METHODS.values():
        engine, _ = make_engine(TRUNK, MODULES[folder], method=method)
        request = make_request(prompt, 24, temperature=0.9, seed=5, request_id="seeded")
        said.add(tuple(run_to_end(engine, request)))
    plain, _ = make_engine(TRUNK)
    said.add(tuple(run_to_end(plain, make_request(prompt, 24, temperature=0.9, seed=5))))
    assert len(said) == 1


@pytest.mark.parametrize("lookahead", [0, 1, 2, 4])
@pytest.mark.parametrize("size", [4, 16])
def test_plain_hashes_drop_the_last_block(lookahead: int, size: int) -> None:
    """hit = max(0, floor((L-1)/B)*B - B) for a cached prompt of L tokens."""
    method = multi_method(lookahead) if lookahead else multi_method(0)
    modules = MODULES.get(lookahead)
    engine, _ = make_engine(TRUNK, modules, block_size=size, method=method, drop_last_block=True)
    for length in (1, size - 1, size, size + 1, 2 * size, 2 * size + 1, 3 * size + lookahead, 5 * size):
        prompt = random_prompt(length, 500 + length)
        run_to_end(engine, make_request(prompt, size + 8))
        again = make_request(prompt, 1)
        run_to_end(engine, again)
        assert again.num_cached_tokens == max(0, (length - 1) // size * size - size)


def diverging(drop: bool, cut_drop: bool = False) -> float:
    """A = X + a..., then B = X + b... with plain hashes: the draft KV of B after its hit."""
    method = multi_method(4)
    pair = make_engine(TRUNK, MODULES[4], block_size=4, method=method, drop_last_block=drop)
    if cut_drop:
        pair[0].scheduler.kv.drop_last_block = False
    worst = 0.0
    for seed in range(4):
        shared = random_prompt(16, seed)
        run_to_end(pair[0], make_request([*shared, *random_prompt(9, 70 + seed)], 2))
        second = make_request([*shared, *random_prompt(9, 90 + seed)], 2, hold_blocks=True)
        run_to_end(pair[0], second)
        assert second.num_cached_tokens > 0
        worst = max(worst, kv_diff(pair, second, method, 4))
        pair[0].release(second.request_id)
    return worst


def test_the_dropped_block_is_what_makes_plain_hashes_exact() -> None:
    assert diverging(drop=False) < LIMIT  # lookahead hashes
    assert diverging(drop=True) < LIMIT
    assert diverging(drop=True, cut_drop=True) > SEEN  # control: plain hashes without the drop


def returning(drop: bool, checked: bool = True) -> tuple[int, float]:
    """A = X + a, B = X + b, then B with its answer and more: hit and draft KV of that last one."""
    method = multi_method(4)
    pair = make_engine(TRUNK, MODULES[4], block_size=4, method=method, drop_last_block=drop)
    if not checked:
        pair[0].scheduler.kv.num_unhashed = 0
    a, b = ([*random_prompt(17, 1), *random_prompt(12, seed)] for seed in (2, 3))
    for prompt in (a, b):
        run_to_end(pair[0], make_request(prompt, 1))
    third = make_request([*b, *random_prompt(9, 4)], 1, hold_blocks=True)
    run_to_end(pair[0], third)
    return third.num_cached_tokens, kv_diff(pair, third, method, 4)


def test_a_second_turn_reads_no_block_of_another_continuation() -> None:
    """The block in which A and B part is dropped from B's first hit, but stays A's in the cache, and would
    lie in the middle of B's next hit. Lookahead hashes tell it apart; plain ones look at what followed it."""
    hit, diff = returning(drop=False)
    assert (hit, diff < LIMIT) == (24, True)
    hit, diff = returning(drop=True)
    assert (hit, diff < LIMIT) == (12, True)  # tokens 16.. follow the block [12, 16) and differ from 17 on
    hit, diff = returning(drop=True, checked=False)  # control: the drop alone
    assert (hit, diff > SEEN) == (20, True)


def test_a_block_shorter_than_the_lookahead_is_refused_with_plain_hashes() -> None:
    check_dropped_block(4, multi_method(4).speculation)
    with pytest.raises(ConfigError, match=r"last 3 positions .* looks 4 tokens ahead"):
        check_dropped_block(3, multi_method(4).speculation)


def test_the_method_follows_from_options_and_folder() -> None:
    def chosen(modules: int, **options: int | str) -> Method:
        folder = MODULES.get(modules)
        return choose_method(folder, EngineOptions(**options))  # type: ignore[arg-type]

    assert chosen(4).speculation == multi_method(4).speculation
    assert chosen(4, num_speculative_tokens=2).speculation == multi_method(2).speculation
    assert chosen(4, num_speculative_tokens=0).speculation.num_drafts == 0
    assert chosen(1, num_speculative_tokens=6).speculation == recursive_method(6).speculation
    assert chosen(0).speculation.num_drafts == 0
    assert chosen(0, speculative_method="ngram").speculation.lookahead == 0
    assert chosen(4, speculative_method="ngram", num_speculative_tokens=3).speculation.num_drafts == 3
    with pytest.raises(ConfigError, match="has 4 MTP modules"):
        chosen(4, num_speculative_tokens=5)


def test_the_index_proposes_what_followed_the_longest_latest_match() -> None:
    index = NgramIndex()
    assert index.propose([1, 2, 3], 4) == []
    assert index.propose([1, 2, 3, 9, 1, 2, 3], 4) == [9, 1, 2, 3]
    assert index.propose([1, 2, 3, 9, 1, 2, 3, 8, 2, 3], 2) == [8, 2]  # the later of two matches of (2, 3)
    assert index.propose([1, 2, 3, 9, 1, 2, 3, 8, 2, 3, 5, 9, 1, 2, 3], 1) == [8]


def test_the_index_agrees_with_a_search_through_all_tokens() -> None:
    rng = random.Random(4)
    for _ in range(60):
        tokens = [rng.randrange(4) for _ in range(rng.randrange(1, 60))]
        index, at = NgramIndex(), 0
        while at < len(tokens):
            at = min(len(tokens), at + rng.randrange(1, 6))
            known = tokens[:at]
            expected: list[int] = []
            for n in range(min(4, at), 1, -1):
                ends = [e for e in range(n, at) if known[e - n : e] == known[-n:]]
                if ends:
                    expected = known[ends[-1] : ends[-1] + 3]
                    break
            assert index.propose(known, 3) == expected


def test_recursion_is_a_speculator_over_one_module() -> None:
    engine, _ = make_engine(TRUNK, MODULES[1], method=recursive_method(4))
    assert isinstance(engine.runner, ModelRunner)
    assert isinstance(engine.runner.speculator, RecursiveSpeculator)
    assert engine.scheduler.config.speculation.num_slots == 3
