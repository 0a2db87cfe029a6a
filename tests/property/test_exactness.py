"""Draft KV and tokens are those of one uninterrupted run, whatever happened on the way (02-exactness).

A real runner on small random models whose drafts are right about half of the time. Every case compares
tokens with the trunk alone, draft KV with one dense pass, and drafts with those of a plain engine at equal
known tokens. The negative controls break one rule each and must be seen.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from common.engine.batch import RunnerOutput, ScheduledBatch, ScheduledRequest
from common.engine.draft_kv_oracle import draft_kv_max_diff
from common.engine.drafter import Verified
from common.engine.engine import Engine
from common.engine.model_runner import ModelRunner
from common.engine.speculator import MtpSpeculator, Rows
from common.kv_cache.storage import KVStorage
from common.model.mtp import MtpModules
from common.model.transformer import Transformer
from common.request import Request, RequestState
from tests.builders import (
    VOCAB,
    drain,
    greedy_tokens,
    make_engine,
    make_request,
    random_modules,
    random_prompt,
    random_trunk,
)
from tests.pairing import hand_over

LIMIT = 1e-4  # fp32
SEEN = 100 * LIMIT  # what a broken rule must at least show
NEAR_TIE = 1e-4  # logits closer than this may be chosen either way

Pair = tuple[Engine, KVStorage]


@dataclass(frozen=True)
class Model:
    """Weights, and what the trunk alone says."""

    trunk: Transformer
    modules: MtpModules | None
    num_modules: int

    def engine(self, **options: int | bool) -> Pair:
        return make_engine(self.trunk, self.modules, **options)  # type: ignore[arg-type]

    def kv_diff(self, engine: Engine, storage: KVStorage, request: Request) -> float:
        """Of a request that is paused or held."""
        if self.modules is None:
            return 0.0
        tables = engine.tables(request.request_id)
        return draft_kv_max_diff(
            self.trunk,
            self.modules,
            self.num_modules,
            storage,
            request.token_ids,
            request.num_computed,
            tables,
        )


@cache
def model(num_modules: int, window: int | None) -> Model:
    trunk = random_trunk(window=window)
    if num_modules == 0:
        return Model(trunk, None, 0)
    # With a window: some modules in the trunk's window group, some in the full one.
    windows = [None if window is None or m % 2 else window for m in range(num_modules)]
    return Model(trunk, random_modules(trunk, num_modules, windows=windows), num_modules)


@cache
def truth(window: int | None, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    return tuple(greedy_tokens(model(0, window).trunk, prompt, count))


class DraftLog:
    """What was proposed at which known tokens, by wrapping a runner's `run`."""

    def __init__(self, engine: Engine) -> None:
        self.drafts: dict[tuple[int, ...], tuple[int, ...]] = {}
        run = engine.runner.run

        def logged(batch: ScheduledBatch) -> RunnerOutput:
            output = run(batch)
            for entry, result in zip(batch.entries, output.outputs, strict=True):
                if result.next_drafts:
                    self.drafts[(*entry.known, *result.tokens)] = result.next_drafts
            return output

        engine.runner.run = logged  # type: ignore[method-assign]


def check_held(m: Model, pair: Pair, requests: Sequence[Request], window: int | None) -> None:
    """Tokens and draft KV of requests that ended and hold their blocks; then lets them go."""
    engine, storage = pair
    for request in requests:
        assert request.state is RequestState.HELD, request
        prompt = tuple(request.token_ids[: request.num_prompt_tokens])
        assert tuple(request.token_ids[len(prompt) :]) == truth(window, prompt, request.num_output_tokens)
        assert request.num_output_tokens == request.sampling.max_tokens
        assert m.kv_diff(engine, storage, request) < LIMIT, request
        engine.release(request.request_id)
    engine.check_invariants()
    for pool in engine.scheduler.kv.pools:
        assert pool.num_free == pool.num_blocks - 1


def lengths(num_modules: int, block_size: int) -> list[int]:
    """Prompt lengths: the shortest ones, around block boundaries, up to 4N + 3."""
    top = 4 * num_modules + 3
    around = {b + d for b in range(block_size, top, block_size) for d in (-1, 0, 1)}
    return sorted(
        n for n in {1, 2, num_modules, num_modules + 1, 2 * num_modules, top} | around if 1 <= n <= top
    )


CASES = [(n, w) for n in (0, 1, 2, 4, 8) for w in (None, 6)]


