"""The real router process's parts over real sockets, with fake nodes: what clients and nodes see."""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import httpx
import msgspec
import pytest

from common.errors import ConfigError
from common.messages import NodeLoad, Refused
from common.tokenizer import Tokenizer
from router import generation
from router.config import Limits, ListenOptions, PolicyOptions, RouterConfig, Timeouts
from router.generation import GenerationEndpoint
from router.openai_types import parse_completion
from router.registry import ServedModel, make_node, refusal
from router.server import Router
from tests.builders_tokenizer import byte_level_tokenizer
from tests.fakes_node import BLOCK_SIZE, FINGERPRINT, FakeNode, make_register

Json = dict[str, Any]
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m.role }}:{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOKENIZER = Tokenizer(
    byte_level_tokenizer(), named_tokens={"eos_token": "<|end|>"}, chat_template=TEMPLATE, digest="digest"
)
ANSWER = "the quick brown fox jumps over the lazy dog"
TOKENS = TOKENIZER.encode(ANSWER)
LONG_PROMPT = list(range(10, 90))

FAST = Timeouts(
    heartbeat_timeout_s=0.4, reserve_timeout_s=0.5, prefill_timeout_s=0.2, transfer_timeout_s=0.1,
    first_token_timeout_s=0.3, between_tokens_timeout_s=0.5,
)  # fmt: skip


class Cluster:
    """A router on free ports and a client for it."""

    def __init__(self, router: Router, client: httpx.AsyncClient) -> None:
        self.router = router
        self.client = client
        self.address = f"tcp://127.0.0.1:{router.control_port}"
        self.nodes: list[FakeNode] = []

    async def join(self, *nodes: FakeNode) -> None:
        for node in nodes:
            await node.start(self.address)
            self.nodes.append(node)
        await eventually(lambda: all(n.node_id in self.router.hub.nodes for n in nodes))
        await eventually(lambda: all(self.router.index.is_trusted(n.node_id) for n in nodes))

    async def kill(self, node: FakeNode, *, goodbye: bool = False) -> None:
        self.nodes.remove(node)
        await node.stop(goodbye=goodbye)

    async def complete(self, status: int = 200, **fields: Any) -> Json:
        return await self.post("/v1/completions", status, {"model": "fake", "prompt": "hello"} | fields)

    async def chat(self, status: int = 200, **fields: Any) -> Json:
        body = {"model": "fake", "messages": [{"role": "user", "content": "hello"}]} | fields
        return await self.post("/v1/chat/completions", status, body)

    async def post(self, path: str, status: int, body: Any) -> Json:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = await self.client.post(path, content=content)
        assert response.status_code == status, response.text
        answer: Json = response.json()
        return answer

    async def stream(self, path: str, **fields: Any) -> list[Json | str]:
        """The events of a stream, decoded; "[DONE]" stays a string."""
        body = {"model": "fake", "stream": True} | fields
        async with self.client.stream("POST", path, json=body) as response:
            assert response.status_code == 200
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line.removeprefix("data: ") async for line in response.aiter_lines() if line]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    async def close(self) -> None:
        for node in self.nodes:
            await node.stop()
        await self.router.close()


