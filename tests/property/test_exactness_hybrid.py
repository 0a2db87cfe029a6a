"""Hybrid models (window, short convolution, gated delta net, full attention) are exact, whatever happens.

Named cases; the random ones are in `test_schedules`. Every request is compared, just before its blocks go,
with one dense pass: its tokens, the draft KV, the running state and all state checkpoints. The controls break
one rule each and must be seen.
"""

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from cli.schedules.random_models import Weights
from cli.schedules.run import run_schedules
from cli.schedules.texts import Texts
from common.engine.state_plan import PagedRecurrence
from common.kv_cache.state_group import StateGroupSpec
from common.request import Request, RequestState
from router.policy import cut_of
from tests.builders import HYBRID_LAYERS, drain, make_request, random_prompt
from tests.hybrids import LIMIT, SEEN, HybridModel, Pair, Script, at_rate, hybrid_model
from tests.pairing import hand_over

MODULES = (0, 1, 2, 4, 8)


def lengths(n: int, unit: int) -> list[int]:
    """Prompt lengths: the shortest, around checkpoints, up to 4N + 3 and two units more."""
    top = max(4 * n + 3, 2 * unit + 1)
    around = {u + d for u in range(unit, top, unit) for d in (-1, 0, 1)}
    return sorted(x for x in {1, 2, n, n + 1, 2 * n, top} | around if 1 <= x <= top)


class Watched:
    """An engine whose requests are compared as they end; ``worst`` is the largest difference so far."""

    def __init__(self, model: HybridModel, rate: float, seed: int, **options: int | bool) -> None:
        self.model = model
        self.script = Script(right=at_rate(rate, seed))
        self.pair: Pair = model.engine(self.script, **options)
        self.engine, self.storage = self.pair
        self.engine.scheduler.on_finish = self._finished
        self.worst = 0.0
        self.finished: list[Request] = []

    def _finished(self, request: Request) -> None:
        self.worst = max(self.worst, self.model.worst(self.pair, request))
        prompt = request.token_ids[: request.num_prompt_tokens]
        out = request.token_ids[len(prompt) :]
        if request.stop_at is None:
            assert len(out) == request.sampling.max_tokens
            assert out == self.model.truth(prompt, len(out)), request
        self.finished.append(request)
        assert self.worst < LIMIT, request

    def step(self, rng: random.Random | None = None) -> None:
        """``rng``: any number of the proposed drafts is verified, as an adaptive depth would have it."""
        self.engine.step()
        self.engine.check_invariants()
        if rng is not None:
            for request in self.engine.scheduler.requests.running:
                if rng.random() < 0.3:
                    request.drafts = request.drafts[: rng.randint(0, len(request.drafts))]

    def whole(self) -> bool:
        pools = self.engine.scheduler.kv.pools
        return not self.engine.scheduler.requests and all(p.num_free == p.num_blocks - 1 for p in pools)


def end(node: Watched, requests: Sequence[Request], rng: random.Random) -> None:
    for _ in range(2000):
        for request in requests:
            if request.state is RequestState.HELD:
                node.engine.release(request.request_id)
        if not node.engine.has_work:
            break
        node.step(rng)
    assert all(r.state is RequestState.FINISHED for r in requests)
    assert node.whole()
    assert {id(r) for r in requests} <= {id(r) for r in node.finished}


@pytest.mark.parametrize(
    "layers",
    [
        ("short_conv", "full_attention"),
        ("gated_delta_net", "gated_delta_net", "full_attention"),
        ("sliding_attention", "sliding_attention", "gated_delta_net", "full_attention"),
        ("sliding_attention", "short_conv", "sliding_attention"),
    ],
)
def test_other_mixtures_of_layers(layers: tuple[str, ...]) -> None:
    """One kind alone; full attention and two windows; windows without any full attention."""
    for n in (0, 2):
        m = hybrid_model(n, layers)
        weights = Weights(" ".join(layers), m.trunk, m.modules, n)
        for pair in (False, True):
            outcome = run_schedules(weights, Texts(m.trunk), range(3), pair=pair)
            assert not outcome.problems