@pytest.mark.parametrize(("n", "window"), CASES)
def test_every_prompt_length_alone(n: int, window: int | None) -> None:
    m = model(n, window)
    rng = random.Random(n)
    for length in lengths(n, 4):
        pair = m.engine(budget=rng.choice((n + 1, n + 2, 2 * n + 3, 64)), prefix_caching=False)
        request = make_request(random_prompt(length, length), 10, hold_blocks=True)
        pair[0].add(request)
        drain(pair[0])
        check_held(m, pair, [request], window)


def step_and_check(m: Model, pair: Pair, requests: Sequence[Request]) -> None:
    """One step; afterwards the draft KV of everything that runs is exact, not only at the end."""
    engine, storage = pair
    engine.step()
    engine.check_invariants()
    for request in requests:
        if request.state is RequestState.RUNNING:
            assert m.kv_diff(engine, storage, request) < LIMIT, request


# ---- the pair -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ship_carry", [True, False])
@pytest.mark.parametrize(("n", "window"), CASES)
def test_pair_equals_one_engine(n: int, window: int | None, ship_carry: bool) -> None:
    """Tokens, draft KV and drafts at equal known tokens; hits on both nodes from the second prompt on."""
    m, rng = model(n, window), random.Random(n)
    prefill, decode, alone = m.engine(budget=n + 5), m.engine(), m.engine()
    pair_log, alone_log = DraftLog(decode[0]), DraftLog(alone[0])
    base = random_prompt(4 * n + 3 + 8, 3)
    for length in (*lengths(n, 4), 4 * n + 3 + 8):
        prompt = base[:length] + random_prompt(rng.choice((0, 0, 2)), length)
        request = make_request(prompt, 8, hold_blocks=True)
        hand_over(prefill, decode, request, n, ship_carry=ship_carry)
        oracle = make_request(prompt, 8)
        alone[0].add(oracle)
        while request.state is not RequestState.HELD:
            step_and_check(m, decode, [request])
        drain(alone[0])
        check_held(m, decode, [request], window)
        assert oracle.token_ids == request.token_ids
    if n:
        assert pair_log.drafts
        common = pair_log.drafts.keys() & alone_log.drafts.keys()
        assert len(common) > 10
        assert all(pair_log.drafts[k] == alone_log.drafts[k] for k in common)


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_a_prefill_leaves_the_slot_unwritten_whose_token_nobody_knows(n: int) -> None:
    """Module N-1 at C-1 reads token L; every other slot below the cut is there."""
    m = model(n, None)
    length = 2 * n + 3
    cut = length - max(1, n - 1)
    engine, storage = m.engine()
    request = make_request(random_prompt(length, 1), stop_at=cut, hold_blocks=True)
    engine.add(request)
    drain(engine)
    tables = engine.tables(request.request_id)
    for module in range(n):
        layer = m.trunk.config.num_layers + module
        group, _ = storage.layout.locate(layer)
        for position in range(cut):
            k, v = storage.read(layer, tables[group], position, position + 1)
            waits = n > 1 and (module, position) == (n - 1, cut - 1)
            assert bool(k.any()) is bool(v.any()) is not waits
    assert m.kv_diff(engine, storage, request) < LIMIT


def test_pair_with_other_requests_in_the_batch() -> None:
    m = model(4, 6)
    prefill, decode = m.engine(), m.engine(num_blocks=200)
    others = [make_request(random_prompt(7 + i, 20 + i), 14, hold_blocks=True) for i in range(4)]
    for other in others:
        decode[0].add(other)
    requests = []
    for i in range(4):
        decode[0].step()
        request = make_request(random_prompt(15 + i, i), 12, hold_blocks=True)
        hand_over(prefill, decode, request, 4, ship_carry=i % 2 == 0)
        requests.append(request)
    drain(decode[0])
    check_held(m, decode, [*others, *requests], 6)


def test_forks_of_a_handed_over_prompt_are_exact() -> None:
    """n = 3 (seeded, so that the sequences differ): each sequence's draft KV while it runs."""
    m = model(4, 6)
    for ship_carry in (True, False, None):
        for length in (5, 8, 13, 16, 19):
            prefill, decode = m.engine(), m.engine()
            request = make_request(
                random_prompt(length, length), 10, temperature=1.0, seed=5, num_sequences=3
            )
            if ship_carry is None:
                decode[0].add(request)
            else:
                hand_over(prefill, decode, request, 4, ship_carry=ship_carry)
            outputs: dict[str, list[int]] = {}
            while decode[0].has_work:
                running = list(decode[0].scheduler.requests.values())
                output = decode[0].step()
                decode[0].check_invariants()
                for update in output.updates:
                    outputs.setdefault(update.request_id, []).extend(update.new_tokens)
                for sequence in running:
                    if sequence.state is RequestState.RUNNING:
                        assert m.kv_diff(*decode, sequence) < LIMIT
            assert [len(tokens) for tokens in outputs.values()] == [10, 10, 10]
            for index, tokens in enumerate(outputs.values()):
                single = m.engine()
                lone = make_request(request.token_ids[:length], 10, temperature=1.0, seed=5 + index)
                single[0].add(lone)
                drain(single[0])
                assert lone.token_ids[length:] == tokens