async def eventually(condition: Callable[[], bool], timeout_s: float = 3.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def cluster(
    timeouts: Timeouts = FAST, limits: Limits | None = None, handoff: str = "backoff"
) -> AsyncIterator[Cluster]:
    config = RouterConfig(
        listen=ListenOptions(port=0, control_port=0, metrics_compat=True),
        timeouts=timeouts,
        limits=limits or Limits(),
        policy=PolicyOptions(handoff=handoff, min_remote_prefill_tokens=8),
    )
    router = Router(config, TOKENIZER, ServedModel("fake", (), "digest"))
    await router.start()
    async with httpx.AsyncClient(base_url=router.service.url, timeout=5.0) as client:
        made = Cluster(router, client)
        try:
            yield made
        finally:
            await made.close()


def scenario(story: Callable[[Cluster], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(20), cluster(**options) as made:
            await story(made)

    asyncio.run(main())


def decode_node(name: str = "d", role: str = "decode") -> FakeNode:
    return FakeNode(name, role, TOKENS)


def test_a_request_walks_over_both_nodes() -> None:
    async def story(c: Cluster) -> None:
        d, p = decode_node(), FakeNode("p", "prefill")
        await c.join(d, p)
        body = await c.complete(prompt=LONG_PROMPT, max_tokens=len(TOKENS), temperature=0, seed=7)
        assert body["choices"] == [{"index": 0, "text": ANSWER, "logprobs": None, "finish_reason": "length"}]
        assert body["object"] == "text_completion"
        # N = 4: the last three tokens stay with D
        await eventually(lambda: bool(p.prefills()))  # D may have answered before P read its part
        (request,), (prefill,) = d.requests(), p.prefills()
        assert request.token_ids == prefill.token_ids == LONG_PROMPT
        assert request.cut == prefill.cut == len(LONG_PROMPT) - 3
        assert request.ticket == prefill.ticket
        assert prefill.ticket.engine_id == "p"
        assert request.sampling.seed == 7
        usage = body["usage"]
        assert usage["prompt_tokens"] == len(LONG_PROMPT)
        assert usage["completion_tokens"] == len(TOKENS)
        assert usage["prompt_tokens_details"] == {"cached_tokens": 4}
        assert usage["baton"] == {
            "num_drafts": 2, "num_draft_tokens": 8, "num_accepted": 3, "accepted_per_pos": [2, 1, 0, 0],
            "verified_per_pos": [2, 2, 2, 2], "transferred_tokens": 77, "transferred_bytes": 7700,
        }  # fmt: skip
        assert not d.aborts()
        await eventually(lambda: not any(n.legs for n in c.router.hub.nodes.values()))

    scenario(story)


def test_short_prompts_and_aggregated_nodes_need_no_prefill_node() -> None:
    async def story(c: Cluster) -> None:
        d, p = decode_node(), FakeNode("p", "prefill")
        await c.join(d, p)
        await c.complete(prompt=LONG_PROMPT[:7])
        await c.kill(d, goodbye=True)
        both = decode_node("b", "both")
        await c.join(both)
        await c.complete(prompt=LONG_PROMPT)
        assert not p.prefills()
        assert [r.ticket for r in (*d.requests(), *both.requests())] == [None, None]

    scenario(story)


def test_streams() -> None:
    async def story(c: Cluster) -> None:
        await c.join(decode_node())
        events = await c.stream(
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "hi"}],
            stream_options={"include_usage": True},
        )
        assert events.pop() == "[DONE]"
        chunks = [e for e in events if isinstance(e, dict)]
        usage = chunks.pop()
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == len(TOKENS)
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert all(chunk["usage"] is None for chunk in chunks)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert [d.get("role") for d in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
        assert "".join(d.get("content", "") for d in deltas) == ANSWER
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "stop"]

        events = await c.stream("/v1/completions", prompt="hi", max_tokens=3)
        texts = [e["choices"][0]["text"] for e in events if isinstance(e, dict)]
        assert "".join(texts) == TOKENIZER.decode(TOKENS[:3])
        assert all("usage" not in e for e in events if isinstance(e, dict))

    scenario(story)


def test_the_whole_rendered_prompt_reaches_the_node() -> None:
    async def story(c: Cluster) -> None:
        d = decode_node()
        await c.join(d)
        messages = [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]},
        ]
        await c.chat(messages=messages)
        (request,) = d.requests()
        text = TOKENIZER.decode(request.token_ids, skip_special_tokens=False)
        assert text == "<|user|>system:be brief<|user|>user:hello<|assistant|>"
        # chat without max_tokens: what fits
        assert request.sampling.max_tokens == d.max_model_len - len(request.token_ids)

    scenario(story)


