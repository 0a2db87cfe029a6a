"""Decode node and router find the same end: the node's stop checker against the router's choice text."""

from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.stopping import StopChecker
from common.request import FinishReason, Request, SamplingParams, TokenLogprob
from common.tokenizer import Tokenizer
from router.choice_text import ChoiceText, Delta
from tests.builders_tokenizer import CORPUS, byte_level_tokenizer

TOKENIZER = Tokenizer(byte_level_tokenizer(), named_tokens={"eos_token": "<|end|>"})
EOS = TOKENIZER.eos_token_ids[0]


def generate(sampling: SamplingParams, tokens: list[int]) -> tuple[list[int], FinishReason, str | None]:
    """What the node keeps of ``tokens``: as the scheduler appends them, one by one."""
    request = Request("r", [1], sampling)
    checker = StopChecker(request, TOKENIZER.eos_token_ids, TOKENIZER.detokenizer)
    for token in tokens:
        request.token_ids.append(token)
        if checker.check(token) is not None:
            return request.token_ids[1:], FinishReason.STOP, checker.stop_string
    return request.token_ids[1:], FinishReason.LENGTH, None


def emit(
    sampling: SamplingParams, kept: list[int], sizes: list[int], reason: FinishReason, stop: str | None
) -> list[Delta]:
    choice = ChoiceText(0, TOKENIZER, sampling)
    deltas: list[Delta] = []
    start = 0
    for size in [*sizes, len(kept)]:
        chunk = kept[start : start + size]
        start += size
        if chunk:
            delta = choice.push(chunk, [TokenLogprob(-1.0)] * len(chunk))
            deltas += [delta] if delta is not None else []
    return [*deltas, choice.finish(reason.value, stop)]


texts = st.sampled_from(CORPUS)
cuts = st.tuples(st.integers(0, 30), st.integers(1, 5))


@settings(max_examples=200, deadline=None)
@given(
    text=texts,
    stop_cuts=st.lists(cuts, max_size=3),
    eos_at=st.integers(0, 60),
    min_tokens=st.sampled_from([0, 0, 5]),
    sizes=st.lists(st.integers(1, 6), max_size=12),
)
def test_router_and_node_agree(
    text: str, stop_cuts: list[tuple[int, int]], eos_at: int, min_tokens: int, sizes: list[int]
) -> None:
    stops = tuple(s for at, length in stop_cuts if (s := text[at : at + length]))
    sampling = SamplingParams(max_tokens=100, stop=stops, min_tokens=min_tokens)
    tokens = TOKENIZER.encode(text)
    tokens.insert(eos_at, EOS)
    kept, reason, stop = generate(sampling, tokens)

    deltas = emit(sampling, kept, sizes, reason, stop)

    emitted = "".join(delta.text for delta in deltas)
    everything = TOKENIZER.decode(kept)
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == reason.value
    if stop is None:
        assert emitted == everything
    else:
        assert everything.startswith(emitted + stop)
        if min_tokens == 0:
            assert not any(s in emitted for s in stops)
    # log-probabilities: a prefix of the kept tokens, none of whose text lies beyond what was emitted
    scored = [token for delta in deltas for token in delta.scored]
    assert [token.token_id for token in scored] == kept[: len(scored)]
    if stop is None:
        assert len(scored) == len(kept)
    assert emitted.startswith(
        TOKENIZER.decode([t.token_id for t in scored]).rstrip("\N{REPLACEMENT CHARACTER}")
    )