# ---- seeded sampling ------------------------------------------------------------------------------------


def sampled(m: Model, prompt: Sequence[int], seed: int, **options: int | bool) -> list[int]:
    engine, _ = m.engine(**options)
    request = make_request(prompt, 12, temperature=0.9, seed=seed, top_k=20, top_p=0.95)
    engine.add(request)
    drain(engine)
    return request.token_ids[len(prompt) :]


def test_seeded_tokens_do_not_depend_on_how_they_were_made() -> None:
    """Without speculation, with it, batched, preempted, handed over: the same tokens."""
    plain, m = model(0, 6), model(4, 6)
    prompts = [random_prompt(9 + i, i) for i in range(5)]
    expected = [sampled(plain, p, i) for i, p in enumerate(prompts)]
    assert len({tuple(e) for e in expected}) == 5
    assert [sampled(m, p, i) for i, p in enumerate(prompts)] == expected
    assert [sampled(m, p, i, num_modules=2, budget=5) for i, p in enumerate(prompts)] == expected
    for num_blocks in (64, 16):  # 16: preemptions
        engine, _ = m.engine(num_blocks=num_blocks, max_num_seqs=5)
        requests = [
            make_request(p, 12, temperature=0.9, seed=i, top_k=20, top_p=0.95) for i, p in enumerate(prompts)
        ]
        for request in requests:
            engine.add(request)
        drain(engine)
        assert [r.token_ids[r.num_prompt_tokens :] for r in requests] == expected
        assert (sum(r.num_preemptions for r in requests) > 0) is (num_blocks == 16)
    prefill, decode = m.engine(), m.engine()
    for i, prompt in enumerate(prompts):
        request = make_request(prompt, 12, temperature=0.9, seed=i, top_k=20, top_p=0.95)
        hand_over(prefill, decode, request, 4, ship_carry=i % 2 == 0)
        drain(decode[0])
        assert request.token_ids[len(prompt) :] == expected[i]
    assert decode[0].stats.num_accepted > 0


# ---- negative controls: each breaks one rule, each must be seen -----------------------------------------


class RejectionRows(MtpSpeculator):
    """Control: counts rejections, so it re-prefills r - 1 rows (wrong where fewer than N were verified)."""

    def first_row(self, entry: ScheduledRequest, exact_upto: int) -> int:
        accepted = exact_upto - (len(entry.known) - 1)
        rejected = len(entry.drafts) - accepted
        return max(0, min(entry.start, entry.start - max(0, rejected - 1)))


class OnlyNewlyExact(MtpSpeculator):
    """Control: writes only slots that became exact, so provisional ones keep an older draft."""

    def pads(self, rows: Rows, m: int, samples: bool) -> np.ndarray:
        positions = np.arange(rows.first, rows.end)
        stale = (positions < rows.start) & (positions + m + 1 > rows.last_known)
        return super().pads(rows, m, samples) | stale


class WrongCarry(MtpSpeculator):
    """Control: the hand-over's row is that of another position."""

    def rows(self, entry: ScheduledRequest, verified: Verified, hidden: Tensor) -> Rows:
        rows = super().rows(entry, verified, hidden)
        if entry.handover_carry is not None:
            rows.hidden[: rows.start - rows.first] = hidden[-1]
        return rows


class FalseLookahead(MtpSpeculator):
    """Control: P reads one lookahead token wrong at its cut (as if the prompt had been cut there)."""

    def rows(self, entry: ScheduledRequest, verified: Verified, hidden: Tensor) -> Rows:
        rows = super().rows(entry, verified, hidden)
        if not entry.samples:
            known_ahead = rows.last_known - rows.first - 1
            rows.next_ids[known_ahead] = (rows.next_ids[known_ahead] + 1) % VOCAB
        return rows


