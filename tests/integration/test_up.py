"""`baton up` with the model that comes with Baton: ready, answering, stopped; and what it says when not."""

import asyncio
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

from cli.answer import Answer, ask
from cli.client import open_client
from common.model.registry import list_models
from tests.up_process import UpProcess, wait_until_gone

TINY = next(model for model in list_models() if model.name == "baton-tiny")
PROMPT = "To open a file for reading, pass its name to the function and keep the object that it returns. " * 4
SMALL = ("--model=baton-tiny", "--kv-cache-mib=32")
STOP_S = 5.0


def answer(url: str) -> Answer:
    async def once() -> Answer:
        async with open_client(url) as client:
            return await ask(client, PROMPT, {"max_tokens": 16, "temperature": 0, "ignore_eos": True})

    return asyncio.run(once())


def test_ready_answer_stop_and_nothing_left(tmp_path: Path) -> None:
    with UpProcess(tmp_path, *SMALL, "--transport=tcp") as up:
        url = up.wait_ready()
        assert up.stdout == f"Baton is ready: {url} (model baton-tiny, 1 prefill, 1 decode, transfer tcp)\n"
        children = up.child_pids()
        assert set(children) == {"router", "prefill-0", "decode-0"}
        told = answer(url)
        assert told.output_tokens == 16
        assert told.usage["baton"]["transferred_bytes"] > 0
        assert told.acceptance.num_drafts > 0
        started_s = time.monotonic()
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(timeout=2 * STOP_S) == 0
        assert time.monotonic() - started_s < STOP_S
        assert wait_until_gone(list(children.values()), 0.0)
        assert "killed" not in up.stderr
        assert up.stdout.count("\n") == 1


def test_dead_node_is_named_the_rest_goes_on_and_the_last_one_ends_it(tmp_path: Path) -> None:
    with UpProcess(tmp_path, *SMALL, "--transport=tcp") as up:
        url = up.wait_ready()
        children = up.child_pids()
        os.kill(children["prefill-0"], signal.SIGKILL)
        assert "prefill-0 was killed by SIGKILL" in up.wait_stderr("prefill-0 was killed", STOP_S)
        assert answer(url).output_tokens == 16  # the decode node computes the prompt itself
        os.kill(children["decode-0"], signal.SIGKILL)
        assert up.process.wait(timeout=2 * STOP_S) == 1
        assert "decode-0 was killed by SIGKILL" in up.stderr
        assert "cannot answer requests any more" in up.stderr
        assert wait_until_gone(list(children.values()), 0.0)


def test_nothing_outlives_a_killed_supervisor_and_aggregated_needs_no_prefill(tmp_path: Path) -> None:
    with UpProcess(tmp_path, *SMALL, "--aggregated", "--log-format=json") as up:
        up.wait_ready()
        assert re.search(r"\(model baton-tiny, 1 aggregated\)\n$", up.stdout)
        children = up.child_pids()
        assert set(children) == {"router", "decode-0"}
        up.process.kill()
        up.process.wait()
        assert wait_until_gone(list(children.values()), STOP_S)
        for name in children:  # each process wrote its own log, in the format that was asked for
            lines = (up.run_dir / f"{name}.log").read_text(encoding="utf-8").splitlines()
            assert {json.loads(line)["process"] for line in lines} == {name}


def test_checkpoint_with_a_missing_tensor_is_named_and_exits_2(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(TINY.folder, broken)
    for file in broken.glob(".*"):
        file.unlink()
    weights = broken / "model.safetensors"
    tensors = load_file(weights)
    missing = sorted(tensors)[-1]
    del tensors[missing]
    save_file(tensors, weights)
    with UpProcess(tmp_path, f"--model={broken}", "--kv-cache-mib=32") as up:
        assert up.process.wait(timeout=60) == 2
        assert missing in up.stderr
        assert re.search(r"(prefill|decode)-0 ended with 2", up.stderr)
        assert "Traceback" not in up.stderr
        assert up.stdout == ""
