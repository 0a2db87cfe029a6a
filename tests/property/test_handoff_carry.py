"""The hand-over `carry` is as exact as `backoff`: P samples token L and ships it, with its drafts.

Tokens, draft KV (after every step) and drafts at equal known tokens are compared with one engine, for both
kinds of hand-over, whatever is lost on the way.
"""

import random
from collections.abc import Callable

import pytest

from common.engine.batch import ScheduledRequest
from common.engine.speculator import MtpSpeculator
from common.request import FinishReason, Request, RequestState
from tests.builders import VOCAB, drain, make_request, random_prompt
from tests.hybrids import Script, at_rate, hybrid_model
from tests.pairing import HANDOFFS, Handoff, hand_over
from tests.property.test_exactness import (
    CASES,
    LIMIT,
    SEEN,
    DraftLog,
    Model,
    Pair,
    WrongCarry,
    check_held,
    lengths,
    model,
    step_and_check,
    truth,
    with_speculator,
)


@pytest.mark.parametrize("ship_carry", [True, False])
@pytest.mark.parametrize(("n", "window"), CASES)
def test_every_prompt_length(n: int, window: int | None, ship_carry: bool) -> None:
    """1 .. 4N+3, with hits on both nodes; token L comes from P, its drafts are verified at once."""
    m = model(n, window)
    prefill, decode, alone = m.engine(budget=n + 5), m.engine(), m.engine()
    pair_log, alone_log, p_log = DraftLog(decode[0]), DraftLog(alone[0]), DraftLog(prefill[0])
    base = random_prompt(4 * n + 3, 3)
    for length in range(1, 4 * n + 4) if ship_carry else lengths(n, 4):
        request = make_request(base[:length], 8, hold_blocks=True)
        last = hand_over(prefill, decode, request, n, handoff="carry", ship_carry=ship_carry)
        assert last is not None
        first = (*base[:length], *truth(window, tuple(base[:length]), 1))
        assert tuple(request.token_ids) == first
        assert request.drafts == p_log.drafts.get(first, ())
        oracle = make_request(base[:length], 8)
        alone[0].add(oracle)
        while request.state is not RequestState.HELD:
            step_and_check(m, decode, [request])
        drain(alone[0])
        check_held(m, decode, [request], window)
        assert oracle.token_ids == request.token_ids
    common = pair_log.drafts.keys() & alone_log.drafts.keys()
    assert all(pair_log.drafts[k] == alone_log.drafts[k] for k in common)
    handed_over = p_log.drafts.keys() & alone_log.drafts.keys()
    assert all(p_log.drafts[k] == alone_log.drafts[k] for k in handed_over)
    if n:
        assert len(common) > 10
        assert len(handed_over) > n


def test_d_starts_at_l_with_the_rows_and_at_l_minus_n_plus_1_without() -> None:
    n, length = 4, 22
    m = model(n, 6)
    for ship_carry, start in ((True, length), (False, length - n + 1)):
        prefill, decode = m.engine(), m.engine()
        request = make_request(random_prompt(length, 5), 6)
        hand_over(prefill, decode, request, n, handoff="carry", ship_carry=ship_carry)
        batch = decode[0].scheduler.schedule()
        (entry,) = batch.entries
        assert (entry.start, entry.num_new, len(entry.drafts)) == (start, length + 1 - start, n)
        decode[0].scheduler.apply(batch, decode[0].runner.run(batch))
        drain(decode[0])


@pytest.mark.parametrize("ship_carry", [True, False])
def test_d_registers_what_it_received_when_it_is_final_here(ship_carry: bool) -> None:
    n, length = 4, 24
    m = model(n, None)
    prefill, decode = m.engine(), m.engine()
    request = make_request(random_prompt(length, 7), 6)
    hand_over(prefill, decode, request, n, handoff="carry", ship_carry=ship_carry)
    (pool,) = decode[0].scheduler.kv.pools
    assert not pool.registered()
    assert not decode[0].take_events()
    (told, update) = decode[0].step().updates  # token L, then what the step brought
    assert told.new_tokens == truth(None, tuple(request.token_ids[:length]), 1)
    assert (told.offset, update.offset) == (0, 1)
    assert len(pool.registered()) == update.final_upto // 4 >= (length + 1 + 1 - n) // 4
    assert update.final_upto == request.num_tokens - n
    drain(decode[0])


