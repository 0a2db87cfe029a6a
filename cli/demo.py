"""`baton demo` (hidden; `scripts/demo` runs it): a real model behind router, prefill and decode node answers.

Prepares the default model, or says why not and goes on with `baton-tiny`; starts `baton up` on a free port;
streams an answer; shows speed, drafts, acceptance and what crossed between the nodes; stops everything.
"""

import argparse
import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from common.errors import NodeFailed

QUESTION = "Give me three tips for baking good bread at home, and explain in one sentence each why they help."
CONTINUATION = (
    "A module is a file containing definitions and statements. The file name is the module name with a "
    "suffix appended. Within a module, the name of the module is available as the value of"
)
STOP_TIMEOUT_S = 10.0
FALLBACK_MODEL = "baton-tiny"


def configure(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("prompt", nargs="?", default=None, help="your question")
    add("--model", default=None, help="default: the default model of `baton up`, or baton-tiny without it")
    add("--transport", default="auto", choices=("auto", "ucx", "tcp"), help="how KV blocks cross")
    add("--max-tokens", type=int, default=160, help="longest answer (default: %(default)s)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    model = _prepared(args.model)
    prompt = args.prompt or (CONTINUATION if model == FALLBACK_MODEL else QUESTION)
    _say(f"starting router, prefill node and decode node with {model}")
    with running_up(["--model", model, "--transport", args.transport, "--port", "0"]) as (url, transport):
        print(f"\n> {prompt}\n")
        answer = asyncio.run(_ask(url, prompt, args.max_tokens))
        print(f"\n{answer.describe()}\n{transferred(answer.usage, transport)}")
    _say("stopped; nothing is left running")
    return 0 if answer.output_tokens else 1


@contextmanager
def running_up(words: list[str]) -> Iterator[tuple[str, str]]:
    """`baton up` with these words, as a process of its own; yields URL and transport of its ready line."""
    command = [sys.executable, "-m", "cli.main", "up", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0)
    try:
        yield _read_ready_line(process)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its processes go with it
            process.wait()


def _read_ready_line(process: "subprocess.Popen[str]") -> tuple[str, str]:
    """Waits for it. `up` has its own deadline and ends when it cannot start; then stdout ends."""
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="")
        found = re.search(r"is ready: (\S+) .*?(?:transfer (\w+))?\)", line)
        if found:
            return found[1], found[2] or ""
    raise NodeFailed(f"`baton up` ended with {process.wait()} before it was ready; its messages are above")


def _prepared(wanted: str | None) -> str:
    from common.model.registry import DEFAULT_MODEL

    model = wanted or DEFAULT_MODEL
    _say(f"preparing the model {model} (done once, then kept in the cache)")
    prepare = [sys.executable, "-m", "cli.main", "model", "prepare"]
    if subprocess.run([*prepare, model], stdout=subprocess.DEVNULL, check=False).returncode == 0:
        return model
    if wanted is not None or model == FALLBACK_MODEL:
        raise NodeFailed(f"the model {model} cannot be prepared; the reason is above")
    _say(f"going on with {FALLBACK_MODEL}, which comes with Baton (it continues text, it does not chat)")
    return FALLBACK_MODEL


async def _ask(url: str, prompt: str, max_tokens: int) -> Any:
    from cli.answer import ask
    from cli.client import open_client

    async with open_client(url) as client:
        return await ask(client, prompt, {"max_tokens": max_tokens, "temperature": 0})


def transferred(usage: Mapping[str, Any], transport: str) -> str:
    """What crossed from the prefill to the decode node for this answer."""
    figures = usage.get("baton") or {}
    num_bytes = int(figures.get("transferred_bytes", 0))
    if not num_bytes:
        return "no KV blocks crossed: the decode node computed the prompt itself"
    tokens = int(figures.get("transferred_tokens", 0))
    over = {"ucx": "UCX", "tcp": "TCP"}.get(transport, "UCX or TCP")
    return f"{num_bytes / 2**20:.2f} MiB crossed over {over}: the KV blocks of {tokens} prompt tokens"


def _say(message: str) -> None:
    print(f"demo: {message}", file=sys.stderr, flush=True)
