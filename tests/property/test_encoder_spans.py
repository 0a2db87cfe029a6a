"""Prompts with images: every span is encoded before a step reads it or looks ahead into it, is kept as long
as one does, nobody starves, and nothing is left in the end (02-exactness 2).
"""

import random
from collections.abc import Sequence

import pytest

from common.engine.encoder_rules import encodings_for, is_done, widest_window
from common.errors import CapacityError, InvalidRequest
from common.extra_keys import MultimodalItem
from common.request import FinishReason, Request, RequestState
from router.policy import cut_of
from tests.fakes import ROW, continuation, is_whole, outputs_of, sometimes_right
from tests.fakes_encoder import image_request, make_image_engine

LOOKAHEADS = (0, 1, 2, 4, 8)
MAX_STEPS = 2000


def spans_at(*places: tuple[int, int]) -> tuple[MultimodalItem, ...]:
    return tuple(MultimodalItem(f"image {i}", offset, length) for i, (offset, length) in enumerate(places))


def random_spans(rng: random.Random, length: int, longest: int) -> tuple[MultimodalItem, ...]:
    """Side by side, far apart, at both ends of the prompt."""
    places: list[tuple[int, int]] = []
    position = rng.choice((0, 0, 1, 5))
    while position < length and len(places) < 6:
        size = min(rng.randint(1, longest), length - position)
        places.append((position, size))
        position += size + rng.choice((0, 0, 1, 3, 12))
    return spans_at(*places)


# ---- the rules ------------------------------------------------------------------------------------------


def test_a_span_in_the_lookahead_is_encoded_one_chunk_early() -> None:
    spans = spans_at((10, 3), (30, 3))
    assert encodings_for(spans, (), 0, 8, 2, 100) == (8, ())  # tokens to 9 are read
    assert encodings_for(spans, (), 0, 8, 3, 100) == (8, spans[:1])
    assert encodings_for(spans, {10}, 8, 8, 3, 100) == (8, ())


def test_a_chunk_ends_before_what_cannot_be_encoded() -> None:
    spans = spans_at((10, 3), (20, 5))
    assert encodings_for(spans, (), 0, 30, 4, 8) == (30, spans)
    assert encodings_for(spans, (), 0, 30, 4, 7) == (16, spans[:1])  # 20 - 4
    assert encodings_for(spans, (), 0, 30, 4, 2) == (6, ())  # 10 - 4
    assert encodings_for(spans, (), 6, 30, 4, 2) == (0, ())
    assert encodings_for(spans, (), 17, 30, 4, 5) == (30, spans[1:])  # 13 + 4 positions are computed


@pytest.mark.parametrize("k", LOOKAHEADS)
def test_the_widest_window_is_what_some_token_needs_at_once(k: int) -> None:
    rng = random.Random(k)
    for _ in range(200):
        length = rng.randint(1, 60)
        spans = random_spans(rng, length, 7)
        at_once = [
            sum(s.length for s in spans if s.offset < p + 1 + k and not is_done(s, p, k))
            for p in range(length)
        ]
        assert widest_window(spans, k) == max(at_once)


# ---- one request ----------------------------------------------------------------------------------------


def test_the_walk_of_a_prompt_with_two_images() -> None:
    """N = 4, chunks of 8, an image of 6 at 10 and one of 5 at 24; room for one of them."""
    engine, runner = make_image_engine(4, max_encoder_tokens=8, encoder_cache_tokens=8, budget=8)
    first, second = spans_at((10, 6), (24, 5))
    request = image_request(runner, range(40), (first, second), max_tokens=1)
    engine.add(request)
    walk = []
    while engine.has_work:
        engine.step()
        engine.check_invariants()
        batch = runner.batches[-1]
        for entry in batch.entries:
            walk.append((entry.start, entry.end, entry.encode, tuple(s for _, s in batch.freed_encodings)))
    # The first chunk reads the first image ahead. That is of use until 16 + 4 positions are computed; before,
    # the second one has no room, so the chunk from 16 ends at 24 - 4.
    assert walk == [
        (0, 8, (first,), ()),
        (8, 16, (), ()),
        (16, 20, (), ()),
        (20, 28, (second,), (first,)),
        (28, 36, (), ()),
        (36, 40, (), (second,)),
    ]
    assert is_whole(engine)


