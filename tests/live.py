"""A live `baton up` with baton-tiny in float32, as a client sees it, and what a client got.

`serving` starts one and stops it; `Live` asks it, and looks at its nodes through /v1/cluster. Loads on that
page are as old as two heartbeats, so what is expected there is polled for until a deadline.
"""

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
from openai import OpenAI
from openai.types import Completion, CompletionUsage

from cli.bench_prompts import shuffled_text
from tests.up_process import UpProcess

MODEL = "baton-tiny"
NEAR_TIE = 1e-4
BLOCK_SIZE = 16
BACK_OFF = 3  # N - 1 with the four modules of baton-tiny
LOAD_AGE_S = 1.5  # two heartbeats of half a second, and some
TIMEOUT_S = 60.0
WITH_USAGE = {"include_usage": True}
IDLE = {"num_running": 0, "num_waiting": 0, "num_receiving": 0, "num_held": 0, "waiting_tokens": 0}

Load = dict[str, Any]


@dataclass
class Told:
    """One choice as it was streamed. ``pieces``: (text, number of tokens) of each chunk. Tokens, offsets and
    gaps need logprobs."""

    text: str = ""
    finish_reason: str | None = None
    tokens: list[str] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # between the two best, at every token
    pieces: list[tuple[str, int]] = field(default_factory=list)
    usage: CompletionUsage | None = None

    def add(self, chunk: Completion) -> None:
        if chunk.usage is not None:
            assert not chunk.choices
            self.usage = chunk.usage
        for choice in chunk.choices:
            assert self.finish_reason is None, "nothing may follow the finish reason"
            self.text += choice.text
            self.finish_reason = choice.finish_reason
            scored = choice.logprobs
            self.pieces.append((choice.text, len(scored.tokens or ()) if scored else 0))
            if scored is not None:
                self.tokens += scored.tokens or ()
                self.offsets += scored.text_offset or ()
                tops = [sorted(top.values(), reverse=True) for top in scored.top_logprobs or ()]
                self.gaps += [top[0] - top[1] if len(top) > 1 else 0.0 for top in tops]

    def same_as(self, other: "Told") -> bool:
        """Equal, or parted at a near-tie."""
        for mine, its, gap in zip(self.tokens, other.tokens, other.gaps, strict=False):
            if mine != its:
                return gap < NEAR_TIE
        return self.text == other.text and self.finish_reason == other.finish_reason


def text(seed: int, characters: int) -> str:
    """Sentences; about 3.5 characters make a token."""
    return shuffled_text(random.Random(seed), characters)


LONG = text(1, 800)  # goes through the prefill node
SHORT = "Open a file and read a line."  # too short to be worth a transfer


def check_usage(usage: CompletionUsage | None, prompt_tokens: int, completion_tokens: int) -> None:
    assert usage is not None
    assert usage.prompt_tokens == prompt_tokens
    assert usage.completion_tokens == completion_tokens
    assert usage.total_tokens == prompt_tokens + completion_tokens


def of_baton(usage: CompletionUsage | None) -> dict[str, Any]:
    """What Baton adds to the usage: drafts and hand-over."""
    assert usage is not None
    assert usage.model_extra is not None
    found: dict[str, Any] = usage.model_extra["baton"]
    return found


def cached_tokens(usage: CompletionUsage | None) -> int:
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return usage.prompt_tokens_details.cached_tokens or 0


class Live:
    """A running `baton up`."""

    model = MODEL

    def __init__(self, up: UpProcess, client: OpenAI, http: httpx.Client) -> None:
        self.up = up
        self.client = client
        self.http = http

    def complete(
        self, prompt: str | list[int], *, extra: dict[str, Any] | None = None, **fields: Any
    ) -> Completion:
        """Greedy, to the full length, unless told otherwise."""
        asked: dict[str, Any] = {"temperature": 0, "max_tokens": 32} | fields
        extra = {"ignore_eos": True} | (extra or {})
        answer = self.client.completions.create(model=MODEL, prompt=prompt, extra_body=extra, **asked)
        assert isinstance(answer, Completion)
        return answer

    def stream(self, prompt: str | list[int], *, extra: dict[str, Any] | None = None, **fields: Any) -> Told:
        """As `complete`, streamed, with usage."""
        asked: dict[str, Any] = {"temperature": 0, "max_tokens": 32, "stream_options": WITH_USAGE} | fields
        extra = {"ignore_eos": True} | (extra or {})
        told = Told()
        streamed = self.client.completions.create(
            model=MODEL, prompt=prompt, stream=True, extra_body=extra, **asked
        )
        for chunk in streamed:
            told.add(chunk)
        return told

    def cluster(self) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get("/v1/cluster").raise_for_status().json()
        return found

    def loads(self) -> dict[str, Load]:
        return {node["node_id"]: node["load"] for node in self.cluster()["nodes"]}

    def next_event(self, node_id: str) -> int:
        """Number of the node's next KV event batch, as the router knows it: it grows with every chunk."""
        (node,) = [node for node in self.cluster()["nodes"] if node["node_id"] == node_id]
        number: int = node["events"]["next_seq"]
        return number

    def wait_until(self, holds: Callable[[], bool], what: str, timeout_s: float = 20.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline_s, f"not in {timeout_s} s: {what}; {self.cluster()}"
            time.sleep(0.05)

    def wait_idle(self, timeout_s: float = 20.0) -> dict[str, Load]:
        """Loads once every node is without work and has all its blocks; call it when work has been seen."""

        def idle() -> bool:
            loads = self.loads().values()
            return bool(loads) and all(
                all(load[key] == value for key, value in IDLE.items())
                and load["free_blocks"] == load["total_blocks"] > 0
                for load in loads
            )

        self.wait_until(idle, "every node idle, all blocks free", timeout_s)
        time.sleep(LOAD_AGE_S)
        assert idle(), self.loads()
        return self.loads()


def num_tokens(live: Live, **body: Any) -> int:
    """Length of a ``prompt`` or of ``messages``, by the router's own count."""
    count: int = live.http.post("/tokenize", json=body).raise_for_status().json()["count"]
    return count


@contextlib.contextmanager
def serving(folder: Path, *words: str, cache: Literal["roomy", "as told"] = "roomy") -> Iterator[Live]:
    """A `baton up` with float32, one thread a node and what ``words`` add; ready."""
    sizes = ("--kv-cache-mib=48",) if cache == "roomy" else ()
    own = (f"--model={MODEL}", "--dtype=float32", "--threads=1", *sizes)
    with contextlib.ExitStack() as stack:
        up = stack.enter_context(UpProcess(folder, *own, *words))
        url = up.wait_ready()
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)
        http = stack.enter_context(httpx.Client(base_url=url, timeout=TIMEOUT_S))
        yield Live(up, stack.enter_context(client), http)
