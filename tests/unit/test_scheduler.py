"""Stories of the scheduler on a fake runner; every step's reads are checked by the fake itself."""

import msgspec
import pytest

from common.detokenizer import IncrementalDetokenizer
from common.engine.engine import Engine
from common.engine.rules import SchedulerConfig
from common.engine.speculation import multi_module
from common.engine.stopping import StopChecker
from common.errors import CapacityError, ConfigError, InvalidRequest, PromptTooLong, ProtocolViolation
from common.kv_events import BlockStored
from common.request import FinishReason, Request, RequestState
from tests.fakes import (
    ROW,
    FakeRunner,
    continuation,
    fake_request,
    is_whole,
    make_fake_engine,
    outputs_of,
    wrong_at,
)


def run(engine: Engine, max_steps: int = 300) -> None:
    for _ in range(max_steps):
        if not engine.has_work:
            return
        engine.step()
        engine.check_invariants()
    raise AssertionError("still working")


def served(runner: FakeRunner) -> list[tuple[str, int, int]]:
    """(request, first position, tokens) of the last step, drafts included."""
    return [(e.request_id, e.start, e.end - e.start) for e in runner.batches[-1].entries]


def receive(engine: Engine, runner: FakeRunner, request: Request, cut: int, carry: bool = True) -> None:
    runner.receive(engine.wanted(request.request_id, cut), request.token_ids, cut)
    engine.kv_arrived(request.request_id, cut, ROW if carry else None)


# ---- one request ----------------------------------------------------------------------------------------


def test_from_prompt_to_end() -> None:
    engine, runner = make_fake_engine(2, budget=8)
    request = fake_request(range(20), 6)
    engine.add(request)
    # 1. Chunks within the budget; the last one ends the prompt and samples.
    for start, count in ((0, 8), (8, 8)):
        output = engine.step()
        assert served(runner) == [("r", start, count)]
        assert output.updates[0].new_tokens == ()
        assert output.updates[0].final_upto == start + count
    output = engine.step()
    assert served(runner) == [("r", 16, 4)]
    assert output.updates[0].new_tokens == (continuation(range(20), 1)[0],)
    assert (output.updates[0].final_upto, output.updates[0].num_computed) == (19, 20)  # T-N+1
    # 2. The two drafts are right: three tokens in one step.
    output = engine.step()
    assert served(runner) == [("r", 20, 3)]
    assert len(output.updates[0].new_tokens) == 3
    # 3. Two tokens are left: one draft is verified, never more than the request may still emit.
    output = engine.step()
    assert served(runner) == [("r", 23, 2)]
    assert output.updates[0].finish_reason is FinishReason.LENGTH
    assert outputs_of(request) == continuation(range(20), 6)
    summary = output.updates[0].summary
    assert summary is not None
    assert (summary.prompt_tokens, summary.output_tokens) == (20, 6)
    assert (summary.num_drafts, summary.num_draft_tokens, summary.num_accepted) == (2, 3, 3)
    assert (summary.verified_per_pos, summary.accepted_per_pos) == ((2, 1), (2, 1))
    assert is_whole(engine)


def test_rejected_drafts_are_counted_by_position() -> None:
    engine, _ = make_fake_engine(3, draft_rule=wrong_at({13, 14}))
    request = fake_request(range(10), 9)
    engine.add(request)
    run(engine)
    assert outputs_of(request) == continuation(range(10), 9)
    stats = engine.stats
    assert sum(stats.accepted_per_pos) == stats.num_accepted
    assert stats.verified_per_pos[0] == stats.num_drafts
    assert stats.num_accepted < stats.num_draft_tokens
    assert stats.acceptance_length == 1 + stats.num_accepted / stats.num_drafts


def test_a_step_without_drafts_is_no_draft() -> None:
    engine, _ = make_fake_engine(0)
    engine.add(fake_request(range(10), 5))
    run(engine)
    assert engine.stats.num_drafts == 0
    assert engine.stats.acceptance_length == 1.0


