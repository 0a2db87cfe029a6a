"""The router with `--handoff carry`: token L comes from P at once, from D again, and counts once.

Fake nodes, real sockets. What the client has seen is never contradicted, whoever fails.
"""

import json
from typing import Any

from common.messages import NodeLoad
from tests.fakes_node import FakeNode
from tests.integration.test_router import (
    ANSWER,
    LONG_PROMPT,
    TOKENIZER,
    TOKENS,
    Cluster,
    decode_node,
    eventually,
    scenario,
)

OTHER = TOKENS[0] + 1


def prefill_node(*tokens: int) -> FakeNode:
    return FakeNode("p", "prefill", tokens or TOKENS)


async def ask(c: Cluster, **fields: Any) -> dict[str, Any]:
    """Text, usage and reason of the whole answer."""
    body = await c.complete(prompt=LONG_PROMPT, **{"max_tokens": len(TOKENS), "temperature": 0} | fields)
    (choice,) = body["choices"]
    return {"text": choice["text"], "reason": choice["finish_reason"], "usage": body["usage"]}


def test_token_l_counts_once_and_comes_with_the_sampling_parameters() -> None:
    async def story(c: Cluster) -> None:
        d, p = decode_node(), prefill_node()
        d.delay_s = 0.01
        await c.join(d, p)
        told = await ask(c, seed=7, stop=["unheard of"])
        assert (told["text"], told["reason"]) == (ANSWER, "length")
        assert told["usage"]["completion_tokens"] == len(TOKENS)
        await eventually(lambda: len(p.prefills()) == 1)
        (request,), (prefill,) = d.requests(), p.prefills()
        assert request.cut == prefill.cut == len(LONG_PROMPT)
        assert prefill.sampling == request.sampling
        assert request.sampling.seed == 7
        lines = (await c.client.get("/metrics")).text.splitlines()
        for name, value in (
            ("generation_tokens_total", len(TOKENS)),
            ("time_to_first_token_seconds_count", 1),
        ):
            (line,) = [line for line in lines if line.startswith(f"baton_{name}")]
            assert float(line.split()[-1]) == value

    scenario(story, handoff="carry")


def test_several_sequences_and_short_prompts_take_the_other_road() -> None:
    async def story(c: Cluster) -> None:
        d, p = decode_node(), prefill_node()
        await c.join(d, p)
        await c.complete(prompt=LONG_PROMPT, n=2, max_tokens=3)
        await eventually(lambda: len(p.prefills()) == 1)
        (prefill,) = p.prefills()
        assert (prefill.cut, prefill.sampling) == (len(LONG_PROMPT) - 3, None)
        await c.complete(prompt=LONG_PROMPT[:7], max_tokens=3)
        assert d.requests()[-1].ticket is None

    scenario(story, handoff="carry")


def test_the_client_has_token_l_before_d_says_anything_and_another_d_goes_on_from_it() -> None:
    async def story(c: Cluster) -> None:
        dying, other, p = decode_node("a"), decode_node("b"), prefill_node()
        dying.hang_after = 0
        other.load = NodeLoad(num_running=1, total_blocks=1)
        await c.join(dying, other, p)
        body = {
            "model": "fake", "prompt": LONG_PROMPT, "max_tokens": len(TOKENS), "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        events: list[Any] = []
        async with c.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            async for line in lines:
                if line:
                    events.append(line.removeprefix("data: "))
                if len(events) == 1 and dying in c.nodes:
                    await c.kill(dying)  # the client has token L, and nobody else said anything
        events = [json.loads(event) for event in events[:-1]] + events[-1:]
        assert events[-1] == "[DONE]"
        assert "".join(e["choices"][0]["text"] for e in events[:-2]) == ANSWER
        assert events[-2]["usage"]["completion_tokens"] == len(TOKENS)
        assert events[-2]["usage"]["prompt_tokens"] == len(LONG_PROMPT)
        (request,) = other.requests()
        assert request.token_ids == [*LONG_PROMPT, TOKENS[0]]
        assert request.num_prompt_tokens == len(LONG_PROMPT)
        await eventually(lambda: len(p.prefills()) == 2)  # D may have answered before P read its part
        assert [prefill.sampling is None for prefill in p.prefills()] == [False, True]

    scenario(story, handoff="carry")


def test_a_d_that_says_another_token_is_told_the_one_that_the_client_has() -> None:
    """Its transfer failed, say, and a near-tie fell the other way when it computed the prompt itself."""

    async def story(c: Cluster) -> None:
        d, p = decode_node(), prefill_node(OTHER)
        d.delay_s = 0.05
        await c.join(d, p)
        told = await ask(c)
        assert told["text"] == TOKENIZER.decode([OTHER, *TOKENS[1:]])
        assert told["usage"]["completion_tokens"] == len(TOKENS)
        before, after = d.requests()
        assert after.token_ids == [*LONG_PROMPT, OTHER]
        assert after.request_id != before.request_id
        assert d.aborts() == [before.request_id]

    scenario(story, handoff="carry")


def test_a_p_that_is_late_is_moot() -> None:
    async def story(c: Cluster) -> None:
        d, p = decode_node(), prefill_node(OTHER)
        d.delay_s, p.delay_s, p.ends_at_first = 0.03, 0.1, "stop"
        await c.join(d, p)
        told = await ask(c)
        assert (told["text"], told["reason"]) == (ANSWER, "length")
        assert len(d.requests()) == 1

    scenario(story, handoff="carry")


def test_an_answer_that_ends_with_token_l_is_complete_and_lets_both_nodes_go() -> None:
    async def story(c: Cluster) -> None:
        d, p = decode_node(), prefill_node()
        d.hang_after, p.ends_at_first = 0, "length"
        await c.join(d, p)
        told = await ask(c, max_tokens=1)
        assert (told["text"], told["reason"]) == (TOKENIZER.decode(TOKENS[:1]), "length")
        assert told["usage"]["completion_tokens"] == 1
        await eventually(lambda: len(d.aborts()) == len(p.aborts()) == 1)
        await eventually(lambda: not any(n.legs for n in c.router.hub.nodes.values()))

    scenario(story, handoff="carry")