def test_n_and_several_prompts_are_choices() -> None:
    async def story(c: Cluster) -> None:
        d = decode_node()
        await c.join(d)
        body = await c.complete(prompt=["one", "two"], n=2, max_tokens=4)
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert {choice["text"] for choice in body["choices"]} == {TOKENIZER.decode(TOKENS[:4])}
        assert [r.n for r in d.requests()] == [2, 2]
        assert body["usage"]["completion_tokens"] == 16
        assert body["usage"]["prompt_tokens"] == len(TOKENIZER.encode("one") + TOKENIZER.encode("two"))

    scenario(story)


@pytest.mark.parametrize("chunk_size", [1, 3, 50])
def test_stop_strings_cut_the_text_inside_a_chunk(chunk_size: int) -> None:
    async def story(c: Cluster) -> None:
        d = decode_node()
        d.chunk_size = chunk_size
        d.stop_string = "fox ju"
        await c.join(d)
        body = await c.complete(stop=["fox ju", "unheard of"], max_tokens=50, logprobs=1)
        (choice,) = body["choices"]
        assert choice["text"] == "the quick brown "
        assert choice["finish_reason"] == "stop"
        assert "fox" not in "".join(choice["logprobs"]["tokens"])
        events = await c.stream("/v1/completions", prompt="hi", stop="fox ju", max_tokens=50)
        texts = [e["choices"][0]["text"] for e in events if isinstance(e, dict)]
        assert "".join(texts) == "the quick brown "

    scenario(story)


def test_logprobs_in_both_shapes() -> None:
    async def story(c: Cluster) -> None:
        await c.join(decode_node())
        body = await c.complete(logprobs=2, max_tokens=3)
        found = body["choices"][0]["logprobs"]
        spelled = [TOKENIZER.token_text(t) for t in TOKENS[:3]]
        assert found["tokens"] == spelled
        assert found["token_logprobs"] == [-0.5] * 3
        assert found["top_logprobs"][0] == {spelled[0]: -0.5, TOKENIZER.token_text(0): -2.0}
        assert found["text_offset"] == [0, len(spelled[0]), len(spelled[0] + spelled[1])]
        body = await c.chat(logprobs=True, top_logprobs=2, max_tokens=1)
        (token,) = body["choices"][0]["logprobs"]["content"]
        assert token["token"] == spelled[0]
        assert token["bytes"] == list(spelled[0].encode())
        assert [top["logprob"] for top in token["top_logprobs"]] == [-0.5, -2.0]
        assert (await c.chat(max_tokens=1))["choices"][0]["logprobs"] is None

    scenario(story)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_aborts_its_request_on_both_nodes(stream: bool) -> None:
    async def story(c: Cluster) -> None:
        d, p = decode_node(), FakeNode("p", "prefill")
        d.hang_after = 2
        p.refuse = None
        await c.join(d, p)
        body = {"model": "fake", "prompt": LONG_PROMPT, "stream": stream, "max_tokens": 9}

        async def use() -> None:
            async with (
                httpx.AsyncClient(base_url=c.router.service.url, timeout=5.0) as client,
                client.stream("POST", "/v1/completions", json=body) as response,
            ):
                async for _ in response.aiter_lines():
                    pass

        client = asyncio.create_task(use())
        await eventually(lambda: bool(d.requests()))
        await asyncio.sleep(0.05)
        client.cancel()
        await asyncio.gather(client, return_exceptions=True)
        await eventually(lambda: d.aborts() == [d.requests()[0].request_id], timeout_s=0.4)
        await eventually(lambda: c.router.door.num_in_flight == 0)
        assert 'status="499"' in (await c.client.get("/metrics")).text

    scenario(story)