# ---- chunk boundaries -----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 2, 4, 8])
def test_a_chunk_ends_the_prompt_or_leaves_at_least_n_tokens(n: int) -> None:
    for budget in range(n + 1, 2 * n + 6):
        for length in range(1, 4 * n + 4):
            engine, runner = make_fake_engine(n, budget=budget, prefix_caching=False)
            engine.add(fake_request(range(length), 1))
            run(engine)
            for batch in runner.batches:
                (entry,) = batch.entries
                left = length - entry.start - entry.num_new
                assert left == 0 or left >= n


@pytest.mark.parametrize("n", [0, 1, 2, 4, 8])
def test_a_chunk_may_end_at_the_cut(n: int) -> None:
    """L - C = N - 1 < N: the plain rule would starve a prefill for ever."""
    backoff = max(1, n - 1)
    for length in range(backoff + 1, 4 * n + 6):
        engine, runner = make_fake_engine(n, budget=n + 1, prefix_caching=False)
        cut = length - backoff
        engine.add(fake_request(range(length), stop_at=cut, hold_blocks=True))
        run(engine, 4 * n + 20)
        last = runner.batches[-1].entries[0]
        assert last.start + last.num_new == cut
        assert not any(e.samples for b in runner.batches for e in b.entries)


def test_the_threshold_bounds_one_prompts_share() -> None:
    engine, runner = make_fake_engine(2, budget=20, threshold=6)
    engine.add(fake_request(range(20), 1, request_id="a"))
    engine.add(fake_request(range(50, 70), 1, request_id="b", arrival=1))
    engine.step()
    assert served(runner) == [("a", 0, 6), ("b", 0, 6)]


def test_a_step_must_hold_a_hand_over() -> None:
    SchedulerConfig(5, 4, 100, speculation=multi_module(4))
    with pytest.raises(ConfigError, match=r"step may hold 4 tokens .* looks 4 tokens ahead needs at least 5"):
        SchedulerConfig(4, 4, 100, speculation=multi_module(4))
    with pytest.raises(ConfigError, match="long_prefill_token_threshold 3"):
        SchedulerConfig(2048, 4, 100, speculation=multi_module(4), long_prefill_token_threshold=3)


# ---- ends -----------------------------------------------------------------------------------------------


def test_a_stop_id_inside_an_accepted_run_ends_there() -> None:
    truth = continuation(range(10), 10)
    stop = truth[3]
    assert stop not in truth[:3]
    engine, _ = make_fake_engine(4)
    request = fake_request(range(10), 10, stop_token_ids=(stop,))
    engine.add(request)
    engine.step()
    output = engine.step()  # four right drafts and a bonus token; the third of them is the stop
    (update,) = output.updates
    assert update.new_tokens == tuple(truth[1:4])
    assert update.finish_reason is FinishReason.STOP
    assert outputs_of(request) == truth[:4]
    # Nothing past the end is counted: three drafts, all accepted.
    assert (engine.stats.num_draft_tokens, engine.stats.num_accepted) == (3, 3)
    assert engine.stats.accepted_per_pos == engine.stats.verified_per_pos == [1, 1, 1]
    assert is_whole(engine)


class Letters:
    """A decoder of one letter a token."""

    def push(self, token_ids: tuple[int, ...]) -> str:
        return "".join(chr(ord("a") + t % 26) for t in token_ids)


def test_a_stop_string_inside_an_accepted_run_ends_there() -> None:
    truth = continuation(range(10), 10)
    text = Letters().push(tuple(truth))
    stop = text[2:5]

    def checker(request: Request) -> StopChecker:
        return StopChecker(request, (), _letters)

    engine, _ = make_fake_engine(4, stop_checker=checker)
    request = fake_request(range(10), 10)
    request.sampling = msgspec.structs.replace(request.sampling, stop=(stop,))
    engine.add(request)
    run(engine)
    assert outputs_of(request) == truth[:5]
    assert request.stop_string == stop
    assert request.finish_reason is FinishReason.STOP


def _letters() -> IncrementalDetokenizer:
    return Letters()  # type: ignore[return-value]


