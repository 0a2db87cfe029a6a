"""An abort in any state leaves blocks, counters and events right: what was final stays."""

import pytest

from common.engine.engine import Engine
from common.kv_events import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored
from common.request import FinishReason, Request, RequestState
from tests.fakes import ROW, FakeRunner, continuation, fake_request, is_whole, make_fake_engine, outputs_of

STATES = [state for state in RequestState if state is not RequestState.FINISHED]
CUT = 17


def follow(engine: Engine, cached: set[BlockHash]) -> None:
    """Applies the events; what they say is what the pool holds."""
    for event in engine.take_events():
        match event:
            case BlockStored():
                assert not cached & set(event.block_hashes)
                cached |= set(event.block_hashes)
            case BlockRemoved():
                cached -= set(event.block_hashes)
            case AllBlocksCleared():
                cached.clear()
    (pool,) = engine.scheduler.kv.pools
    assert {int.from_bytes(digest[-8:], "big") for digest in pool.registered()} == cached


def run(engine: Engine, cached: set[BlockHash]) -> None:
    while engine.has_work:
        engine.step()
        engine.check_invariants()
        follow(engine, cached)


def bring_to(state: RequestState, engine: Engine, runner: FakeRunner, request: Request) -> None:
    if state is RequestState.HELD:
        request.stop_at, request.hold_blocks = CUT, True
    if state in (RequestState.RECEIVING_KV, RequestState.READY):
        engine.reserve(request, CUT)
    else:
        engine.add(request)
    if state is RequestState.READY:
        runner.receive(engine.wanted("r", CUT), request.token_ids, CUT)
        engine.kv_arrived("r", CUT, ROW)
    while state in (RequestState.RUNNING, RequestState.HELD) and request.num_computed < CUT:
        engine.step()
    if state is RequestState.RUNNING:  # in mid-answer, with drafts in flight
        engine.step()
        assert request.drafts
    assert request.state is state


@pytest.mark.parametrize("state", STATES)
def test_an_abort_leaves_pool_counters_and_events_right(state: RequestState) -> None:
    engine, runner = make_fake_engine(4, budget=8)
    cached: set[BlockHash] = set()
    other = fake_request(range(100, 120), 30, request_id="other")
    engine.add(other)
    while not outputs_of(other):
        engine.step()
    request = fake_request(range(20), 10)
    bring_to(state, engine, runner, request)
    follow(engine, cached)
    spec, final = request.spec, list(cached)
    counted = (engine.stats.num_drafts, engine.stats.num_draft_tokens, engine.stats.num_accepted)
    assert (request.spec.num_drafts > 0) is (state is RequestState.RUNNING)
    assert engine.abort("r")
    engine.check_invariants()
    # 1. Nothing is announced or taken back by an abort: what was final stays cached, nobody's.
    follow(engine, cached)
    assert sorted(map(str, cached)) == sorted(map(str, final))
    # 2. It counts in no state and waits for nothing; verified drafts stay counted, those in flight never are.
    assert request.finish_reason is FinishReason.ABORT
    assert set(engine.scheduler.requests.count_by_state()) <= {"running"}
    assert engine.scheduler.requests.num_tokens_to_compute <= 1
    assert counted == (engine.stats.num_drafts, engine.stats.num_draft_tokens, engine.stats.num_accepted)
    # 3. The others go on, and count on their own.
    run(engine, cached)
    assert outputs_of(other) == continuation(range(100, 120), 30)
    assert engine.stats.num_accepted == other.spec.num_accepted + spec.num_accepted
    assert is_whole(engine)
    # 4. The same prompt hits what was announced, and nothing else.
    again = fake_request(range(20), 10, request_id="again")
    engine.add(again)
    run(engine, cached)
    assert again.num_cached_tokens == (16 if state in (RequestState.RUNNING, RequestState.HELD) else 0)
    assert outputs_of(again) == continuation(range(20), 10)
    assert is_whole(engine)
