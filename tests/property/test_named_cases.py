"""Cases that broke other systems, each by name, on real weights: tokens and draft KV are those of a cold run.

What is not here stands where its part is tested: docs/exactness.md has the whole list.
"""

from collections.abc import Sequence
from functools import cache

import pytest

from common.block_hash import BlockHasher
from common.engine.draft_kv_oracle import draft_kv_max_diff
from common.engine.engine import Engine
from common.engine.rules import SchedulerConfig
from common.engine.speculation import multi_module
from common.errors import CacheInUse, ConfigError
from common.kv_cache.storage import KVStorage
from common.kv_events import AllBlocksCleared
from common.model.mtp import MtpModules
from common.model.transformer import Transformer
from common.request import FinishReason, Request, RequestState, TokenLogprob
from tests.builders import (
    VOCAB,
    drain,
    greedy_tokens,
    hybrid_config,
    make_engine,
    make_request,
    random_modules,
    random_prompt,
    random_trunk,
)

LIMIT, SEEN = 1e-4, 1e-2  # fp32; what a broken rule must at least show
MODULES = (1, 2, 4, 8)
Pair = tuple[Engine, KVStorage]


@cache
def weights(
    n: int, layers: tuple[str, ...] = ("full_attention", "sliding_attention"), windows: tuple[int, ...] = (6,)
) -> tuple[Transformer, MtpModules]:
    """Modules take turns: full attention, then each of the trunk's windows."""
    trunk = random_trunk(config=hybrid_config(layers, windows))
    turns = (None, *windows)
    return trunk, random_modules(trunk, n, windows=[turns[m % len(turns)] for m in range(n)])


def engine_with(n: int, **options: int | bool) -> Pair:
    return make_engine(*weights(n), **options)  # type: ignore[arg-type]


@cache
def truth(prompt: tuple[int, ...], count: int, trunk_of: int = 1) -> list[int]:
    return greedy_tokens(weights(trunk_of)[0], prompt, count)


def outputs(request: Request) -> list[int]:
    return request.token_ids[request.num_prompt_tokens :]


def kv_diff(pair: Pair, request: Request, models: tuple[Transformer, MtpModules]) -> float:
    trunk, modules = models
    tables = pair[0].tables(request.request_id)
    return draft_kv_max_diff(
        trunk, modules, modules.num_modules, pair[1], request.token_ids, request.num_computed, tables
    )


def check_held(pair: Pair, request: Request, n: int) -> None:
    """It ended and holds its blocks: tokens as the trunk alone says them, draft KV as of one pass."""
    assert request.state is RequestState.HELD
    prompt = tuple(request.token_ids[: request.num_prompt_tokens])
    assert outputs(request) == truth(prompt, request.sampling.max_tokens)
    assert kv_diff(pair, request, weights(n)) < LIMIT
    pair[0].release(request.request_id)
    pair[0].check_invariants()


def wrong(request: Request, count: int) -> tuple[int, ...]:
    """Drafts of which the first is not what the trunk will say."""
    prompt = tuple(request.token_ids[: request.num_prompt_tokens])
    coming = truth(prompt, request.num_output_tokens + count)[request.num_output_tokens :]
    return tuple((token + 1) % VOCAB for token in coming)


# ---- hits -----------------------------------------------------------------------------------------------


def second_of_two_continuations(n: int, lookahead: int) -> tuple[float, int]:
    """A = X + t1 + ..., B = X + t2 + the same, |X| three blocks: (B's draft KV against one pass, its hit)."""
    worst, hit = 0.0, 0
    for seed in range(3):
        pair = engine_with(n)
        pair[0].scheduler.kv.hasher = BlockHasher(4, lookahead)
        shared = random_prompt(12, seed)
        for last in (1, 2):
            request = make_request([*shared, last, *random_prompt(n, 9)], 12, hold_blocks=True)
            pair[0].add(request)
            drain(pair[0])
            if last == 1:
                pair[0].release(request.request_id)
        worst = max(worst, kv_diff(pair, request, weights(n)))
        hit = request.num_cached_tokens
    return worst, hit


