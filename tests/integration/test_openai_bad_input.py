"""Bad input against a live `baton up` with a small pool: each answered by name, and the server goes on."""

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.live import LONG, MODEL, Live, of_baton, serving
from tests.up_process import ROOT

NUM_BLOCKS = 80
ROOM = NUM_BLOCKS * 16  # tokens that one request may have: less than the model's own 2,048
VOCABULARY = 4096
START_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serving(tmp_path_factory.mktemp("up"), f"--num-blocks={NUM_BLOCKS}", cache="as told") as running:
        yield running


@pytest.fixture(autouse=True)
def goes_on(live: Live) -> Iterator[None]:
    """After every test here the server answers, through both nodes, as before."""
    yield
    told = live.complete(LONG, max_tokens=2)
    assert told.choices[0].finish_reason == "length"


def completion(**fields: Any) -> tuple[str, Any]:
    return "completions", {"model": MODEL, "prompt": "Hello", "max_tokens": 4} | fields


def chat(**fields: Any) -> tuple[str, Any]:
    messages = [{"role": "user", "content": "Hello"}]
    return "chat/completions", {"model": MODEL, "messages": messages, "max_tokens": 4} | fields


def check_error(answer: httpx.Response, status: int, param: str | None, *parts: str) -> dict[str, Any]:
    """An OpenAI error object with all of ``parts`` in its message."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    for part in parts:
        assert part in error["message"]
    return error


# What each says: the field, the value, and what would do.
WRONG: dict[str, tuple[tuple[str, Any], str, tuple[str, ...]]] = {
    "empty prompt": (completion(prompt=""), "prompt", ("prompt is empty", "at least one token")),
    "no token ids": (completion(prompt=[]), "prompt", ("prompt is empty",)),
    "one of two prompts empty": (completion(prompt=["x", ""]), "prompt", ("prompt is empty",)),
    "no messages": (chat(messages=[]), "messages", ("messages is empty", "at least one")),
    "prompt missing": (("completions", {"model": MODEL}), "prompt", ("'prompt' is missing",)),
    "model missing": (("completions", {"prompt": "x"}), "model", ("'model' is missing",)),
    "temperature no number": (completion(temperature="hot"), "temperature", ("'hot'", "expected `float`")),
    "messages no list": (chat(messages="hi"), "messages", ("'hi'", "expected `array`")),
    "message no object": (chat(messages=[5]), "messages", ("[5]", "expected `object`", "messages[0]")),
    "stream no boolean": (completion(stream="yes"), "stream", ("'yes'", "expected `bool`")),
    "n no integer": (completion(n=1.5), "n", ("1.5", "expected `int`")),
    "boolean for integer": (completion(max_tokens=True), "max_tokens", ("True", "expected `int | null`")),
    "prompt a number": (completion(prompt=5), "prompt", ("prompt is 5", "expected `str | array`")),
    "stop a number": (completion(stop=[1]), "stop", ("[1]", "expected `str`", "stop[0]")),
    "logprobs of the other endpoint": (chat(logprobs=5), "logprobs", ("5", "expected `bool`")),
    "unknown field": (completion(banana=1), "banana", ("'banana' is not supported", "remove it")),
    "tools": (chat(tools=[{"type": "function"}]), "tools", ("'tools' is not supported", "remove it")),
    "response format": (
        chat(response_format={"type": "json_object"}), "response_format", ("not supported", "remove it"),
    ),
    "best of three": (completion(best_of=3), "best_of", ("'best_of' is not supported",)),
    "negative max_tokens": (completion(max_tokens=-1), "max_tokens", ("max_tokens is -1", "at least 1")),
    "no max_tokens": (completion(max_tokens=0), "max_tokens", ("max_tokens is 0", "at least 1")),
    "negative by the new name": (
        chat(max_completion_tokens=-3, max_tokens=None), "max_completion_tokens", ("is -3", "at least 1"),
    ),
    "n of 0": (completion(n=0), "n", ("n is 0", "at least 1", "at most 16")),
    "n of 17": (chat(n=17), "n", ("n is 17", "at most 16")),
    "17 stop strings": (completion(stop=["a"] * 17), "stop", ("17 strings", "at most 16")),
    "long stop string": (chat(stop="x" * 257), "stop", ("257 characters", "1 to 256")),
    "empty stop string": (completion(stop=["a", ""]), "stop", ("0 characters", "1 to 256")),
    "65 stop ids": (completion(stop_token_ids=[1] * 65), "stop_token_ids", ("65 entries", "at most 64")),
    "id past the vocabulary": (
        completion(prompt=[1, VOCABULARY]), "prompt", ("prompt[1] is 4096", "vocabulary of 4096 tokens"),
    ),
    "negative id": (completion(prompt=[-1]), "prompt", ("prompt[0] is -1", "vocabulary of 4096 tokens")),
    "id past 64 bits": (completion(prompt=[1 << 70]), "prompt", (str(1 << 70), "vocabulary")),
    "id no integer": (completion(prompt=[1, 1.5]), "prompt", ("prompt[1] is 1.5", "expected a token id")),
    "stop id past the vocabulary": (
        completion(stop_token_ids=[VOCABULARY]), "stop_token_ids", ("4096", "vocabulary of 4096 tokens"),
    ),
    "biased id past the vocabulary": (completion(logit_bias={"4096": 1}), "logit_bias", ("4096",)),
    "bias on no id": (completion(logit_bias={"x": 1}), "logit_bias", ("'x'", "no token id")),
    "bias too large": (completion(logit_bias={"5": 101}), "logit_bias", ("token 5", "101", "-100 to 100")),
    "temperature below 0": (completion(temperature=-1), "temperature", ("is -1.0", "at least 0")),
    "top_p of 0": (chat(top_p=0), "top_p", ("top_p is 0.0", "above 0 and at most 1")),
    "seed past 64 bits": (completion(seed=1 << 63), "seed", (str(1 << 63), "at most")),
    "too many logprobs": (completion(logprobs=21), "logprobs", ("logprobs is 21", "at most 20")),
    "alternatives without logprobs": (chat(top_logprobs=3), "top_logprobs", ("needs logprobs: true",)),
    "usage without a stream": (
        completion(stream_options={"include_usage": True}), "stream_options", ("needs stream: true",),
    ),
    "more to say than allowed": (completion(min_tokens=5), "min_tokens", ("min_tokens is 5", "at most 4")),
    "unknown role": (
        chat(messages=[{"role": "robot", "content": "x"}]), "messages[0].role", ("'robot'", "assistant"),
    ),
    "an image": (
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        "messages[0].content[0]", ("'image_url'", "only text parts are supported"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("asked", "param", "parts"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_field_is_named(
    live: Live, asked: tuple[str, Any], param: str, parts: tuple[str, ...]
) -> None:
    endpoint, body = asked
    check_error(live.http.post(f"/v1/{endpoint}", json=body), 400, param, *parts)
    # Streaming makes no difference: nothing has been sent, so the status still tells.
    if "stream" not in body and param not in ("stream", "stream_options"):
        check_error(live.http.post(f"/v1/{endpoint}", json=body | {"stream": True}), 400, param, *parts)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON"),
        (b"{not json", "not valid JSON"),
        (b'{"model": "baton-tiny", "prompt": "x"', "not valid JSON"),
        (b'{"model": "baton-tiny", "prompt": "x", "temperature": NaN}', "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"[1]", "must be a JSON object, not an array"),
        (b'{"prompt": ' + b"[" * 20_000, "nested too deeply"),
    ],
    ids=["nothing", "words", "cut off", "no number", "no text", "a list", "deep"],
)
def test_a_body_that_is_no_json_object(live: Live, body: bytes, message: str) -> None:
    for endpoint in ("completions", "chat/completions"):
        check_error(live.http.post(f"/v1/{endpoint}", content=body), 400, None, message)


def test_a_body_that_is_too_large(live: Live) -> None:
    body = b'{"model": "baton-tiny", "prompt": "' + b"x" * (9 << 20) + b'"}'
    check_error(live.http.post("/v1/completions", content=body), 413, None, str(len(body)), "at most 8388608")


def test_a_prompt_longer_than_the_pool(live: Live) -> None:
    for fields, parts in (
        (
            {"prompt": [5] * (ROOM + 20)},
            (f"has {ROOM + 20} tokens", f"may have {ROOM}", "Shorten the prompt"),
        ),
        ({"prompt": [5] * ROOM}, (f"has {ROOM} tokens", f"may have {ROOM}")),
        ({"prompt": "word " * 3000}, ("tokens", f"may have {ROOM}")),
        (
            {"prompt": [5] * 100, "max_tokens": ROOM},
            ("100 tokens", f"max_tokens is {ROOM}", f"lower max_tokens to {ROOM - 100}"),
        ),
    ):
        endpoint, body = completion(**fields)
        error = check_error(live.http.post(f"/v1/{endpoint}", json=body), 400, "prompt", *parts)
        assert error["code"] == "context_length_exceeded"
    fits = live.complete([5] * (ROOM - 2), max_tokens=2)
    assert fits.usage is not None
    assert fits.usage.total_tokens == ROOM
    assert of_baton(fits.usage)["transferred_tokens"] == ROOM - 2 - 3


def test_an_unknown_model_and_other_unknown_names(live: Live) -> None:
    for endpoint, body in (completion(model="gpt-9"), chat(model="gpt-9")):
        error = check_error(
            live.http.post(f"/v1/{endpoint}", json=body), 404, "model", "'gpt-9'", f"'{MODEL}'"
        )
        assert error["code"] == "model_not_found"
    check_error(live.http.get("/v1/models/gpt-9"), 404, "model", "'gpt-9'", f"'{MODEL}'")
    check_error(live.http.get("/v1/nothing"), 404, None, "/v1/nothing")
    check_error(live.http.get("/v1/completions"), 405, None, "GET /v1/completions")


def test_the_client_raises_what_it_should(live: Live) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        live.client.completions.create(model="gpt-9", prompt="x")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="max_tokens is -1") as negative:
        live.complete("x", max_tokens=-1)
    assert negative.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError, match="n is 0"):
        live.stream("x", n=0)
    with pytest.raises(openai.BadRequestError, match=f"may have {ROOM}") as long:
        live.stream([5] * 2000)
    assert long.value.code == "context_length_exceeded"


# ---- processes ------------------------------------------------------------------------------------------


def start(*words: str) -> subprocess.CompletedProcess[str]:
    """Runs a `baton` command that is expected to end by itself."""
    return subprocess.run(
        [sys.executable, "-m", "cli.main", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False,
    )  # fmt: skip


def control_address(live: Live) -> str:
    port = re.search(r"control (\d+)", live.up.stderr)
    assert port is not None
    return f"tcp://127.0.0.1:{port[1]}"


@pytest.mark.parametrize("role", ["decode", "prefill"])
@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--num-speculative-tokens=2",), ("num_modules", "'2' instead of '4'")),
        (("--dtype=bfloat16",), ("dtype",)),
    ],
    ids=["N", "dtype"],
)
def test_a_node_that_does_not_fit_is_refused_by_name(
    live: Live, role: str, words: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    address = control_address(live)
    common = (f"--router={address}", f"--model={MODEL}", "--dtype=float32", "--threads=1", "--kv-cache-mib=8")
    ended = start(role, "--node-id=stranger", *common, *words)
    assert ended.returncode == 2, ended.stderr
    assert ended.stdout == ""
    assert "does not fit node" in ended.stderr
    assert re.search(r"does not fit node (decode|prefill)-0", ended.stderr)
    for part in parts:
        assert part in ended.stderr
    assert "Traceback" not in ended.stderr
    assert {node["node_id"] for node in live.cluster()["nodes"]} == {"decode-0", "prefill-0"}


def test_a_port_in_use_is_named(live: Live) -> None:
    port = httpx.URL(live.http.base_url).port
    address = control_address(live)
    for words in (
        ("router", f"--port={port}", "--control-port=0"),
        ("router", "--port=0", f"--control-port={address.rpartition(':')[2]}"),
        ("decode", f"--port={port}", f"--router={address}", "--kv-cache-mib=8"),
    ):
        ended = start(*words, f"--model={MODEL}")
        assert ended.returncode == 2, ended.stderr
        taken = address.rpartition(":")[2] if words[1] == "--port=0" else str(port)
        assert f"port {taken} on 127.0.0.1" in ended.stderr
        assert "choose another with --" in ended.stderr
        assert "Traceback" not in ended.stderr