def with_speculator(m: Model, kind: type[MtpSpeculator], **options: int | bool) -> Pair:
    engine, storage = m.engine(**options)
    assert m.modules is not None
    assert isinstance(engine.runner, ModelRunner)
    engine.runner.speculator = kind(m.modules, m.num_modules, storage)
    return engine, storage


def worst_alone(m: Model, make: Callable[[], Pair], fewer_drafts: bool) -> float:
    """Largest difference seen over a few requests, after every step."""
    worst = 0.0
    for i in range(6):
        engine, storage = make()
        request = make_request(random_prompt(12 + i, i), 16, hold_blocks=True)
        engine.add(request)
        rng = random.Random(i)
        while engine.has_work:
            engine.step()
            worst = max(worst, m.kv_diff(engine, storage, request))
            if fewer_drafts:  # adaptive depth: any number may be verified
                request.drafts = request.drafts[: rng.randint(0, m.num_modules)]
    return worst


@pytest.mark.parametrize("n", [2, 4, 8])
def test_control_rows_are_not_counted_by_rejections(n: int) -> None:
    m = model(n, None)
    assert worst_alone(m, m.engine, fewer_drafts=True) < LIMIT
    assert worst_alone(m, lambda: with_speculator(m, RejectionRows), fewer_drafts=True) > SEEN


@pytest.mark.parametrize("n", [4, 8])
def test_control_provisional_slots_are_rewritten(n: int) -> None:
    m = model(n, None)
    assert worst_alone(m, lambda: with_speculator(m, OnlyNewlyExact), fewer_drafts=False) > SEEN


def worst_of_pair(m: Model, prefill: Callable[[], Pair], decode: Callable[[], Pair]) -> float:
    worst = 0.0
    for length in (9, 12, 17):
        p, d = prefill(), decode()
        request = make_request(random_prompt(length, length), 6, hold_blocks=True)
        hand_over(p, d, request, m.num_modules)
        while request.state is not RequestState.HELD:
            d[0].step()
            worst = max(worst, m.kv_diff(*d, request))
    return worst


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("control", [WrongCarry, FalseLookahead])
def test_control_hand_over(n: int, control: type[MtpSpeculator]) -> None:
    m = model(n, None)
    assert worst_of_pair(m, m.engine, m.engine) < LIMIT
    if control is WrongCarry:
        assert worst_of_pair(m, m.engine, lambda: with_speculator(m, control)) > SEEN
    else:
        assert worst_of_pair(m, lambda: with_speculator(m, control), m.engine) > SEEN


@pytest.mark.parametrize("early", ["num_computed", "one block more"])
def test_control_registering_too_early_is_seen(early: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is registered before it is final gives its reader draft KV of another continuation."""
    n = 4
    m = model(n, None)

    def worst(patched: bool) -> float:
        engine, storage = m.engine()
        scheduler = engine.scheduler
        if patched:
            add = 0 if early == "num_computed" else 4

            def too_early(request: Request, num_modules: int) -> int:
                return min(request.num_computed + add, request.num_tokens)

            monkeypatch.setattr("common.engine.scheduler.final_upto", too_early)
            # The reader's hash must not cover what it may not know: plain hashes find the early block.
            scheduler.kv.hasher = type(scheduler.kv.hasher)(4, 0)
        seen = 0.0
        for i in range(4):
            first = make_request(random_prompt(16, i), 1, hold_blocks=True)
            engine.add(first)
            drain(engine)
            second = make_request([*random_prompt(16, i), *random_prompt(6, 90 + i)], 4, hold_blocks=True)
            engine.add(second)
            drain(engine)
            assert second.num_cached_tokens > 0
            seen = max(seen, m.kv_diff(engine, storage, second))
        return seen

    assert worst(False) < LIMIT
    assert worst(True) > SEEN


def test_the_trunks_choices_are_no_near_ties() -> None:
    """Token identity means something only where the best two logits are apart."""
    trunk = model(0, None).trunk
    engine, _ = make_engine(trunk)
    assert isinstance(engine.runner, ModelRunner)
    gaps = []
    logits = trunk.logits

    def seen(hidden: Tensor) -> Tensor:
        rows = logits(hidden)
        best = rows.topk(2, dim=-1).values
        gaps.append(float((best[:, 0] - best[:, 1]).min()))
        return rows

    trunk_logits, trunk.logits = trunk.logits, seen  # type: ignore[method-assign]
    try:
        with torch.inference_mode():
            for i in range(10):
                engine.add(make_request(random_prompt(12, i), 12))
            drain(engine)
    finally:
        trunk.logits = trunk_logits  # type: ignore[method-assign]
    assert min(gaps) > NEAR_TIE
