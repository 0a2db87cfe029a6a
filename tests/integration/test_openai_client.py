"""The official OpenAI client against a live `baton up`: a prefill node, a decode node, a router, float32."""

from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.live import (
    BACK_OFF,
    BLOCK_SIZE,
    LONG,
    MODEL,
    SHORT,
    Live,
    Told,
    cached_tokens,
    check_usage,
    num_tokens,
    of_baton,
    text,
)


def chat(live: Live, messages: list[ChatCompletionMessageParam], **fields: Any) -> Any:
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}} | fields
    return live.client.chat.completions.create(model=MODEL, messages=messages, **asked)


def token_id(live: Live, token: str) -> int | None:
    """The id whose text is ``token``; None if it is not one token."""
    ids = live.http.post("/tokenize", json={"prompt": token}).raise_for_status().json()["tokens"]
    return ids[0] if len(ids) == 1 else None


# ---- the two endpoints ----------------------------------------------------------------------------------


def test_models(live: Live) -> None:
    assert [model.id for model in live.client.models.list()] == [MODEL]
    assert live.client.models.retrieve(MODEL).model_extra == {"max_model_len": 2048}


def test_completion_whole_and_streamed_are_the_same(live: Live) -> None:
    told = live.complete(LONG)
    assert told.object == "text_completion"
    assert told.model == MODEL
    assert told.choices[0].finish_reason == "length"
    length = num_tokens(live, prompt=LONG)
    check_usage(told.usage, length, 32)
    streamed = live.stream(LONG)
    assert streamed.text == told.choices[0].text
    assert streamed.finish_reason == "length"
    check_usage(streamed.usage, length, 32)
    assert len(streamed.pieces) > 3  # as it was made, not in one piece
    assert sum(of_baton(streamed.usage)["accepted_per_pos"]) == of_baton(streamed.usage)["num_accepted"]
    assert of_baton(streamed.usage)["num_drafts"] > 0


def test_several_prompts_and_token_ids(live: Live) -> None:
    ids = live.http.post("/tokenize", json={"prompt": SHORT}).raise_for_status().json()["tokens"]
    one = live.complete(ids)
    assert one.choices[0].text == live.complete(SHORT).choices[0].text
    both = live.client.completions.create(
        model=MODEL, prompt=[SHORT, LONG], temperature=0, max_tokens=8, extra_body={"ignore_eos": True}
    )
    assert [choice.index for choice in both.choices] == [0, 1]
    assert both.choices[0].text == live.complete(SHORT, max_tokens=8).choices[0].text
    assert both.choices[1].text == live.complete(LONG, max_tokens=8).choices[0].text
    check_usage(both.usage, len(ids) + num_tokens(live, prompt=LONG), 16)


def test_chat_whole_and_streamed_are_the_same(live: Live) -> None:
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": "Answer in a few words."},
        {"role": "user", "content": [{"type": "text", "text": "How is a file opened?"}]},
    ]
    told = chat(live, messages)
    assert told.object == "chat.completion"
    assert told.choices[0].message.role == "assistant"
    assert told.choices[0].finish_reason == "length"
    length = num_tokens(live, messages=messages)
    check_usage(told.usage, length, 24)

    chunks = list(chat(live, messages, stream=True, stream_options={"include_usage": True}))
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[0].choices[0].delta.role == "assistant"
    contents = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(contents) == told.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + [
        "length"
    ]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    check_usage(chunks[-1].usage, length, 24)
    plain = list(chat(live, messages, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in plain)  # usage only where it is asked for


# ---- where the prompt is computed -----------------------------------------------------------------------


def test_long_prompts_go_through_the_prefill_node_and_short_ones_do_not(live: Live) -> None:
    far = live.complete(LONG, extra={"cache_salt": "far"})
    assert far.usage is not None
    assert of_baton(far.usage)["transferred_tokens"] == far.usage.prompt_tokens - BACK_OFF
    assert of_baton(far.usage)["transferred_bytes"] > 0
    assert cached_tokens(far.usage) == 0
    near = live.complete(SHORT, extra={"cache_salt": "near"})
    assert of_baton(near.usage)["transferred_tokens"] == of_baton(near.usage)["transferred_bytes"] == 0


def test_second_turn_hits_the_cache_and_says_the_same(live: Live) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": text(2, 500)}]
    first = chat(live, messages)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": text(3, 300)},
    ]
    second = chat(live, messages)
    cached = cached_tokens(second.usage)
    assert cached % BLOCK_SIZE == 0
    assert cached >= first.usage.prompt_tokens - 2 * BLOCK_SIZE
    fresh = chat(live, messages, extra_body={"ignore_eos": True, "cache_salt": "another reader"})
    assert cached_tokens(fresh.usage) == 0  # a salt keeps readers apart
    assert fresh.choices[0].message.content == second.choices[0].message.content


# ---- stopping -------------------------------------------------------------------------------------------


def stop_inside_a_run(told: Told) -> tuple[str, int]:
    """A string that ends within a chunk of several tokens, and the number of tokens up to its end."""
    end_of_chunk = num_before = 0
    for piece, count in told.pieces:
        start, end_of_chunk = end_of_chunk, end_of_chunk + len(piece)
        inside = [o for o in told.offsets[num_before + 1 : num_before + count] if start < o < end_of_chunk]
        num_before += count
        for end in inside:
            for begin in range(end - 1, 0, -1):
                stop = told.text[begin:end]
                if told.text.find(stop) == begin:
                    return stop, sum(offset < end for offset in told.offsets)
    raise AssertionError(f"no accepted run in {told.pieces}")