@pytest.mark.parametrize("n", MODULES)
def test_a_is_x_and_t1_then_b_is_x_and_t2(n: int) -> None:
    worst, hit = second_of_two_continuations(n, n)
    assert worst < LIMIT
    assert hit == max(0, (12 - n) // 4 * 4)
    # Control: the hash ignores the lookahead, and the last block of X was computed from t1.
    worst, hit = second_of_two_continuations(n, 0)
    assert hit == 12
    assert worst > SEEN


@pytest.mark.parametrize("n", MODULES)
def test_identical_prompts_in_one_step_both_compute_and_are_exact(n: int) -> None:
    pair = engine_with(n)
    requests = [make_request(random_prompt(17, 3), 9, hold_blocks=True) for _ in range(3)]
    for request in requests:
        pair[0].add(request)
    pair[0].step()
    assert [r.num_cached_tokens for r in requests] == [0, 0, 0]
    drain(pair[0])
    for request in requests:
        check_held(pair, request, n)


THREE_GROUPS = ("full_attention", "sliding_attention", "sliding_attention")


@pytest.mark.parametrize("n", [0, 2, 4])
@pytest.mark.parametrize(("windows", "block_size"), [((6, 11), 4), ((2, 3), 8), ((5, 21), 1)])
def test_a_repeated_prompt_with_full_and_two_window_groups(
    n: int, windows: tuple[int, int], block_size: int
) -> None:
    """Windows of different lengths, also shorter than a block: the same hit and the same tokens again."""
    trunk, modules = weights(max(n, 1), THREE_GROUPS, windows)
    pair = make_engine(trunk, modules if n else None, num_blocks=160, block_size=block_size)
    prompt = random_prompt(34, 8)
    expected = greedy_tokens(trunk, prompt, 10)
    for times in range(3):
        request = make_request(prompt, 10, hold_blocks=True)
        pair[0].add(request)
        drain(pair[0])
        assert outputs(request) == expected
        assert request.num_cached_tokens == bool(times) * ((34 - max(n, 1)) // block_size * block_size)
        if n:
            assert kv_diff(pair, request, (trunk, modules)) < LIMIT
        pair[0].release(request.request_id)
        pair[0].check_invariants()


# ---- drafts ---------------------------------------------------------------------------------------------


def step_with_wrong_drafts(pair: Pair, request: Request, n: int, times: int) -> None:
    for _ in range(times):
        request.drafts = wrong(request, n)[: len(request.drafts)]
        before = request.num_output_tokens
        pair[0].step()
        pair[0].check_invariants()
        if request.state is RequestState.RUNNING:
            assert request.num_output_tokens == before + 1, "all drafts are rejected"
            assert kv_diff(pair, request, weights(n)) < LIMIT


@pytest.mark.parametrize("n", MODULES)
def test_short_prompts_with_all_drafts_rejected_on_the_first_step(n: int) -> None:
    for length in range(1, 2 * n + 1):
        pair = engine_with(n)
        request = make_request(random_prompt(length, length), 2 * n + 4, hold_blocks=True)
        pair[0].add(request)
        pair[0].step()
        step_with_wrong_drafts(pair, request, n, times=1)
        drain(pair[0])
        check_held(pair, request, n)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_reprefilled_positions_at_the_trailing_edge_of_a_window(n: int) -> None:
    """Blocks of one token and every draft rejected: each step re-prefills N-1 positions, whose rows see N-1
    tokens more than the window's own last position does."""
    pair = engine_with(n, block_size=1, num_blocks=90)
    request = make_request(random_prompt(15, 1), 20, hold_blocks=True)
    pair[0].add(request)
    pair[0].step()
    step_with_wrong_drafts(pair, request, n, times=12)
    drain(pair[0])
    check_held(pair, request, n)


@pytest.mark.parametrize("n", MODULES)
def test_drafts_that_are_no_tokens_are_rejections_and_reach_no_kernel(n: int) -> None:
    pair = engine_with(n)
    request = make_request(random_prompt(13, 4), 24, hold_blocks=True)
    pair[0].add(request)
    pair[0].step()
    for invalid in (-1, VOCAB, 1 << 40):
        for place in range(n):
            request.drafts = (*request.drafts[:place], invalid, *request.drafts[place + 1 :])[:n]
            if request.state is RequestState.RUNNING:
                pair[0].step()
    drain(pair[0])
    check_held(pair, request, n)


@pytest.mark.parametrize("n", MODULES)
def test_drafts_near_max_model_len_are_cut_and_log_probabilities_stay_right(n: int) -> None:
    for limit in range(14, 14 + n + 2):
        ended = []
        for pair in (engine_with(n, max_model_len=limit), make_engine(weights(n)[0], max_model_len=limit)):
            request = make_request(random_prompt(12, 6), 40, logprobs=3)
            pair[0].add(request)
            logprobs: list[TokenLogprob] = []
            while pair[0].has_work:
                for update in pair[0].step().updates:
                    assert update.logprobs is not None
                    assert len(update.logprobs) == len(update.new_tokens)
                    logprobs += update.logprobs
            assert request.finish_reason is FinishReason.LENGTH
            assert request.num_tokens == limit
            ended.append((outputs(request), logprobs))
        (tokens, ours), (alone, theirs) = ended
        assert tokens == alone
        assert [p.logprob for p in ours] == pytest.approx([p.logprob for p in theirs], abs=1e-4)
        assert [[i for i, _ in p.top] for p in ours] == [[i for i, _ in p.top] for p in theirs]


# ---- chunks, preemption ---------------------------------------------------------------------------------


@pytest.mark.parametrize("n", MODULES)
def test_a_budget_below_what_the_drafter_looks_ahead_is_refused(n: int) -> None:
    for budget in range(1, n + 1):
        with pytest.raises(ConfigError, match=f"{budget} tokens .* {n} tokens ahead needs at least {n + 1}"):
            SchedulerConfig(budget, 4, 100, multi_module(n))
        with pytest.raises(ConfigError, match=f"long_prefill_token_threshold {budget}"):
            SchedulerConfig(64, 4, 100, multi_module(n), long_prefill_token_threshold=budget)
    SchedulerConfig(n + 1, 4, 100, multi_module(n))


@pytest.mark.parametrize("n", MODULES)
def test_chunks_that_would_leave_one_to_n_tokens(n: int) -> None:
    for left in range(1, n + 1):
        length = 2 * n + 3 + left
        pair = engine_with(n, budget=length - left)
        request = make_request(random_prompt(length, left), 9, hold_blocks=True)
        pair[0].add(request)
        pair[0].step()
        assert length - request.num_computed == n, "the chunk gives tokens back, so that N are left"
        assert kv_diff(pair, request, weights(n)) < LIMIT
        drain(pair[0])
        check_held(pair, request, n)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("n", MODULES)
def test_preemption_with_drafts_in_flight_and_the_resume(n: int, caching: bool) -> None:
    """0, 1, 3 or N drafts of the preempted request; with a warm prefix cache its own blocks are hits."""
    for in_flight in sorted({0, 1, min(3, n), n}):
        pair = engine_with(n, prefix_caching=caching)
        scheduler = pair[0].scheduler
        request = make_request(random_prompt(16, 2), 24, hold_blocks=True)
        pair[0].add(request)
        while request.num_output_tokens < 6:
            pair[0].step()
        request.drafts = request.drafts[:in_flight]
        assert len(request.drafts) == in_flight
        known = list(request.token_ids)
        scheduler._preempt(request)
        assert (request.drafts, request.num_computed, request.token_ids) == ((), 0, known)
        pair[0].check_invariants()
        resumed = first_start(pair, request)
        assert (resumed > 0) is caching
        assert resumed <= len(known) - max(n, 1)
        drain(pair[0])
        check_held(pair, request, n)


def first_start(pair: Pair, request: Request) -> int:
    """Steps until the request is scheduled; the first position it computes."""
    engine = pair[0]
    for _ in range(3):
        batch = engine.scheduler.schedule()
        engine.scheduler.apply(batch, engine.runner.run(batch))
        starts = [e.start for e in batch.entries if e.request_id == request.request_id]
        if starts:
            return starts[0]
    raise AssertionError(f"{request!r} does not come back")


# ---- the prefix cache -----------------------------------------------------------------------------------


def test_a_reset_of_the_prefix_cache_is_refused_while_requests_run_and_told_when_idle() -> None:
    engine, _ = engine_with(2)
    prompt: Sequence[int] = random_prompt(20, 5)
    request = make_request(prompt, 4, request_id="busy one")
    engine.add(request)
    for _ in range(2):
        with pytest.raises(CacheInUse, match=r"1 request.*busy one"):
            engine.reset_prefix_cache()
        engine.step()
    drain(engine)
    engine.take_events()
    engine.reset_prefix_cache()
    assert engine.take_events() == [AllBlocksCleared()]
    again = make_request(prompt, 4)
    engine.add(again)
    drain(engine)
    assert again.num_cached_tokens == 0
    assert outputs(again) == outputs(request)
