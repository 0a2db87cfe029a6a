"""One prompt to a running router: streams the answer to stdout, returns the figures that came with it."""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from cli.acceptance import Acceptance
from cli.client import get_json, stream, text_of
from common.errors import InvalidRequest


@dataclass(frozen=True)
class Answer:
    """What one answer took. ``first_token_s`` counts from the request, ``decode_s`` from the first token."""

    text: str
    first_token_s: float
    decode_s: float
    usage: Mapping[str, Any] = field(default_factory=dict)

    @property
    def output_tokens(self) -> int:
        return int(self.usage.get("completion_tokens", 0))

    @property
    def acceptance(self) -> Acceptance:
        return Acceptance.from_usage(self.usage)

    @property
    def tokens_per_s(self) -> float:
        """Of the tokens after the first chunk's arrival; 0 for an answer of one chunk."""
        return (self.output_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0

    def describe(self) -> str:
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return (
            f"{self.usage.get('prompt_tokens', 0)} prompt tokens ({cached} cached), "
            f"{self.output_tokens} output tokens; first token after {self.first_token_s * 1000:.0f} ms, "
            f"then {self.tokens_per_s:.1f} tokens/s\n{self.acceptance.describe()}"
        )


class Shown:
    """Text on stdout piece by piece, and when its first and last piece came."""

    def __init__(self) -> None:
        self.text = ""
        self.first_s = self.last_s = time.perf_counter()

    def add(self, piece: str) -> None:
        if not piece:
            return
        self.last_s = time.perf_counter()
        self.first_s = self.first_s if self.text else self.last_s
        self.text += piece
        sys.stdout.write(piece)
        sys.stdout.flush()

    def end(self) -> None:
        sys.stdout.write("\n")
        sys.stdout.flush()


async def ask(
    client: httpx.AsyncClient, prompt: str, options: Mapping[str, Any], *, model: str = "", raw: bool = False
) -> Answer:
    """Sends ``prompt`` as a chat message, or as it is when ``raw`` or when the model has no chat template."""
    model = model or (await get_json(client, "/v1/models"))["data"][0]["id"]
    completion = {"model": model, "prompt": prompt, **options}
    if raw:
        return await _show(client, "/v1/completions", completion)
    chat = {"model": model, "messages": [{"role": "user", "content": prompt}], **options}
    try:
        return await _show(client, "/v1/chat/completions", chat)
    except InvalidRequest as error:
        if error.param != "messages":
            raise
    return await _show(client, "/v1/completions", completion)


async def _show(client: httpx.AsyncClient, path: str, body: Mapping[str, Any]) -> Answer:
    start_s = time.perf_counter()
    shown = Shown()
    usage: Mapping[str, Any] = {}
    async for chunk in stream(client, path, body):
        usage = chunk.get("usage") or usage
        shown.add(text_of(chunk))
    shown.end()
    return Answer(shown.text, shown.first_s - start_s, shown.last_s - shown.first_s, usage)