def test_images_of_a_model_without_encoder_or_too_large_are_refused_by_name() -> None:
    engine, runner = make_image_engine(2, max_encoder_tokens=0, encoder_cache_tokens=0)
    with pytest.raises(InvalidRequest, match="takes text only"):
        engine.add(image_request(runner, range(20), spans_at((3, 4))))
    engine, runner = make_image_engine(2, max_encoder_tokens=6, encoder_cache_tokens=9)
    with pytest.raises(InvalidRequest, match=r"need 7 encoded positions at once, this node holds 6"):
        engine.add(image_request(runner, range(20), spans_at((3, 7))))
    with pytest.raises(
        InvalidRequest, match=r"need 8 encoded positions"
    ):  # the second is seen from the first
        engine.add(image_request(runner, range(20), spans_at((3, 4), (8, 4))))
    with pytest.raises(InvalidRequest, match="ends at 21, but the prompt has 20 tokens"):
        engine.add(image_request(runner, range(20), spans_at((17, 4))))
    engine.add(image_request(runner, range(20), spans_at((3, 4), (12, 4))))


def test_two_requests_that_hold_one_image_each_do_not_wait_for_each_other() -> None:
    """Each needs two images at once and the cache holds three: the second request starts when the first
    has gone on, instead of both holding one and waiting for room."""
    engine, runner = make_image_engine(2, max_encoder_tokens=8, encoder_cache_tokens=12, budget=12)
    requests = [
        image_request(runner, range(40 * i, 40 * i + 20), spans_at((4, 4), (8, 4)), request_id=name)
        for i, name in enumerate("ab")
    ]
    for request in requests:
        engine.add(request)
    engine.step()
    assert [r.state for r in requests] == [RequestState.RUNNING, RequestState.WAITING]
    for _ in range(40):
        engine.step()
        engine.check_invariants()
    assert [r.state for r in requests] == [RequestState.FINISHED] * 2


@pytest.mark.parametrize(
    "state", [RequestState.WAITING, RequestState.RUNNING, RequestState.RECEIVING_KV, RequestState.HELD]
)
def test_an_abort_drops_outputs_and_reservation(state: RequestState) -> None:
    engine, runner = make_image_engine(2, max_encoder_tokens=9, encoder_cache_tokens=9, budget=8)
    receiving, held = state is RequestState.RECEIVING_KV, state is RequestState.HELD
    spans = spans_at((2, 9)) if not held else spans_at((10, 9))
    request = image_request(runner, range(20), spans, stop_at=19 if held else None, hold_blocks=held)
    if receiving:
        engine.reserve(request, 19)
    else:
        engine.add(request)
    while request.state is not state:
        engine.step()
    assert engine.abort("r")
    engine.check_invariants()
    other = image_request(runner, range(30, 50), spans_at((0, 9)), request_id="other")
    engine.add(other)
    engine.step()
    assert runner.encoded == {("other", s) for s in runner.images["other"]}
    while engine.has_work:
        engine.step()
    engine.step()  # tells what the last one freed
    assert not runner.encoded
    assert is_whole(engine)


# ---- random runs ----------------------------------------------------------------------------------------


