"""Many at once, clients that leave, and other ways to serve: the OpenAI client against a live `baton up`."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.live import (
    BACK_OFF,
    BLOCK_SIZE,
    LONG,
    MODEL,
    SHORT,
    TIMEOUT_S,
    Live,
    Told,
    cached_tokens,
    check_usage,
    num_tokens,
    of_baton,
    serving,
    text,
)

# ---- several at once ------------------------------------------------------------------------------------


def test_two_choices_are_one_transfer_and_share_its_blocks(live: Live) -> None:
    prompt = text(4, 3400)
    before = live.wait_idle()["decode-0"]
    told = [Told(), Told()]
    usage, seen = None, []
    fields: dict[str, Any] = {"n": 2, "seed": 11, "temperature": 0.9, "max_tokens": 240}
    stream = live.client.completions.create(
        model=MODEL, prompt=prompt, stream=True, stream_options={"include_usage": True},
        extra_body={"ignore_eos": True}, **fields,
    )  # fmt: skip
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            told[choice.index].text += choice.text
            told[choice.index].finish_reason = choice.finish_reason
        seen.append(live.loads()["decode-0"])
    assert usage is not None
    after = live.wait_idle()["decode-0"]
    assert [one.finish_reason for one in told] == ["length", "length"]
    check_usage(usage, num_tokens(live, prompt=prompt), 2 * 240)  # the prompt counts once
    assert told[0].text != told[1].text
    # One transfer, of the prompt's own size.
    assert after["num_transfers"] == before["num_transfers"] + 1
    assert after["num_transfer_failures"] == before["num_transfer_failures"]
    assert of_baton(usage)["transferred_tokens"] == usage.prompt_tokens - BACK_OFF
    assert after["kv_bytes_received"] - before["kv_bytes_received"] == of_baton(usage)["transferred_bytes"]
    # While both ran they held fewer blocks than two prompts have.
    used = [load["total_blocks"] - load["free_blocks"] for load in seen if load["num_running"] == 2]
    assert used, "both choices were seen running"
    assert max(used) < 2 * (usage.prompt_tokens // BLOCK_SIZE)
    # Choice i draws with seed + i: each is what a request of its own would have got.
    alone = live.complete(prompt, seed=12, temperature=0.9, max_tokens=240)
    assert alone.choices[0].text == told[1].text
    assert cached_tokens(alone.usage) > 0


def test_greedy_choices_are_equal_and_whole(live: Live) -> None:
    prompt = text(5, 400)
    both = live.client.completions.create(
        model=MODEL, prompt=prompt, n=2, temperature=0, max_tokens=24, extra_body={"ignore_eos": True}
    )
    alone = live.complete(prompt, max_tokens=24)
    assert [choice.text for choice in both.choices] == [alone.choices[0].text] * 2
    check_usage(both.usage, num_tokens(live, prompt=prompt), 48)


def test_sixteen_streams_at_once_say_what_each_says_alone(live: Live) -> None:
    prompts = [text(100 + i, 60 if i % 4 == 0 else 120 + 25 * i) for i in range(16)]

    def ask(prompt: str, salt: str) -> Told:
        return live.stream(prompt, max_tokens=24 + len(prompt) % 7, logprobs=2, extra={"cache_salt": salt})

    alone = [ask(prompt, "one by one") for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(ask, prompts, ["all at once"] * len(prompts)))
    for one, other in zip(together, alone, strict=True):
        assert one.same_as(other), (one.text, other.text)
        assert one.usage is not None
        assert other.usage is not None
        assert one.usage.completion_tokens == other.usage.completion_tokens
        assert cached_tokens(one.usage) == 0
    assert sum(of_baton(one.usage)["transferred_tokens"] > 0 for one in together) >= 12
    live.wait_idle()


# ---- other ways to serve --------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("--aggregated",), ("--transport=tcp",)], ids=["aggregated", "tcp"])
def test_another_way_to_serve_gives_the_same_answers(
    live: Live, tmp_path: Path, words: tuple[str, ...]
) -> None:
    prompts = (SHORT, LONG, text(6, 1500))
    with serving(tmp_path, *words) as other:
        for prompt in prompts:
            expected = live.stream(prompt, max_tokens=40, logprobs=2)
            told = other.stream(prompt, max_tokens=40, logprobs=2)
            assert told.same_as(expected)
            sampled: dict[str, Any] = {"temperature": 0.9, "seed": 5, "max_tokens": 40}
            assert (
                other.complete(prompt, **sampled).choices[0].text
                == live.complete(prompt, **sampled).choices[0].text
            )
        loads = other.wait_idle()
        assert loads["decode-0"]["num_transfers"] == (2 if "prefill-0" in loads else 0)
        assert loads["decode-0"]["num_transfer_failures"] == 0


# ---- clients that leave ---------------------------------------------------------------------------------


def num_gone(live: Live) -> float:
    """Requests whose client left, by the router's metrics."""
    found = [
        float(line.rpartition(" ")[2])
        for line in live.http.get("/metrics").text.splitlines()
        if line.startswith("baton_router_requests_total") and 'status="499"' in line
    ]
    return sum(found)


def check_nothing_is_left(live: Live, gone_before: float) -> None:
    """All nodes idle within a few seconds, every block free, and nobody computes on."""
    drafts = live.wait_idle(timeout_s=5.0)["decode-0"]["num_drafts"]
    assert num_gone(live) == gone_before + 1
    assert live.cluster()["requests_in_flight"] == 0
    assert live.wait_idle()["decode-0"]["num_drafts"] == drafts


def test_cancelled_stream_stops_the_nodes_and_frees_the_blocks(live: Live) -> None:
    gone = num_gone(live)
    stream = live.client.completions.create(
        model=MODEL, prompt=LONG, max_tokens=1500, temperature=0, n=2, stream=True,
        extra_body={"ignore_eos": True, "cache_salt": "leaves a stream"},
    )  # fmt: skip
    received = 0
    for _ in stream:
        received += 1
        if live.loads()["decode-0"]["num_running"] == 2:
            break
    assert received < 1000, "it must be far from done"
    stream.close()
    check_nothing_is_left(live, gone)


@pytest.mark.parametrize("busy_node", ["decode-0", "prefill-0"])
def test_cancelled_request_stops_the_nodes_and_frees_the_blocks(live: Live, busy_node: str) -> None:
    """Not streamed; the client leaves while a node decodes, or while the prompt is still being computed."""
    gone = num_gone(live)
    decodes = busy_node == "decode-0"
    prompt, max_tokens = (LONG, 1500) if decodes else (text(7, 5600), 50)
    first_event = live.next_event(busy_node)

    async def leave() -> None:
        async with AsyncOpenAI(
            base_url=live.client.base_url, api_key="none", max_retries=0, timeout=TIMEOUT_S
        ) as client:
            asking = asyncio.create_task(
                client.completions.create(
                    model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=0,
                    extra_body={"ignore_eos": True, "cache_salt": f"leaves {busy_node}"},
                )
            )  # fmt: skip
            deadline_s = time.monotonic() + 10.0
            while not (
                live.loads()[busy_node]["num_running"]
                if decodes
                else live.next_event(busy_node) > first_event
            ):
                assert time.monotonic() < deadline_s, "not seen running"
                assert not asking.done(), await asking
                await asyncio.sleep(0.02)
            asking.cancel()
            await asyncio.wait([asking])
            assert asking.cancelled()

    asyncio.run(leave())
    check_nothing_is_left(live, gone)