def test_a_refusing_decode_node_is_followed_by_the_next() -> None:
    async def story(c: Cluster) -> None:
        full, free, p = decode_node("a"), decode_node("b"), FakeNode("p", "prefill")
        full.refuse = Refused("", "no free blocks", retry=True, http_status=429)
        await c.join(full, free, p)
        body = await c.complete(prompt=LONG_PROMPT, max_tokens=3)
        assert body["usage"]["completion_tokens"] == 3
        assert len(full.requests()) == len(free.requests()) == 1
        await eventually(lambda: bool(p.prefills()))
        assert len(p.prefills()) == 1  # P never computes for a D without room
        free.refuse = full.refuse
        error = (await c.complete(429))["error"]
        assert "no free blocks" in error["message"]
        full.refuse = free.refuse = Refused("", "too long", retry=False, http_status=400, param="prompt")
        error = (await c.complete(400))["error"]
        assert (error["message"], error["param"]) == ("too long", "prompt")

    scenario(story)


def test_a_node_that_dies_before_the_first_token_is_replaced() -> None:
    async def story(c: Cluster) -> None:
        dying, other = decode_node("a"), decode_node("b")
        dying.hang_after = 0
        other.load = NodeLoad(num_running=1, total_blocks=1)
        await c.join(dying, other)
        answer = asyncio.create_task(c.complete(max_tokens=2))
        await eventually(lambda: bool(dying.requests()))
        await c.kill(dying)
        assert (await answer)["usage"]["completion_tokens"] == 2

    scenario(story, timeouts=Timeouts(heartbeat_timeout_s=0.4))


@pytest.mark.parametrize("goodbye", [True, False])
def test_a_node_that_dies_in_mid_stream_ends_it_with_an_error_object(goodbye: bool) -> None:
    async def story(c: Cluster) -> None:
        d = decode_node()
        d.hang_after = 2
        await c.join(d)
        whole = asyncio.create_task(c.complete(502, max_tokens=9))
        stream = asyncio.create_task(c.stream("/v1/completions", prompt="hi", max_tokens=9))
        await eventually(lambda: len(d.requests()) == 2)
        await asyncio.sleep(0.05)
        await c.kill(d, goodbye=goodbye)
        events = await stream
        last = events[-1]
        assert isinstance(last, dict)
        assert last["error"]["type"] == "server_error"
        assert "node d" in last["error"]["message"]
        assert "node d" in (await whole)["error"]["message"]
        assert (await c.complete(503))["error"]["message"].startswith("no decode node")

    scenario(story, timeouts=Timeouts(heartbeat_timeout_s=0.4))


def test_a_transfer_that_fails_for_good_is_told_and_no_other_node_is_asked() -> None:
    async def story(c: Cluster) -> None:
        failing, other, p = decode_node("a"), decode_node("b"), FakeNode("p", "prefill")
        failing.fails_transfer = True
        other.load = NodeLoad(num_running=1, total_blocks=1)
        await c.join(failing, other, p)
        told = {"message": "decode node a: no KV came", "type": "transfer_error", "param": None, "code": None}
        assert (await c.complete(502, prompt=LONG_PROMPT))["error"] == told
        async with c.client.stream(
            "POST", "/v1/completions", json={"model": "fake", "prompt": LONG_PROMPT, "stream": True}
        ) as response:
            assert response.status_code == 502
            await response.aread()
            assert response.json()["error"] == told
        assert (len(failing.requests()), other.requests()) == (2, [])
        assert (await c.complete(prompt="short", max_tokens=2))["usage"]["completion_tokens"] == 2

    scenario(story)


def test_every_wait_has_its_deadline() -> None:
    async def story(c: Cluster) -> None:
        d = decode_node()
        await c.join(d)
        d.hang_after = 0
        error = (await c.complete(504))["error"]
        assert "the first token within 0.5 s" in error["message"]
        d.hang_after = 2
        assert "the next token within 0.5 s" in (await c.complete(504))["error"]["message"]
        await eventually(lambda: len(d.aborts()) == 2)
        d.hang_after, d.fail_after = None, 1
        assert "scripted" in (await c.complete(502))["error"]["message"]

    scenario(story)


