"""OpenAI bodies: what is understood, ignored, harmless or refused - each by name."""

import json
from typing import Any

import pytest

from common.errors import InvalidRequest
from common.request import SamplingParams
from router.openai_types import (
    HARMLESS_VALUES,
    IGNORED_FIELDS,
    GenerationRequest,
    check_token_ids,
    parse_chat,
    parse_completion,
)

MESSAGES = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> GenerationRequest:
    return parse_completion(json.dumps({"model": "m", "prompt": "hi"} | fields).encode())


def chat(**fields: Any) -> GenerationRequest:
    return parse_chat(json.dumps({"model": "m", "messages": MESSAGES} | fields).encode())


def test_defaults() -> None:
    request = completion()
    assert request == GenerationRequest("m", SamplingParams(max_tokens=16), 16, prompts=("hi",))
    assert not request.chat
    request = chat()
    assert request.chat
    assert request.max_tokens is None
    assert request.sampling.logprobs is None


def test_everything_understood_arrives() -> None:
    sampling: dict[str, Any] = {
        "temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "presence_penalty": 1,
        "frequency_penalty": -1, "repetition_penalty": 1.1, "seed": -3, "ignore_eos": True, "min_tokens": 2,
    }  # fmt: skip
    request = completion(
        **sampling, max_tokens=9, stop=["a", "b"], stop_token_ids=[3], logit_bias={"7": -100}, logprobs=2,
        n=3, stream=True, stream_options={"include_usage": True}, cache_salt="s", priority=-1,
    )  # fmt: skip
    assert request.sampling == SamplingParams(
        max_tokens=9, stop=("a", "b"), stop_token_ids=(3,), logit_bias={7: -100.0}, logprobs=2, **sampling
    )  # fmt: skip
    assert (request.n, request.stream, request.include_usage) == (3, True, True)
    assert (request.cache_salt, request.priority) == ("s", -1)


def test_chat_fields_of_its_own() -> None:
    assert chat(cache_salt="s").cache_salt == "s"
    assert chat(max_completion_tokens=3).max_tokens == 3
    assert chat(max_tokens=4).max_tokens == 4
    assert chat(logprobs=True).sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).sampling.logprobs == 5
    assert chat(
        messages=[{"role": "assistant", "content": "x", "refusal": None, "tool_calls": []}]
    ).messages == [{"role": "assistant", "content": "x"}]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ([1, 2],)),
        ([[1], [2, 3]], ([1], [2, 3])),
        (["a", [1]], ("a", [1])),
        ('{"prompt": 1}', ('{"prompt": 1}',)),
    ],
)
def test_prompt_shapes(prompt: Any, prompts: tuple[Any, ...]) -> None:
    assert completion(prompt=prompt).prompts == prompts


def test_what_cannot_change_the_answer_is_ignored() -> None:
    assert completion(**dict.fromkeys(IGNORED_FIELDS, "x")) == completion()
    assert completion(top_p=None, stop=None, seed=None, stream_options=None, unheard_of=None) == completion()
    for name, values in HARMLESS_VALUES.items():
        for value in values:
            assert chat(**{name: value}) == chat()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"echo": 1}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": [5, "a"]}, None),  # ids, checked against the vocabulary
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"model": 5}, "model"),
        ({"model": None}, "model"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1 << 70}, "max_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"n": -1}, "n"),
        ({"seed": 1 << 63}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"stop": 5}, "stop"),
        ({"stop": [5]}, "stop"),
        ({"stop": "x" * 257}, "stop"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"priority": 1 << 40}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"cache_salt": ["s"]}, "cache_salt"),
    ],
)
def test_refused_completions_name_the_field(fields: dict[str, Any], param: str | None) -> None:
    if param is None:
        with pytest.raises(InvalidRequest, match="expected a token id"):
            check_token_ids(completion(**fields).prompts[0], 100, "prompt")
        return
    with pytest.raises(InvalidRequest) as caught:
        completion(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": "hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [*MESSAGES, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_completion_tokens"),
        ({"max_completion_tokens": -5}, "max_completion_tokens"),
        ({"prompt": "hi"}, "prompt"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": True}, "cache_salt"),
        ({"cache_salt": {"of": "tenant"}}, "cache_salt"),
    ],
)
def test_refused_chats_name_the_field(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert caught.value.http_status == 400


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[1]", b'"x"', b'{"model": "\xff"}', b'{"model": "\\ud800"}', b"nul"]
)
def test_what_is_no_json_object_is_said_so(raw: bytes) -> None:
    with pytest.raises(InvalidRequest, match="the body"):
        parse_completion(raw)