class World:
    """Random prompts with images, hand-overs, held prefills, forks and aborts on a small pool."""

    def __init__(self, seed: int, n: int) -> None:
        rng = self.rng = random.Random(f"{seed} {n}")
        self.n = n
        longest = rng.randint(1, 12)
        step = rng.randint(longest, 3 * longest)
        self.longest = longest
        self.engine, self.runner = make_image_engine(
            n,
            max_encoder_tokens=step,
            encoder_cache_tokens=rng.choice((step, longest, 2 * step)),
            budget=rng.choice((n + 1, n + 2, 12, 64)),
            threshold=rng.choice((0, 0, n + 1)),
            num_blocks=rng.choice((18, 22, 60)),
            block_size=rng.choice((2, 4)),
            max_num_seqs=rng.choice((1, 3, 6)),
            state_block_size=rng.choice((0, 0, 8)),
            draft_rule=sometimes_right(seed, rng.choice((0.0, 0.7, 1.0))),
        )
        self.requests: list[Request] = []
        self.receiving: dict[str, int] = {}
        self.num_refused = self.num_cut = self.num_early = 0

    def prompt(self) -> tuple[list[int], tuple[MultimodalItem, ...]]:
        """One of three texts with its images, or now and then with others: hits and misses."""
        which = self.rng.randrange(3)
        fixed = random.Random(f"{which} {self.longest}")
        tokens = continuation([which], 34)
        spans = random_spans(fixed if self.rng.random() < 0.7 else self.rng, 34, self.longest)
        length = self.rng.randint(1, 34)
        return tokens[:length], tuple(s for s in spans if s.end <= length)

    def add(self) -> None:
        rng, name = self.rng, f"r{len(self.requests)}"
        tokens, spans = self.prompt()
        kind = rng.choice(("plain", "plain", "held", "handed over"))
        cut = cut_of(len(tokens), self.n)
        request = image_request(
            self.runner,
            tokens,
            spans,
            request_id=name,
            max_tokens=rng.randint(1, 12),
            arrival=float(len(self.requests)),
            stop_at=cut if kind == "held" and cut else None,
            hold_blocks=kind == "held",
            num_sequences=1 if kind == "held" else rng.choice((1, 1, 1, 2)),
            seed=100 * len(self.requests),
        )
        try:
            if kind == "handed over" and cut is not None:
                self.engine.reserve(request, cut)
                self.receiving[name] = cut
            else:
                self.engine.add(request)
        except InvalidRequest:
            limit = min(self.runner.max_encoder_tokens, self.runner.encoder_cache_tokens)
            assert widest_window(spans, self.n) > limit
            self.num_refused += 1
            return
        except CapacityError:
            return
        self.requests.append(request)

    def arrive(self) -> None:
        if not self.receiving:
            return
        name = self.rng.choice(sorted(self.receiving))
        cut = self.receiving.pop(name)
        request = self.engine.scheduler.requests.get(name)
        if request is None:
            return
        arrived = cut if self.rng.random() < 0.8 else self.rng.randint(0, cut - 1)
        self.runner.receive(self.engine.wanted(name, cut), request.token_ids, arrived)
        if arrived < cut:
            self.engine.kv_failed(name, arrived)
        else:
            self.engine.kv_arrived(name, cut, ROW if self.n > 1 and self.rng.random() < 0.7 else None)

    def end_one(self) -> None:
        ids = sorted(self.engine.scheduler.requests)
        if ids and self.rng.random() < 0.3:
            self.engine.abort(self.rng.choice(ids))
        for request in list(self.engine.scheduler.requests.values()):
            if request.state is RequestState.HELD:
                self.engine.release(request.request_id)

    def step(self) -> None:
        self.engine.step()
        self.engine.check_invariants()
        for entry in self.runner.batches[-1].entries:
            self.num_early += sum(s.offset >= entry.end for s in entry.encode)
            nexts = [s.offset for s in self.runner.images.get(entry.request_id, ()) if s.offset >= entry.end]
            self.num_cut += not entry.samples and bool(nexts) and nexts[0] == entry.end + self.n

    def run(self) -> None:
        for _ in range(self.rng.randint(5, 40)):
            self.rng.choice((self.add, self.add, self.arrive, self.end_one))()
            self.engine.check_invariants()
            for _ in range(self.rng.choice((0, 1, 2))):
                self.step()
        for _ in range(MAX_STEPS):
            while self.receiving:
                self.arrive()
            for request in list(self.engine.scheduler.requests.values()):
                if request.state is RequestState.HELD:
                    self.engine.release(request.request_id)
            if not self.engine.has_work:
                break
            self.step()
        self.step()  # tells what the last one freed
        assert is_whole(self.engine)
        assert not self.runner.encoded
        assert self.engine.scheduler.encoders._spare == self.runner.encoder_cache_tokens
        for request in self.requests:
            assert request.state is RequestState.FINISHED
            if request.finish_reason is not FinishReason.ABORT and request.stop_at is None:
                prompt = request.token_ids[: request.num_prompt_tokens]
                count = min(request.sampling.max_tokens, self.engine.scheduler.limit - len(prompt))
                assert outputs_of(request) == continuation(prompt, count, request.sampling.seed)


def run_worlds(n: int) -> Sequence[World]:
    worlds = [World(seed, n) for seed in range(50)]
    for world in worlds:
        world.run()
    return worlds


@pytest.mark.parametrize("n", LOOKAHEADS)
def test_random_images_budgets_chunks_preemptions_and_aborts(n: int) -> None:
    worlds = run_worlds(n)
    requests = [r for w in worlds for r in w.requests]
    assert sum(r.num_preemptions for r in requests) > 0
    assert sum(r.num_cached_tokens > 0 for r in requests) > 10
    assert sum(r.finish_reason is FinishReason.ABORT for r in requests) > 10
    assert n == 0 or sum(w.num_refused for w in worlds) > 0
    assert sum(w.num_cut for w in worlds) > 2, "chunks that ended for want of encoder budget"
    assert n == 0 or sum(w.num_early for w in worlds) > 5, "spans encoded one chunk early"


# ---- controls -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("control", ["encoded when reached", "freed when computed"])
def test_controls_are_seen(control: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if control == "encoded when reached":
        rule = encodings_for
        monkeypatch.setattr(
            "common.engine.encoder_cache.encodings_for",
            lambda spans, held, start, num_new, lookahead, room: rule(spans, held, start, num_new, 0, room),
        )
    else:
        monkeypatch.setattr(
            "common.engine.encoder_cache.is_done", lambda span, computed, k: span.end - k <= computed
        )
    with pytest.raises(AssertionError, match="before it is encoded"):
        run_worlds(4)