def test_the_node_that_holds_the_prefix_gets_the_request() -> None:
    async def story(c: Cluster) -> None:
        a, b, p = decode_node("a"), decode_node("b"), FakeNode("p", "prefill")
        await c.join(a, b, p)
        await c.complete(prompt=LONG_PROMPT, max_tokens=1)
        await eventually(lambda: len(a.requests()) == len(p.prefills()) == 1)
        stored = b.store(LONG_PROMPT)
        assert stored == (len(LONG_PROMPT) - 4) // BLOCK_SIZE
        await eventually(lambda: c.router.index.num_blocks("b") == stored)
        await c.complete(prompt=LONG_PROMPT, max_tokens=1)
        assert len(b.requests()) == 1
        assert len(p.prefills()) == 1  # four tokens are missing on b: it computes them itself
        # Token 75 changes: it is in the last block, and in the lookahead of the one before.
        await c.complete(prompt=[*LONG_PROMPT[:75], 5, 5, 5, 5, 5], max_tokens=1)
        assert len(b.requests()) == 2
        await eventually(lambda: len(p.prefills()) == 2)
        predicted = c.router.metrics.registry.get_sample_value("baton_router_cached_tokens_predicted_total")
        assert predicted == 0 + 76 + 68
        await c.kill(b)
        await eventually(lambda: "b" not in c.router.hub.nodes)
        assert c.router.index.num_entries == 0

    scenario(story)


BAD_COMPLETIONS: list[tuple[Json, int, str | None, str]] = [
    ({"model": "other"}, 404, "model", "'fake'"),
    ({"prompt": ""}, 400, "prompt", "empty"),
    ({"prompt": []}, 400, "prompt", "empty"),
    ({"prompt": [[]]}, 400, "prompt", "empty"),
    ({"prompt": [1, 400]}, 400, "prompt", "outside the vocabulary of 400"),
    ({"prompt": [1, -1]}, 400, "prompt", "outside the vocabulary"),
    ({"prompt": [1, True]}, 400, "prompt", "expected a token id"),
    ({"prompt": list(range(128))}, 400, "prompt", "128 tokens"),
    ({"prompt": [1] * 120, "max_tokens": 9}, 400, "prompt", "lower max_tokens to 8"),
    ({"max_tokens": -1}, 400, "max_tokens", "-1"),
    ({"max_tokens": "many"}, 400, "max_tokens", "int"),
    ({"n": 0}, 400, "n", "0"),
    ({"n": 17}, 400, "n", "16"),
    ({"temperature": 2.1}, 400, "temperature", "2.1"),
    ({"top_p": 0}, 400, "top_p", "0"),
    ({"stop": [""]}, 400, "stop", "0 characters"),
    ({"stop": ["x"] * 17}, 400, "stop", "17"),
    ({"stop_token_ids": [400]}, 400, "stop_token_ids", "400"),
    ({"logit_bias": {"400": 1}}, 400, "logit_bias", "400"),
    ({"logit_bias": {"x": 1}}, 400, "logit_bias", "'x'"),
    ({"echo": True}, 400, "echo", "not supported"),
    ({"frobnicate": 1}, 400, "frobnicate", "not supported"),
]


def test_bad_input_is_answered_by_name_and_the_server_goes_on() -> None:
    async def story(c: Cluster) -> None:
        d = decode_node()
        await c.join(d)
        for fields, status, param, words in BAD_COMPLETIONS:
            error = (await c.complete(status, **fields))["error"]
            assert error["param"] == param, (fields, error)
            assert words in error["message"], (fields, error)
            assert error["type"] == "invalid_request_error"
        for raw in (b"{", b"[]", b'{"model": "\xff"}', b""):
            assert (await c.post("/v1/completions", 400, raw))["error"]["type"] == "invalid_request_error"
        assert "messages" in (await c.chat(400, messages=[]))["error"]["message"]
        image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        assert "image_url" in (await c.chat(400, messages=image))["error"]["message"]
        assert (await c.post("/v1/nothing", 404, {}))["error"]["message"] == "POST /v1/nothing: Not Found"
        assert (await c.client.get("/v1/completions")).status_code == 405
        assert not d.requests()
        await c.complete(user="someone", metadata={"a": "b"}, tools=[], echo=False, seed=None)

    scenario(story)