def test_stop_string_inside_an_accepted_run(live: Live) -> None:
    told = live.stream(LONG, max_tokens=64, logprobs=1)
    stop, count = stop_inside_a_run(told)
    before = told.text[: told.text.index(stop)]
    whole = live.complete(LONG, max_tokens=64, stop=[stop, "never said"])
    assert whole.choices[0].text == before
    assert whole.choices[0].finish_reason == "stop"
    check_usage(whole.usage, num_tokens(live, prompt=LONG), count)
    streamed = live.stream(LONG, max_tokens=64, stop=stop, logprobs=1)
    assert streamed.text == before
    assert streamed.finish_reason == "stop"
    check_usage(streamed.usage, num_tokens(live, prompt=LONG), count)
    assert streamed.tokens == told.tokens[: len(streamed.tokens)]
    assert sum(map(len, streamed.tokens)) <= len(
        before
    )  # no text of the stop leaks through its log-probability
    # What ran past the stop is not in the cache either: the same again, and on to the end.
    assert live.complete(LONG, max_tokens=64).choices[0].text == told.text


def test_stop_string_in_chat(live: Live) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "How is a file opened?"}]
    told = chat(live, messages).choices[0].message.content
    middle = len(told) // 2
    stop = next(told[b:middle] for b in range(middle - 1, 0, -1) if told.find(told[b:middle]) == b)
    stopped = chat(live, messages, stop=stop).choices[0]
    assert stopped.message.content == told[: told.index(stop)]
    assert stopped.finish_reason == "stop"


def test_stop_ids(live: Live) -> None:
    told = live.stream(LONG, max_tokens=64, logprobs=1)
    candidates = ((i, token_id(live, token)) for i, token in enumerate(told.tokens) if i >= 2)
    at, stop = next((i, found) for i, found in candidates if found and told.tokens.index(told.tokens[i]) == i)
    for answer in (
        live.stream(LONG, max_tokens=64, extra={"stop_token_ids": [stop]}),
        live.stream(LONG, max_tokens=64, extra={"stop_token_ids": [stop], "min_tokens": at}),
    ):
        assert answer.text == "".join(told.tokens[:at])
        assert answer.finish_reason == "stop"
        check_usage(answer.usage, num_tokens(live, prompt=LONG), at + 1)  # the stop token was generated
    longer = live.stream(LONG, max_tokens=64, logprobs=1, extra={"stop_token_ids": [stop], "min_tokens": 64})
    assert longer.finish_reason == "length"
    assert told.tokens[at] not in longer.tokens  # not chosen while it could not end the answer


# ---- sampling -------------------------------------------------------------------------------------------


def test_seeds_reproduce_whatever_computes_the_prompt(live: Live) -> None:
    def sampled(seed: int | None, salt: str) -> tuple[str, int]:
        told = live.complete(LONG, seed=seed, temperature=0.9, max_tokens=48, extra={"cache_salt": salt})
        return told.choices[0].text, of_baton(told.usage)["transferred_tokens"]

    first, sent = sampled(7, "seeded")
    again, sent_again = sampled(7, "seeded")
    assert sent > 0
    assert sent_again == 0  # the decode node had it in its cache
    assert again == first
    assert sampled(7, "seeded elsewhere")[0] == first  # a second hand-over
    others = {sampled(seed, "seeded")[0] for seed in (8, 9, None, None)}
    assert len(others | {first}) == 5


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_logprobs_of_completions(live: Live, temperature: float) -> None:
    told = live.complete(LONG, logprobs=4, temperature=temperature, seed=3)
    scored = told.choices[0].logprobs
    assert scored is not None
    assert scored.tokens is not None
    assert scored.token_logprobs is not None
    assert scored.top_logprobs is not None
    assert scored.text_offset is not None
    assert len(scored.tokens) == len(scored.token_logprobs) == len(scored.top_logprobs) == 32
    assert "".join(scored.tokens) == told.choices[0].text
    assert all(
        told.choices[0].text[o:].startswith(t) for o, t in zip(scored.text_offset, scored.tokens, strict=True)
    )
    for token, logprob, top in zip(scored.tokens, scored.token_logprobs, scored.top_logprobs, strict=True):
        values = list(top.values())
        assert len(values) == 4
        assert values == sorted(values, reverse=True)
        assert max(logprob, values[0]) <= 0
        assert logprob <= values[0]
        if temperature == 0:
            assert logprob == pytest.approx(values[0])
            assert token == next(iter(top)) or values[0] - values[1] < 1e-4
        if token in top:
            assert top[token] == pytest.approx(logprob)
        else:
            assert logprob <= values[-1]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_logprobs_of_chat(live: Live, temperature: float) -> None:
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "How is a file opened?"}]
    told = chat(live, messages, logprobs=True, top_logprobs=3, temperature=temperature, seed=3)
    content = told.choices[0].logprobs.content
    assert len(content) == 24
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == told.choices[0].message.content
    for entry in content:
        values = [top.logprob for top in entry.top_logprobs]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert entry.logprob <= values[0] <= 0
        if temperature == 0:
            assert entry.logprob == pytest.approx(values[0])
    chunks = list(chat(live, messages, logprobs=True, temperature=temperature, seed=3, stream=True))
    streamed = [e for chunk in chunks if chunk.choices[0].logprobs for e in chunk.choices[0].logprobs.content]
    assert [e.token for e in streamed] == [e.token for e in content]
    assert [e.logprob for e in streamed] == pytest.approx([e.logprob for e in content])
    assert all(entry.top_logprobs == [] for entry in streamed)