# ---- the pair -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ship_carry", [True, False])
@pytest.mark.parametrize("n", MODULES)
def test_pair_at_every_length(n: int, ship_carry: bool) -> None:
    """Around checkpoints and their multiples, cold and with hits on both nodes."""
    m = hybrid_model(n)
    for rate in (0.0, 1.0):
        shape = {"block_size": 4, "state_block_size": 8}
        prefill, decode = Watched(m, 1.0, n, **shape, budget=n + 5), Watched(m, rate, n, **shape)
        base, requests = random_prompt(4 * n + 20, 3), []
        for length in (*lengths(n, 8), 4 * n + 20):
            request = make_request(base[:length], 6)
            requests.append(request)
            decode.script.follow(m, request)
            hand_over(prefill.pair, decode.pair, request, n, ship_carry=ship_carry)
            end(decode, [request], random.Random(0))
        assert any(r.num_cached_tokens > 0 for r in prefill.finished)


def test_d_starts_from_the_running_state_at_the_cut() -> None:
    """With the row D computes N-1 positions; without it from the last checkpoint on, if it may."""
    n, length = 4, 30
    for layers, kept in ((("gated_delta_net", "full_attention"), 24), (HYBRID_LAYERS, 0)):
        m = hybrid_model(n, layers)
        for ship_carry, first in ((True, cut_of(length, n)), (False, kept)):
            nodes = [Watched(m, 1.0, 0, block_size=4, state_block_size=8) for _ in range(2)]
            prefill, decode = nodes
            request = make_request(random_prompt(length, 1), 6)
            hand_over(prefill.pair, decode.pair, request, n, ship_carry=ship_carry)
            batch = decode.engine.scheduler.schedule()
            (entry,) = batch.entries
            assert entry.start == first
            decode.engine.scheduler.apply(batch, decode.engine.runner.run(batch))
            end(decode, [request], random.Random(0))


# ---- cases by name --------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 2, 4])
def test_prompt_a_padded_b_and_a_again_with_prefix_cache_equals_cache_off(n: int) -> None:
    """Temperature 0. B shares a beginning with A, is longer, and runs in one batch with others."""
    m = hybrid_model(n)
    a = random_prompt(27, 5)
    b = a[:19] + random_prompt(30, 6)
    outputs = []
    for caching in (True, False):
        node = Watched(m, 0.6, n, block_size=4, state_block_size=8, prefix_caching=caching)
        prompts = [[a], [b, random_prompt(3, 7), random_prompt(11, 8)], [a]]
        for batch in prompts:
            requests = [make_request(p, 12) for p in batch]
            for request in requests:
                node.script.follow(m, request)
                node.engine.add(request)
            end(node, requests, random.Random(0))
        again = node.finished[-1]
        assert (again.num_cached_tokens > 0) is caching
        outputs.append([tuple(r.token_ids) for r in sorted(node.finished, key=lambda r: r.arrival_time_s)])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("n", MODULES)
def test_l_below_at_and_above_two_units(n: int) -> None:
    """No collapse to zero hits and no lost unit: a repeated prompt hits floor((L - max(N,1)) / unit) units,
    whatever the windows and the attention's block size."""
    m = hybrid_model(n)
    for block_size, unit in ((4, 12), (12, 12), (3, 6)):
        for length in range(2 * unit - 1, 2 * unit + max(n, 1) + 2):
            node = Watched(m, 1.0, n, block_size=block_size, state_block_size=unit)
            assert node.storage.layout.hit_unit == unit
            prompt = random_prompt(length, length)
            for times in range(2):
                request = make_request(prompt, 1)
                node.script.follow(m, request)
                node.engine.add(request)
                end(node, [request], random.Random(0))
                expected = (length - max(n, 1)) // unit * unit
                assert request.num_cached_tokens == times * expected


def test_a_resume_starts_at_a_checkpoint_with_a_warm_cache() -> None:
    m = hybrid_model(2)
    node = Watched(m, 0.5, 0, block_size=4, state_block_size=8)
    request = make_request(random_prompt(21, 1), 20)
    node.script.follow(m, request)
    node.engine.add(request)
    for _ in range(6):
        node.step()
    scheduler = node.engine.scheduler
    computed = request.num_computed
    scheduler._preempt(request)
    assert not request.tables
    node.step()  # nothing is admitted in a step that preempts
    batch = scheduler.schedule()
    (entry,) = batch.entries
    assert 0 < entry.start <= computed
    assert entry.start % 8 == 0
    scheduler.apply(batch, node.engine.runner.run(batch))
    end(node, [request], random.Random(0))