def test_limits() -> None:
    async def story(c: Cluster) -> None:
        d = decode_node()
        d.hang_after = 0
        await c.join(d)
        assert "at most 1000" in (await c.complete(413, prompt="x" * 2000))["error"]["message"]
        first = asyncio.create_task(c.complete(504))
        await eventually(lambda: c.router.door.num_in_flight == 1)
        response = await c.client.post("/v1/completions", json={"model": "fake", "prompt": "x"})
        assert response.status_code == 429
        assert response.headers["retry-after"] == "1"
        await first

    scenario(story, limits=Limits(max_requests=1, max_body_bytes=1000))


def test_other_routes() -> None:
    async def story(c: Cluster) -> None:
        assert (await c.client.get("/health")).status_code == 200
        ready = await c.client.get("/ready")
        assert ready.status_code == 503
        assert ready.json()["reasons"] == ["no decode node is connected"]
        assert (await c.complete(503))["error"]["type"] == "server_error"
        d = decode_node()
        await c.join(d, FakeNode("p", "prefill"))
        assert (await c.client.get("/ready")).status_code == 200
        (card,) = (await c.client.get("/v1/models")).json()["data"]
        assert (card["id"], card["max_model_len"]) == ("fake", 128)
        assert (await c.client.get("/v1/models/fake")).json() == card
        assert (await c.client.get("/v1/models/no")).status_code == 404
        tokens = await c.post("/tokenize", 200, {"model": "fake", "prompt": ANSWER})
        assert tokens["tokens"] == TOKENS
        text = await c.post("/detokenize", 200, {"model": "fake", "tokens": TOKENS})
        assert text == {"prompt": ANSWER}
        await c.post("/detokenize", 400, {"tokens": [400]})
        seen = (await c.client.get("/v1/cluster")).json()
        assert [(n["node_id"], n["role"]) for n in seen["nodes"]] == [("d", "decode"), ("p", "prefill")]
        assert seen["degraded"] == []
        await c.complete()
        exposed = (await c.client.get("/metrics")).text
        assert 'baton_router_requests_total{endpoint="completions",status="200"} 1.0' in exposed
        assert 'vllm:prompt_tokens_total{engine="0",model_name="fake"}' in exposed
        d.draining = True
        await eventually(lambda: bool(c.router.not_ready()))
        assert (await c.complete(503))["error"]["type"] == "server_error"

    scenario(story)


def test_incompatible_nodes_are_refused_by_name() -> None:
    async def story(c: Cluster) -> None:
        await c.join(decode_node())
        wrong = FakeNode("w", "prefill")
        wrong.fingerprint["num_modules"] = "2"
        await wrong.start(c.address)
        reason = await asyncio.wait_for(wrong.client.wait_refused(), 2)
        assert "num_modules is '2' instead of '4'" in reason
        await wrong.stop()
        foreign = FakeNode("f", "decode")
        foreign.model = "another"
        await foreign.start(c.address)
        assert "'another'" in await asyncio.wait_for(foreign.client.wait_refused(), 2)
        await foreign.stop()
        assert set(c.router.hub.nodes) == {"d"}

    scenario(story)