def test_without_token_l_d_computes_it_from_the_same_blocks() -> None:
    """P's last word cannot be read: D starts at L-N and samples token L itself."""
    n, length = 4, 21
    m = model(n, 6)
    prefill, decode = m.engine(), m.engine()
    request = make_request(random_prompt(length, 6), 6, hold_blocks=True)
    arrived = decode[0].scheduler.kv_arrived
    decode[0].scheduler.kv_arrived = lambda *args: arrived(*args[:3])  # type: ignore[method-assign]
    hand_over(prefill, decode, request, n, handoff="carry")
    assert (request.num_tokens, request.num_computed) == (length, length - n)
    while request.state is not RequestState.HELD:
        step_and_check(m, decode, [request])
    check_held(m, decode, [request], 6)


@pytest.mark.parametrize(("ship_carry", "rate"), [(True, 0.0), (True, 1.0), (False, 0.5)])
@pytest.mark.parametrize("n", [0, 1, 2, 4, 8])
def test_a_hybrid_hands_its_recurrent_state_over(n: int, ship_carry: bool, rate: float) -> None:
    """The state after L positions travels in its block, as in `backoff`; so carry needs no refusal."""
    m = hybrid_model(n)
    base = random_prompt(4 * n + 20, 3)
    scripts = [Script(right=at_rate(rate, seed)) for seed in (1, 2)]
    prefill, decode = (m.engine(s, block_size=4, state_block_size=8, budget=n + 9) for s in scripts)
    starts = []
    for length in sorted({1, n + 1, 8, 9, 15, 16, 4 * n + 20}):
        request = make_request(base[:length], 8, hold_blocks=True)
        for script in scripts:
            script.follow(m, request)
        hand_over(prefill, decode, request, n, handoff="carry", ship_carry=ship_carry)
        starts.append(length - request.num_computed)
        while request.state is not RequestState.HELD:
            decode[0].step()
            decode[0].check_invariants()
            if request.state is RequestState.RUNNING:
                assert m.worst(decode, request) < LIMIT
        assert request.token_ids[length:] == m.truth(base[:length], 8)
        assert m.worst(decode, request) < LIMIT
        decode[0].release(request.request_id)
    assert (set(starts) == {0}) is (ship_carry or n <= 1)


def test_seeded_tokens_are_the_same_through_both_hand_overs() -> None:
    n, m = 4, model(4, 6)
    prefill, decode, alone = m.engine(budget=9), m.engine(), m.engine()
    accepted = 0
    for i in range(6):
        prompt = random_prompt(9 + 3 * i, i)

        def ask(prompt: list[int] = prompt, seed: int = i) -> Request:
            return make_request(prompt, 12, temperature=0.9, seed=seed, top_k=20, presence_penalty=0.5)

        expected = ask()
        alone[0].add(expected)
        drain(alone[0])
        for handoff in HANDOFFS:
            for ship_carry in (True, False):
                request = ask()
                hand_over(prefill, decode, request, n, handoff=handoff, ship_carry=ship_carry)
                if handoff == "carry":
                    assert len(request.drafts) == n
                drain(decode[0])
                assert request.token_ids == expected.token_ids
                accepted += request.spec.num_accepted
    assert accepted > 0


def test_an_unseeded_request_keeps_token_l_and_drops_the_drafts_that_need_q() -> None:
    m = model(4, None)
    prefill, decode = m.engine(), m.engine()
    request = make_request(random_prompt(14, 1), 12, temperature=1.0, hold_blocks=True)
    last = hand_over(prefill, decode, request, 4, handoff="carry")
    assert last is not None
    assert len(last.drafts) == 4
    assert (tuple(request.token_ids[14:]), request.drafts) == (last.new_tokens, ())
    while request.state is not RequestState.HELD:
        decode[0].step()
        assert m.kv_diff(*decode, request) < LIMIT
    assert request.num_output_tokens == 12


# ---- a request that ends at token L ---------------------------------------------------------------------


