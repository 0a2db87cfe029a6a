"""A streaming client of the router's OpenAI routes, for `generate`, `bench load` and `demo`.

Deadlines are in `CLIENT_TIMEOUT`: to connect, and between two pieces of an answer. Whatever goes wrong
becomes a BatonError with the server's own words.
"""

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx

from common.errors import BatonError, InvalidRequest, NodeFailed

CLIENT_TIMEOUT = httpx.Timeout(connect=5.0, read=300.0, write=30.0, pool=600.0)


class CannotConnect(NodeFailed):
    """Nothing answers at the URL."""


def open_client(url: str, *, max_connections: int = 4) -> httpx.AsyncClient:
    """For one server; proxies of the environment are not used for addresses on this machine."""
    host = httpx.URL(url).host
    return httpx.AsyncClient(
        base_url=url.rstrip("/"),
        timeout=CLIENT_TIMEOUT,
        limits=httpx.Limits(max_connections=max_connections),
        trust_env=host not in ("127.0.0.1", "localhost", "::1"),
    )


async def get_json(client: httpx.AsyncClient, path: str) -> Any:
    try:
        response = await client.get(path)
    except httpx.HTTPError as error:
        raise CannotConnect(f"no answer from {client.base_url}{path.lstrip('/')}: {_reason(error)}") from None
    if response.status_code != 200:
        raise _error_of(response.status_code, response.text)
    return response.json()


async def stream(
    client: httpx.AsyncClient, path: str, body: Mapping[str, Any]
) -> AsyncIterator[dict[str, Any]]:
    """POSTs ``body`` with streaming and usage switched on; yields the chunks, decoded.

    Raises CannotConnect, InvalidRequest (4xx, with the server's message) or NodeFailed: also for an error
    object in mid-stream and for a stream that ends without `[DONE]`.
    """
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        async with client.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                raise _error_of(response.status_code, (await response.aread()).decode(errors="replace"))
            async for line in response.aiter_lines():
                if not line.startswith("data:"):
                    continue
                data = line[5:].strip()
                if data == "[DONE]":
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    raise NodeFailed(f"the server gave up in mid-stream: {chunk['error'].get('message')}")
                yield chunk
    except httpx.ConnectError as error:
        raise CannotConnect(f"nothing answers at {client.base_url}: {_reason(error)}") from None
    except httpx.HTTPError as error:
        raise NodeFailed(f"{client.base_url}: {_reason(error)}") from None
    raise NodeFailed(f"{client.base_url}: the stream ended without [DONE]")


def text_of(chunk: Mapping[str, Any]) -> str:
    """The text that a chunk of either route adds."""
    choices = chunk.get("choices") or [{}]
    return str(choices[0].get("text") or (choices[0].get("delta") or {}).get("content") or "")


def _reason(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__


def _error_of(status: int, text: str) -> BatonError:
    """The server's error object as the exception it describes."""
    try:
        told = json.loads(text)["error"]
        message, param, code = str(told["message"]), told.get("param"), told.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        message, param, code = text.strip()[:500] or "no reason given", None, None
    if 400 <= status < 500 and status != 429:
        return InvalidRequest(message, param=param, code=code)
    return NodeFailed(f"HTTP {status}: {message}", param=param, code=code)
