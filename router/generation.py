"""The endpoints that generate: plain ASGI, one task a request, streaming or whole.

The status is decided by what happens before the first text; a failure after that is an error object in
the stream, which then ends without [DONE]. While the work runs, a watcher waits for the client to leave:
leaving cancels the work, and the walk's legs abort the request on every node.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.errors import (
    BatonError,
    InvalidRequest,
    NoNodeAvailable,
    Overloaded,
    RequestAborted,
    UnknownModel,
)
from common.log import bind_request_id
from common.service import Receive, Scope, Send, respond
from router.choice_text import Delta
from router.openai_responses import DONE_EVENT, Shapes, Usage, error_body, to_event, to_json
from router.openai_types import GenerationRequest
from router.pipeline import walk
from router.prepare import Job, Services, prepare

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 1
CLIENT_STALL_TIMEOUT_S = 60.0  # a client that reads nothing of its stream for so long is taken for gone
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class BodyTooLarge(InvalidRequest):
    http_status = 413


@dataclass
class Door:
    """Counts requests in and out, and lets none in while the router drains or is full."""

    services: Services
    served_name: str
    draining: bool = False
    num_in_flight: int = 0
    works: set[asyncio.Future[None]] = field(default_factory=set)

    def __enter__(self) -> None:
        limit = self.services.config.limits.max_requests
        if self.draining:
            raise NoNodeAvailable("this router is shutting down; send the request to another")
        if self.num_in_flight >= limit:
            raise Overloaded(f"{limit} requests are in flight here, which is the limit; try again later")
        self.num_in_flight += 1
        self.services.metrics.gauge("router_requests_in_flight").set(self.num_in_flight)

    def __exit__(self, *_: object) -> None:
        self.num_in_flight -= 1
        self.services.metrics.gauge("router_requests_in_flight").set(self.num_in_flight)

    def end_all(self) -> None:
        """The drain is over: what is still in flight is answered with an error, now."""
        self.draining = True
        for work in list(self.works):
            work.cancel()


class GenerationEndpoint:
    """An ASGI application for one of the two OpenAI endpoints; ``parse`` reads its bodies."""

    def __init__(self, door: Door, parse: Callable[[bytes], GenerationRequest], name: str) -> None:
        self._door = door
        self._parse = parse
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = ("chatcmpl-" if self._name == "chat" else "cmpl-") + secrets.token_hex(12)
        answer = _Answer(send)
        with bind_request_id(request_id):
            try:
                raw = await read_body(scope, receive, self._door.services.config.limits.max_body_bytes)
                with self._door:
                    await _unless_it_ends_early(self._door, receive, self._generate(raw, request_id, answer))
            except RequestAborted as left:
                answer.status = left.http_status  # for the metrics: nobody is there to read it
                logger.info("request was aborted: %s", left.message)
            except BatonError as error:
                if error.http_status >= 500:
                    logger.warning("request failed: %s", error.message)
                await answer.error(error)
            except Exception:
                logger.exception("internal error")
                await answer.error(BatonError("internal error; the router's log has it"))
        requests = self._door.services.metrics.counter("router_requests")
        requests.labels(self._name, str(answer.status)).inc()

    async def _generate(self, raw: bytes, request_id: str, answer: "_Answer") -> None:
        services = self._door.services
        request = self._parse(raw)
        if request.model != self._door.served_name:
            raise UnknownModel(
                f"model {request.model!r} is not served here; this router serves {self._door.served_name!r}"
            )
        jobs = await prepare(services, request, request_id)
        usage = Usage()
        shapes = Shapes(request.chat, request_id, request.model, int(time.time()), services.tokenizer)
        async with contextlib.aclosing(walk_all(services, jobs, usage)) as deltas:
            if request.stream:
                await _stream(request, shapes, deltas, usage, answer)
            else:
                collected = [delta async for delta in deltas]
                await answer.whole(200, to_json(shapes.whole(collected, usage)))


async def _stream(
    request: GenerationRequest,
    shapes: Shapes,
    deltas: AsyncGenerator[Delta, None],
    usage: Usage,
    answer: "_Answer",
) -> None:
    begun: set[int] = set()
    async for delta in deltas:
        first = delta.index not in begun
        begun.add(delta.index)
        await answer.event(to_event(shapes.chunk(delta, first=first, null_usage=request.include_usage)))
    if request.include_usage:
        await answer.event(to_event(shapes.usage_chunk(usage)))
    await answer.event(DONE_EVENT)
    await answer.end()


async def walk_all(services: Services, jobs: Sequence[Job], usage: Usage) -> AsyncGenerator[Delta, None]:
    """The deltas of several prompts as they come; the first failure ends all of them."""
    if len(jobs) == 1:
        async with contextlib.aclosing(walk(services, jobs[0], usage)) as deltas:
            async for delta in deltas:
                yield delta
        return
    arrived: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue()

    async def follow(job: Job) -> None:
        try:
            async with contextlib.aclosing(walk(services, job, usage)) as deltas:
                async for delta in deltas:
                    arrived.put_nowait(delta)
            arrived.put_nowait(None)
        except Exception as error:
            arrived.put_nowait(error)

    tasks = [asyncio.create_task(follow(job)) for job in jobs]
    try:
        running = len(jobs)
        while running:
            item = await arrived.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Answer:
    """Writes the HTTP response and remembers how far it got."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._streaming = False
        self.status = 0

    async def whole(self, status: int, body: bytes) -> None:
        self.status = status
        await respond(self._send, status, body)

    async def event(self, event: bytes) -> None:
        if not self._streaming:
            self._streaming = True
            self.status = 200
            await self._send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        try:
            async with asyncio.timeout(CLIENT_STALL_TIMEOUT_S):
                await self._send({"type": "http.response.body", "body": event, "more_body": True})
        except TimeoutError:
            raise RequestAborted(
                f"the client read nothing of its stream for {CLIENT_STALL_TIMEOUT_S:g} s"
            ) from None

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def error(self, error: BatonError) -> None:
        if self._streaming:
            await self.event(to_event(error_body(error)))
            await self.end()
            self.status = error.http_status  # for the metrics: the client has seen 200
            return
        self.status = error.http_status
        body = to_json(error_body(error))
        retry_later = self.status in (429, 503)
        headers = [(b"retry-after", b"%d" % RETRY_AFTER_S)] if retry_later else []
        await respond(self._send, self.status, body, headers=headers)


async def _unless_it_ends_early(door: Door, receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs ``work`` to its end; cancels it, waits and raises RequestAborted if the client leaves first.
    Raises NoNodeAvailable if the door has ended it."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_client_leaves(receive))
    door.works.add(working)
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.cancelled():
            raise NoNodeAvailable(
                "this router stopped before the answer was complete; send the request again"
            )
        if working.done():
            working.result()
            return
        raise RequestAborted("the client left before its answer was complete")
    finally:
        door.works.discard(working)
        watching.cancel()
        if not working.done():
            working.cancel()
            await asyncio.gather(working, return_exceptions=True)


async def _client_leaves(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_body(scope: Scope, receive: Receive, limit_bytes: int) -> bytes:
    """The whole request body; BodyTooLarge before more than ``limit_bytes`` are held."""
    length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    if length.isdigit() and int(length) > limit_bytes:
        raise BodyTooLarge(f"the body has {int(length)} bytes; at most {limit_bytes} are accepted")
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestAborted("the client left before its answer was complete")
        part = message.get("body", b"")
        size += len(part)
        if size > limit_bytes:
            raise BodyTooLarge(f"the body has more than {limit_bytes} bytes, which are accepted at most")
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)