def test_block_sizes_of_nodes_must_fit_each_other() -> None:
    served = ServedModel("fake", (), "")
    live = make_node(b"", make_register("d"), 0.0)
    for size, fits in ((BLOCK_SIZE, True), (3 * BLOCK_SIZE, True), (BLOCK_SIZE // 2, True), (6, False)):
        joining = msgspec.structs.replace(make_register("e"), block_size=size)
        why = refusal(joining, served, [live])
        assert why is None if fits else why is not None and "block_size is 6 and 4" in why
    older = msgspec.structs.replace(make_register("e"), fingerprint={**FINGERPRINT, "kv_layout_version": "0"})
    assert refusal(older, served, [live]) == (
        "it does not fit node d: kv_layout_version is '0' instead of None"
    )


def test_nodes_come_back_to_a_router_that_restarts() -> None:
    async def main() -> None:
        d = decode_node()
        async with cluster() as first:
            port = first.router.control_port
            await d.start(first.address)
            await eventually(lambda: "d" in first.router.hub.nodes)
            old = first.router.hub.router_id
            d.store(LONG_PROMPT)
        config = RouterConfig(listen=ListenOptions(port=0, control_port=port), timeouts=FAST)
        second = Router(config, TOKENIZER, ServedModel("fake", (), "digest"))
        await second.start()
        await eventually(lambda: "d" in second.hub.nodes)
        await eventually(lambda: d.lost_routers == [old])
        await eventually(lambda: second.index.num_blocks("d") == 19)  # learnt again, nothing stored anew
        await d.stop()
        await second.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_draining_finishes_what_runs_and_takes_nothing_new() -> None:
    async def story(c: Cluster) -> None:
        d = decode_node()
        d.delay_s = 0.02
        await c.join(d)
        serving = asyncio.create_task(c.router.run_until_stopped())
        await asyncio.sleep(0)
        running = asyncio.create_task(c.complete(max_tokens=9))
        await eventually(lambda: bool(d.requests()))
        c.router.service.stop()
        await eventually(lambda: c.router.door.draining)
        assert "draining" in (await c.client.get("/ready")).json()["reasons"]
        assert (await c.client.get("/health")).status_code == 200
        await c.complete(503)
        assert (await running)["usage"]["completion_tokens"] == 9
        await serving

    scenario(story)


def test_a_port_in_use_is_named() -> None:
    async def story(c: Cluster) -> None:
        taken = c.router.service.port
        other = Router(
            RouterConfig(listen=ListenOptions(port=taken, control_port=0)), TOKENIZER, c.router.served
        )
        with pytest.raises(ConfigError, match=f"port {taken} "):
            await other.start()
        await other.close()
        control = c.router.control_port
        other = Router(
            RouterConfig(listen=ListenOptions(port=0, control_port=control)), TOKENIZER, c.router.served
        )
        with pytest.raises(ConfigError, match=f"control port {control} "):
            await other.start()
        await other.close()

    scenario(story)


def test_the_router_loads_no_torch() -> None:
    code = "import sys, router.server; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_a_client_that_does_not_read_holds_nothing_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(c: Cluster) -> None:
        monkeypatch.setattr(generation, "CLIENT_STALL_TIMEOUT_S", 0.1)
        d = decode_node()
        d.delay_s = 0.05
        await c.join(d)
        body = json.dumps({"model": "fake", "prompt": "hello", "stream": True, "max_tokens": len(TOKENS)})
        sent: list[MutableMapping[str, Any]] = []
        asked: asyncio.Queue[MutableMapping[str, Any]] = asyncio.Queue()
        asked.put_nowait({"type": "http.request", "body": body.encode()})

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)
            if len(sent) > 2:  # the buffers are full
                await asyncio.Event().wait()

        endpoint = GenerationEndpoint(c.router.door, parse_completion, "completions")
        async with asyncio.timeout(2.0):
            await endpoint({"type": "http", "headers": []}, asked.get, send)
        assert len(sent) == 3
        assert c.router.door.num_in_flight == 0
        await eventually(lambda: d.aborts() == [d.requests()[0].request_id])

    scenario(story)