def test_the_models_length_ends_a_request() -> None:
    engine, _ = make_fake_engine(4, max_model_len=16)
    request = fake_request(range(10), 100)
    engine.add(request)
    run(engine)
    assert request.num_tokens == 16
    assert request.finish_reason is FinishReason.LENGTH
    assert outputs_of(request) == continuation(range(10), 6)


def test_the_pools_length_ends_a_request() -> None:
    engine, _ = make_fake_engine(2, num_blocks=5)
    request = fake_request(range(10), 100)
    engine.add(request)
    run(engine)
    assert request.num_tokens == 20
    assert request.finish_reason is FinishReason.LENGTH
    assert is_whole(engine)


def test_the_last_block_of_a_finished_request_is_registered() -> None:
    """A step that ends a request still makes its kept positions final."""
    engine, _ = make_fake_engine(4)
    engine.add(fake_request(range(10), 14))  # 24 tokens: final up to 20, five blocks
    run(engine)
    stored = [h for e in engine.take_events() if isinstance(e, BlockStored) for h in e.block_hashes]
    assert len(stored) == 5
    turn = fake_request([*range(10), *continuation(range(10), 14), 1, 2, 3], 1)
    engine.add(turn)
    run(engine)
    assert turn.num_cached_tokens == 20


# ---- refusals -------------------------------------------------------------------------------------------


def test_requests_that_can_never_run_are_refused() -> None:
    engine, _ = make_fake_engine(2, num_blocks=5, max_model_len=100)
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        engine.add(fake_request([]))
    with pytest.raises(PromptTooLong, match=r"20 tokens, .* at most 20 .*model's limit is 100"):
        engine.add(fake_request(range(20)))
    engine.add(fake_request(range(19)))
    with pytest.raises(InvalidRequest, match="'r' is already in use"):
        engine.add(fake_request(range(3)))
    engine.abort("r")
    assert is_whole(engine)


def test_a_prefill_that_cannot_hold_its_blocks_is_refused() -> None:
    """A window needs few blocks at a time, but a prefill owns all of its blocks from the start."""
    engine, _ = make_fake_engine(0, windows=(4,), num_blocks=8, budget=8)
    with pytest.raises(PromptTooLong, match="holds all its blocks"):
        engine.add(fake_request(range(40), stop_at=39, hold_blocks=True))
    engine.add(fake_request(range(40), 3))
    run(engine)
    assert is_whole(engine)


def test_a_reservation_without_room_owns_nothing() -> None:
    engine, runner = make_fake_engine(2, num_blocks=10, max_num_seqs=2)
    first = fake_request(range(24), request_id="first")
    assert engine.reserve(first, 23) == 0
    # 1. No room for the blocks.
    with pytest.raises(CapacityError, match="no room to reserve 20 tokens"):
        engine.reserve(fake_request(range(50, 70), request_id="second"), 19)
    assert engine.scheduler.kv.pools[0].num_free == 4
    # 2. Room for the blocks, but every seat is taken.
    engine.reserve(fake_request(range(50, 55), request_id="third"), 4)
    with pytest.raises(CapacityError, match="0 seats"):
        engine.reserve(fake_request(range(3), request_id="fourth"), 2)
    assert set(engine.scheduler.requests) == {"first", "third"}
    # 3. With the first one gone there is room again.
    engine.abort("first")
    engine.reserve(fake_request(range(50, 70), request_id="second"), 19)
    engine.check_invariants()
    assert not runner.batches


