"""Nodes that are killed while they work, in the small: what the client of a live `baton up` sees."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from tests.live import Live, Told, of_baton, serving, text

DEATH_NOTICED_S = 15.0  # the heartbeat timeout is 5 s; a loaded machine adds to it
UP_STOPS_S = 15.0
SMALL_STEPS = "--max-num-batched-tokens=64"  # a long prompt takes many steps, so it can be interrupted
LONG = text(21, 5000)


def kill(live: Live, node_id: str) -> None:
    os.kill(live.up.child_pids()[node_id], signal.SIGKILL)


def wait_for_chunks(live: Live, seen: int, count: int) -> None:
    """Until the prefill node has computed ``count`` more chunks of a prompt: its KV events tell."""
    live.wait_until(lambda: live.next_event("prefill-0") >= seen + count, f"{count} chunks on prefill-0")


def ask(live: Live, salt: str) -> Told:
    return live.stream(LONG, max_tokens=24, logprobs=2, extra={"cache_salt": salt})


@pytest.mark.parametrize("transport", ["auto", pytest.param("tcp", marks=pytest.mark.slow)])
def test_prefill_node_killed_in_mid_prompt(tmp_path: Path, transport: str) -> None:
    """The request completes with the same tokens: the decode node keeps what came and computes the rest."""
    with serving(tmp_path, SMALL_STEPS, f"--transport={transport}") as live, ThreadPoolExecutor(1) as pool:
        expected = ask(live, "undisturbed")
        cut = of_baton(expected.usage)["transferred_tokens"]
        assert cut > 1000
        seen = live.next_event("prefill-0")
        told = pool.submit(ask, live, "disturbed")
        wait_for_chunks(live, seen, 8)
        os.kill(live.up.child_pids()["prefill-0"], signal.SIGSTOP)  # the rest stays away, however fast we are
        live.wait_until(lambda: live.loads()["decode-0"]["num_receiving"] == 1, "KV is seen arriving")
        kill(live, "prefill-0")
        assert told.result().same_as(expected)
        assert 0 < of_baton(told.result().usage)["transferred_tokens"] < cut
        live.up.wait_stderr("prefill-0 was killed by SIGKILL", 2.0)
        # The decode node serves on alone, with all of its blocks.
        live.wait_until(lambda: "prefill-0" not in live.loads(), "prefill-0 is forgotten", DEATH_NOTICED_S)
        assert live.wait_idle()["decode-0"]["num_transfer_failures"] == 1
        alone = ask(live, "without a prefill node")
        assert alone.same_as(expected)
        assert of_baton(alone.usage)["transferred_tokens"] == 0


def test_decode_nodes_killed_before_the_first_token_and_after_it(tmp_path: Path) -> None:
    with serving(tmp_path, SMALL_STEPS, "--decode=2") as live, ThreadPoolExecutor(2) as pool:
        expected = ask(live, "undisturbed")

        # Before the first token: nothing was promised, the other decode node takes the request.
        seen = live.next_event("prefill-0")
        told = pool.submit(ask, live, "disturbed")
        wait_for_chunks(live, seen, 1)
        (first,) = [node["node_id"] for node in live.cluster()["nodes"]
                    if node["role"] == "decode" and node["requests_of_this_router"]]  # fmt: skip
        kill(live, first)
        assert told.result().same_as(expected)
        assert f"{first} was killed by SIGKILL" in live.up.stderr
        (second,) = [name for name in live.loads() if name.startswith("decode")]

        # After it: both kinds of answers end in an error object, and `up`, having nothing left, stops.
        whole = pool.submit(live.complete, "Open a file.", max_tokens=1500)
        stream = live.client.completions.create(
            model=live.model,
            prompt="Close it.",
            max_tokens=1500,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(stream)
        kill(live, second)
        with pytest.raises(openai.APIError) as broken:
            list(stream)
        for error in (broken.value, whole.exception(timeout=UP_STOPS_S)):
            assert isinstance(error, openai.APIError)
            assert isinstance(error.body, dict)
            assert error.body["type"] == "server_error"
            assert "send the request again" in error.body["message"]
        assert isinstance(whole.exception(), openai.InternalServerError)
        assert live.up.process.wait(timeout=UP_STOPS_S) == 1
        assert f"{second} was killed by SIGKILL" in live.up.stderr
        assert "cannot answer requests any more" in live.up.stderr
        assert "had to be killed" not in live.up.stderr