def test_sequences_of_one_prompt_start_from_checkpoints() -> None:
    """n = 3: the state after the prompt's last but N positions is gone, so the children hit a checkpoint."""
    m = hybrid_model(2)
    node = Watched(m, 0.5, 0, block_size=4, state_block_size=8)
    node.engine.scheduler.on_finish = None
    request = make_request(random_prompt(21, 1), 8, temperature=1.0, seed=3, num_sequences=3)
    node.engine.add(request)
    outputs: dict[str, list[int]] = {}
    while node.engine.has_work:
        for update in node.engine.step().updates:
            outputs.setdefault(update.request_id, []).extend(update.new_tokens)
        node.engine.check_invariants()
        for sequence in node.engine.scheduler.requests.running:
            assert m.worst(node.pair, sequence) < LIMIT
    assert node.whole()
    for index, tokens in enumerate(outputs.values()):
        alone = m.engine()[0]
        single = make_request(random_prompt(21, 1), 8, temperature=1.0, seed=3 + index)
        alone.add(single)
        drain(alone)
        assert single.token_ids[21:] == tokens
    assert len(outputs) == 3


# ---- negative controls: each breaks one rule, each must be seen -----------------------------------------


def worst_of(m: HybridModel, rate: float, rounds: int = 1, **options: int | bool) -> float:
    """Largest difference over a few requests, none of them stopped by it."""
    worst = 0.0
    for i in range(3):
        script = Script(right=at_rate(rate, i))
        engine, storage = m.engine(script, block_size=4, state_block_size=8, **options)
        for j in range(rounds):
            request = make_request(random_prompt(20 + i, 10 * i + j), 12, hold_blocks=True)
            script.follow(m, request)
            engine.add(request)
            while engine.has_work:
                engine.step()
                worst = max(worst, m.worst((engine, storage), request))
            engine.release(request.request_id)
    return worst


def test_control_a_state_past_a_rejected_draft_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state after all drafts is stored, as if it could be rewound."""
    m = hybrid_model(4)
    assert worst_of(m, 0.5) < LIMIT

    def commit(self: PagedRecurrence, ends: Sequence[int]) -> None:
        kept = right_commit(self, ends)
        last = 0
        for span, marks, stop in zip(self._spans, self._marks, ends, strict=True):
            last += len(marks)
            row = self._aside[last - 1].clone()
            row.view(torch.int32)[0] = stop
            self._rows[span.table[(stop - 1) // self._spec.block_size]] = row
        return kept

    right_commit = PagedRecurrence.commit
    monkeypatch.setattr(PagedRecurrence, "commit", commit)
    assert worst_of(m, 0.5) > SEEN


def test_control_a_reused_slot_that_is_not_cleared_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that starts at 0 from whatever its first block held."""
    m = hybrid_model(2)

    def read(self: PagedRecurrence) -> Tensor:
        size = self._spec.block_size
        blocks = [span.table[max(0, span.start - 1) // size] for span in self._spans]
        return self._rows[torch.tensor(blocks)]

    assert worst_of(m, 0.5, rounds=4, num_blocks=12) < LIMIT  # blocks come round again
    monkeypatch.setattr(PagedRecurrence, "_read", read)
    assert worst_of(m, 0.5, rounds=4, num_blocks=12) > SEEN


def test_control_a_hit_beyond_the_last_checkpoint_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hits that ignore the state group find no block to start from, and a state of another position is an
    error by name, not a wrong token."""
    m = hybrid_model(2)
    monkeypatch.setattr(StateGroupSpec, "keeps_all", True)
    monkeypatch.setattr(StateGroupSpec, "first_start_block", lambda self, start: 0)
    node = Watched(m, 0.5, 0, block_size=4, state_block_size=8)
    prompt = random_prompt(26, 2)
    first = make_request(prompt, 1)
    node.script.follow(m, first)
    node.engine.add(first)
    end(node, [first], random.Random(0))
    monkeypatch.undo()
    engine, storage = m.engine(block_size=4, state_block_size=8)
    request = make_request(prompt, 4)
    engine.add(request)
    engine.step()
    running = request.tables[-1][(request.num_computed - 1) // 8]
    storage.rows(len(storage.layout.groups) - 1)[running].view(torch.int32)[0] += 1
    with pytest.raises(AssertionError, match="holds the state after"):
        engine.step()