# ---- hand-overs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("carry", [True, False])
def test_a_hand_over_is_finished_from_the_cut(n: int, carry: bool) -> None:
    backoff = max(1, n - 1)
    for length in (backoff + 1, backoff + 2, 4 * n + 3):
        cut = length - backoff
        engine, runner = make_fake_engine(n)
        request = fake_request(range(length), 5)
        assert engine.reserve(request, cut) == 0
        assert engine.scheduler.requests.count_by_state() == {"receiving_kv": 1}
        assert not engine.has_work
        assert sorted(engine.wanted("r", cut)[0]) == list(range(-(-cut // 4)))
        receive(engine, runner, request, cut, carry and n > 1)
        assert engine.scheduler.requests.count_by_state() == {"ready": 1}
        engine.step()
        (entry,) = runner.batches[-1].entries
        assert entry.start == (cut if carry or n < 2 else length - n)
        assert entry.samples
        run(engine)
        assert outputs_of(request) == continuation(range(length), 5)


def test_hand_overs_go_before_decodes_and_keep_their_place() -> None:
    """A budget for one hand-over a step: the second keeps its turn, whatever decodes in between."""
    engine, runner = make_fake_engine(4, budget=5, max_num_seqs=8)
    for name in ("a", "b"):
        engine.add(fake_request([ord(name), 2], 40, request_id=name))
        engine.step()
        engine.step()
    late = [fake_request(range(50 + i, 62 + i), 4, request_id=f"late{i}") for i in range(3)]
    for request in late:
        engine.reserve(request, 9)
    for request in late:
        receive(engine, runner, request, 9)
    for i in range(3):
        engine.step()
        engine.check_invariants()
        assert served(runner)[0][:2] == (f"late{i}", 9)
        assert len(outputs_of(late[i])) == 1
    run(engine)
    for request in late:
        assert outputs_of(request) == continuation(request.token_ids[:12], 4)


def test_local_hits_are_not_received_again() -> None:
    engine, runner = make_fake_engine(4)
    engine.add(fake_request(range(20), 1, request_id="before"))
    run(engine)
    request = fake_request([*range(18), *range(90, 102)], 4)
    assert engine.reserve(request, 27) == 12  # floor((18 - 4) / 4) * 4
    assert sorted(engine.wanted("r", 27)[0]) == [3, 4, 5, 6]
    receive(engine, runner, request, 27)
    run(engine)
    assert request.num_cached_tokens == 12
    assert outputs_of(request) == continuation([*range(18), *range(90, 102)], 4)


def test_a_broken_transfer_keeps_what_is_final() -> None:
    engine, runner = make_fake_engine(4)
    request = fake_request(range(30), 4)
    engine.reserve(request, 27)
    blocks = engine.wanted("r", 27)
    runner.receive(blocks, request.token_ids, 17)
    stuck = blocks[0][6]
    engine.kv_failed("r", 17, {0: (stuck,)})
    engine.check_invariants()
    assert request.state is RequestState.WAITING
    engine.step()
    assert served(runner)[0] == ("r", 16, 14)
    assert request.num_cached_tokens == 16
    run(engine)
    assert outputs_of(request) == continuation(range(30), 4)
    assert engine.scheduler.kv.pools[0].num_free == 63
    engine.kv_quiet({0: (stuck,)})
    assert is_whole(engine)


def test_kv_for_an_aborted_request_is_ignored_and_for_a_running_one_a_violation() -> None:
    engine, _ = make_fake_engine(4)
    engine.reserve(fake_request(range(30)), 27)
    engine.abort("r")
    assert is_whole(engine)
    engine.kv_arrived("r", 27, ROW)
    engine.kv_failed("r", 8)
    assert engine.wanted("r", 27) == {}
    engine.add(fake_request(range(5)))
    with pytest.raises(ProtocolViolation, match="receives none"):
        engine.kv_arrived("r", 3, None)


def test_a_prefill_is_held_until_it_is_released() -> None:
    engine, _ = make_fake_engine(4)
    request = fake_request(range(20), stop_at=17, hold_blocks=True)
    engine.add(request)
    (update,) = engine.step().updates
    assert update.finish_reason is FinishReason.CUT
    assert (update.final_upto, update.num_computed) == (16, 17)
    assert request.state is RequestState.HELD
    assert engine.runner.carry_rows("r") is not None
    assert len(engine.tables("r")[0]) == 5
    assert not engine.has_work
    engine.release("nobody")
    engine.release("r")
    engine.release("r")
    assert is_whole(engine)
    assert engine.tables("r") == []


# ---- preemption and order -------------------------------------------------------------------------------


def test_the_youngest_is_preempted_and_comes_back() -> None:
    engine, _ = make_fake_engine(0, num_blocks=9, prefix_caching=False)
    old = fake_request(range(12), 16, request_id="old")
    young = fake_request(range(50, 60), 16, request_id="young", arrival=1)
    engine.add(old)
    engine.step()
    engine.add(young)
    preempted: list[str] = []
    while old.state is not RequestState.FINISHED:
        preempted += engine.step().preempted
        engine.check_invariants()
    assert preempted == ["young"]
    assert young.num_preemptions == 1
    assert old.num_preemptions == 0
    run(engine)
    assert outputs_of(young) == continuation(range(50, 60), 16)
    assert is_whole(engine)


def test_a_more_important_request_keeps_its_blocks() -> None:
    """Priority comes before age: the less important one is preempted, although it is older."""
    engine, _ = make_fake_engine(0, num_blocks=9, prefix_caching=False)
    old = fake_request(range(12), 16, request_id="old", priority=1)
    young = fake_request(range(50, 60), 16, request_id="young", arrival=1)
    engine.add(old)
    engine.step()
    engine.add(young)
    run(engine)
    assert (old.num_preemptions > 0, young.num_preemptions) == (True, 0)
    assert outputs_of(old) == continuation(range(12), 16)


def test_waiting_requests_start_by_priority_then_arrival() -> None:
    engine, runner = make_fake_engine(0, max_num_seqs=1)
    for name, priority, arrival in (("late", 0, 3.0), ("minor", 1, 1.0), ("early", 0, 2.0)):
        engine.add(fake_request(range(5), 1, request_id=name, priority=priority, arrival=arrival))
    order = []
    while engine.has_work:
        engine.step()
        order += [e.request_id for e in runner.batches[-1].entries]
    assert order == ["early", "late", "minor"]


def test_a_pinned_prefill_is_never_preempted() -> None:
    """A transfer may be reading its blocks: the older decode gives way instead."""
    engine, _ = make_fake_engine(0, num_blocks=9, budget=2, prefix_caching=False)
    decode = fake_request(range(8), 20, request_id="decode")
    engine.add(decode)
    while not outputs_of(decode):
        engine.step()
    prefill = fake_request(range(50, 70), request_id="prefill", stop_at=19, hold_blocks=True, arrival=1)
    engine.add(prefill)
    engine.step()
    blocks = engine.tables("prefill")
    assert len(blocks[0]) == 5, "it owns all of its blocks from the start"
    for _ in range(18):
        if decode.num_preemptions:
            break
        engine.step()
        engine.check_invariants()
    assert decode.num_preemptions == 1
    assert prefill.state is RequestState.RUNNING
    for _ in range(40):
        engine.step()
        engine.check_invariants()
    assert engine.scheduler.requests.count_by_state()["held"] == 1
    assert engine.tables("prefill") == blocks
    engine.release("prefill")
    run(engine)
    assert outputs_of(decode) == continuation(range(8), 20)


def test_admission_leaves_room_for_those_who_run() -> None:
    """A prompt starts only where all of it fits and each running request can still take a block."""
    engine, _ = make_fake_engine(0, num_blocks=10)
    engine.add(fake_request(range(16), 8, request_id="first"))
    engine.step()
    engine.add(fake_request(range(50, 70), 2, request_id="second", arrival=1))
    engine.step()
    assert engine.scheduler.requests.count_by_state() == {"running": 1, "waiting": 1}
    run(engine)
    assert is_whole(engine)


def test_two_identical_prompts_in_one_step_do_not_read_each_other() -> None:
    """Blocks are findable at the end of the step that made them final, never before."""
    engine, runner = make_fake_engine(2)
    for name in ("a", "b"):
        engine.add(fake_request(range(20), 3, request_id=name))
    engine.step()
    assert served(runner) == [("a", 0, 20), ("b", 0, 20)]
    engine.add(fake_request(range(20), 3, request_id="c"))
    engine.step()
    assert served(runner)[-1] == ("c", 16, 4)
    run(engine)
    assert is_whole(engine)


# ---- aborts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", list(RequestState))
def test_abort_is_legal_in_every_state(state: RequestState) -> None:
    engine, runner = make_fake_engine(4)
    request = fake_request(range(20), 10, num_sequences=1)
    if state is RequestState.HELD:
        request = fake_request(range(20), stop_at=17, hold_blocks=True)
    kind: str = state.value
    if kind in ("receiving_kv", "ready"):
        engine.reserve(request, 17)
        if kind == "ready":
            receive(engine, runner, request, 17)
    else:
        engine.add(request)
    if state in (RequestState.RUNNING, RequestState.HELD):
        engine.step()
    if state is RequestState.FINISHED:
        run(engine)
    assert request.state is state
    assert engine.abort("r") is (state is not RequestState.FINISHED)
    assert request.state is RequestState.FINISHED
    engine.check_invariants()
    assert is_whole(engine)
    again = fake_request(range(20), 10)  # the same id, from scratch
    engine.add(again)
    run(engine)
    assert outputs_of(again) == continuation(range(20), 10)


def test_abort_of_forks_with_copies_pending() -> None:
    engine, _ = make_fake_engine(4)
    engine.add(fake_request(range(21), 10, seed=100, num_sequences=3))
    output = engine.step()
    assert output.forked == (("r", "r#1"), ("r", "r#2"))
    for name in ("r#1", "r", "r#2"):
        assert engine.abort(name)
        engine.check_invariants()
    assert is_whole(engine)


# ---- several sequences ----------------------------------------------------------------------------------


def test_sequences_share_the_prompts_final_blocks() -> None:
    engine, runner = make_fake_engine(4)
    engine.add(fake_request(range(22), 12, seed=100, num_sequences=2))
    engine.step()
    parent, child = engine.tables("r")[0], engine.tables("r#1")[0]
    assert parent[:4] == child[:4]  # below L - N = 18: four whole blocks
    assert parent[4] != child[4]
    engine.step()
    assert ("r#1", 18, 4) in served(runner)
    run(engine)
    assert is_whole(engine)


def test_sequences_without_a_seat_wait_and_differ() -> None:
    engine, _ = make_fake_engine(2, max_num_seqs=1)
    engine.add(fake_request(range(9), 6, seed=100, num_sequences=3))
    outputs: dict[str, list[int]] = {}
    while engine.has_work:
        for update in engine.step().updates:
            outputs.setdefault(update.request_id, []).extend(update.new_tokens)
        engine.check_invariants()
    assert outputs == {name: continuation(range(9), 6, 100 + i) for i, name in enumerate(("r", "r#1", "r#2"))}
    assert is_whole(engine)


def test_waiting_tokens_and_counts() -> None:
    engine, _ = make_fake_engine(0, max_num_seqs=1)
    engine.add(fake_request(range(10), 5, request_id="a"))
    engine.add(fake_request(range(7), 5, request_id="b"))
    assert engine.scheduler.requests.num_tokens_to_compute == 17
    engine.step()
    assert engine.scheduler.requests.num_tokens_to_compute == 1 + 7
    assert engine.scheduler.requests.count_by_state() == {"running": 1, "waiting": 1}


def test_a_lone_request_that_a_shrunken_pool_cannot_hold_gets_an_answer() -> None:
    """Quarantine takes blocks away while it runs: it would preempt itself for ever, so it ends."""
    engine, _ = make_fake_engine(2, num_blocks=8, max_model_len=100)
    request = fake_request(range(1, 9), max_tokens=30)
    engine.add(request)
    engine.step()
    pool = engine.scheduler.kv.pools[0]
    blocks, _evicted = pool.allocate(3)
    for block in blocks:
        pool.quarantine(block)
    for _ in range(40):
        updates = engine.step().updates
        engine.check_invariants()
        if any(update.finish_reason is FinishReason.ERROR for update in updates):
            break
    assert request.state is RequestState.FINISHED
    assert request.finish_reason is FinishReason.ERROR
    assert not engine.has_work
    with pytest.raises(PromptTooLong):  # and who comes later is told before
        engine.add(fake_request(range(1, 21)))
    pool.release_quarantine(blocks)
    assert pool.num_free == pool.num_usable