@pytest.mark.parametrize("why", ["max_tokens", "stop id"])
def test_a_request_that_ends_at_token_l_ends_on_p(why: str) -> None:
    m, prompt = model(4, None), random_prompt(17, 2)
    (token,) = truth(None, tuple(prompt), 1)
    prefill, decode = m.engine(), m.engine()
    stops = (token,) if why == "stop id" else ()
    count = 1 if why == "max_tokens" else 9
    request = make_request(prompt, count, stop_token_ids=stops, logprobs=2)
    last = hand_over(prefill, decode, request, 4, handoff="carry")
    assert last is not None
    assert last.new_tokens == (token,)
    assert last.logprobs is not None
    assert len(last.logprobs[0].top) == 2
    assert last.finish_reason is (FinishReason.STOP if stops else FinishReason.LENGTH)
    assert last.summary is not None
    assert (last.summary.prompt_tokens, last.summary.output_tokens) == (17, 1)
    for engine, _ in (prefill, decode):
        assert not engine.scheduler.requests
        assert all(pool.num_free == pool.num_blocks - 1 for pool in engine.scheduler.kv.pools)


def test_a_length_that_only_d_knows_ends_the_request_there() -> None:
    """D's longest sequence is shorter than P's: token L is D's last, told before any step."""
    m, prompt = model(2, None), random_prompt(17, 2)
    prefill, decode = m.engine(), m.engine(max_model_len=18)
    request = make_request(prompt, 9, logprobs=0)
    hand_over(prefill, decode, request, 2, handoff="carry")
    told = decode[0].has_work
    assert told
    (update,) = decode[0].step().updates
    assert (update.new_tokens, update.offset) == (truth(None, tuple(prompt), 1), 0)
    assert update.finish_reason is FinishReason.LENGTH
    assert update.logprobs is not None
    assert len(update.logprobs) == 1
    assert update.summary is not None
    assert update.summary.output_tokens == 1
    assert not decode[0].has_work
    decode[0].check_invariants()


# ---- what may go wrong ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 2, 4])
def test_a_broken_transfer_and_a_preemption_change_no_token(n: int) -> None:
    m, rng = model(n, 6), random.Random(n)
    prefill, decode = m.engine(budget=n + 5), m.engine(num_blocks=40, max_num_seqs=6)
    requests = []
    for i in range(5):
        request = make_request(random_prompt(11 + 3 * i, i), 10)
        broken = rng.randint(0, request.num_tokens) if i % 2 else None
        prompt_len = request.num_tokens
        hand_over(prefill, decode, request, n, handoff="carry", broken_at=broken)
        assert request.num_output_tokens == (0 if i % 2 else 1)
        if i == 2:  # before its first step: token L stays, the rows and the drafts go
            decode[0].scheduler.requests.move(request, RequestState.RUNNING)
            decode[0].scheduler._preempt(request)
            assert (request.num_output_tokens, request.drafts) == (1, ())
        requests.append((prompt_len, request))
        for _ in range(3):
            step_and_check(m, decode, [request])
    drain(decode[0])
    for length, request in requests:
        prompt = tuple(request.token_ids[:length])
        assert tuple(request.token_ids[length:]) == truth(6, prompt, 10)


class NoRePrefill(MtpSpeculator):
    """Control: slots that P wrote from its drafts are taken for exact."""

    def first_row(self, entry: ScheduledRequest, exact_upto: int) -> int:
        first = super().first_row(entry, exact_upto)
        return first if entry.handover_carry is None else entry.start


def worst(m: Model, decode: Callable[[], Pair], handoff: Handoff) -> float:
    found = 0.0
    for length in (9, 12, 17, 18):
        d = decode()
        request = make_request(random_prompt(length, length), 6, hold_blocks=True)
        hand_over(m.engine(), d, request, m.num_modules, handoff=handoff)
        request.drafts = tuple((token + 1) % VOCAB for token in request.drafts)  # none is accepted
        while request.state is not RequestState.HELD:
            d[0].step()
            found = max(found, m.kv_diff(*d, request))
    return found


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("control", [WrongCarry, NoRePrefill])
def test_control_carry_rows(n: int, control: type[MtpSpeculator]) -> None:
    m = model(n, None)
    assert worst(m, m.engine, "carry") < LIMIT
    assert worst(m, lambda: with_speculator(m, control), "carry") > SEEN
