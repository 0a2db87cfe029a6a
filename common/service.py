"""What every process has: HTTP /health, /ready and /metrics, and an orderly way to stop.

/health says the event loop turns. /ready is 503, with the reasons, until the process can serve and again
while it drains. SIGTERM and SIGINT start the drain: take no new work, finish what runs, within a
deadline, then exit; a second signal exits at once. The server runs inside the process's own event loop.
"""

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping, Sequence
from typing import Any

import msgspec
import uvicorn
import uvloop

from common.errors import ConfigError
from common.metrics import CONTENT_TYPE, Metrics
from common.version import __version__

logger = logging.getLogger(__name__)

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

SERVER_STOP_TIMEOUT_S = 2.0  # for responses that are still being written after the drain
DRAIN_POLL_S = 0.02
START_POLL_S = 0.002
START_TIMEOUT_S = 10.0


def run(main: Coroutine[Any, Any, None]) -> None:
    """Runs a process's main coroutine on uvloop until it returns."""
    uvloop.run(main)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the service owns the process's life."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


class Service:
    """The HTTP side of a process and its shutdown.

    ``not_ready`` returns the reasons for not being ready, none when it can serve. ``app`` is an ASGI
    application that answers what /health, /ready and /metrics do not; without one those get a 404.
    """

    def __init__(
        self,
        *,
        name: str,
        host: str,
        port: int,
        metrics: Metrics,
        not_ready: Callable[[], list[str]],
        drain_timeout_s: float,
        app: App | None = None,
    ) -> None:
        self.name = name
        self.host = host
        self.port = port
        self.draining = False
        self._metrics = metrics
        self._not_ready = not_ready
        self._drain_timeout_s = drain_timeout_s
        self._app = app
        self._stop = asyncio.Event()
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::", "") else self.host
        return f"http://{host}:{self.port}"

    async def start(self) -> int:
        """Listens; returns the port (the one chosen, for port 0). Raises ConfigError if it is taken."""
        listener = bind(self.host, self.port)
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(
            self._handle,
            http="httptools",
            interface="asgi3",
            proxy_headers=False,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=round(SERVER_STOP_TIMEOUT_S),
        )
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]), name="http-server")
        async with asyncio.timeout(START_TIMEOUT_S):
            while not self._server.started:
                if self._serving.done():
                    self._serving.result()
                await asyncio.sleep(START_POLL_S)
        logger.info("%s %s listens on %s", self.name, __version__, self.url)
        return self.port

    def stop(self) -> None:
        """Asks for the drain, as SIGTERM does. Legal at any time, from the loop's thread."""
        if self._stop.is_set() and self._server is not None:
            self._server.force_exit = True
        self._stop.set()

    async def run_until_stopped(self, drain: Callable[[], Awaitable[None]] | None = None) -> None:
        """Waits for a signal or ``stop``, drains within the deadline, stops listening.

        ``drain`` returns when the running work is done; it is cancelled at the deadline.
        """
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self.stop)
        try:
            await self._stop.wait()
            self.draining = True
            logger.info("draining, %.1f s at most", self._drain_timeout_s)
            if drain is not None:
                await self._drain(drain)
        finally:
            for signum in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(signum)
            await self.close()

    async def close(self) -> None:
        """Stops listening; open responses get ``SERVER_STOP_TIMEOUT_S``."""
        if self._server is None or self._serving is None:
            return
        self._server.should_exit = True
        await self._serving
        self._server = None

    async def _drain(self, drain: Callable[[], Awaitable[None]]) -> None:
        work = asyncio.ensure_future(drain())
        deadline = asyncio.get_running_loop().time() + self._drain_timeout_s
        while not work.done() and asyncio.get_running_loop().time() < deadline:
            await asyncio.wait([work], timeout=DRAIN_POLL_S)
            if self._server is not None and self._server.force_exit:
                break
        if not work.done():
            logger.warning("drain ended before all work was done")
            work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            answer = self._own_answer(scope["path"])
            if answer is not None:
                await respond(send, *answer)
                return
        if self._app is None:
            await respond(send, 404, b'{"error":"not found; this process serves /health, /ready, /metrics"}')
        else:
            await self._app(scope, receive, send)

    def _own_answer(self, path: str) -> tuple[int, bytes, str] | None:
        if path == "/health":
            return 200, b'{"status":"alive"}', "application/json"
        if path == "/ready":
            reasons = self.not_ready_reasons()
            body = {"ready": not reasons, "reasons": reasons, "name": self.name}
            return (503 if reasons else 200), msgspec.json.encode(body), "application/json"
        if path == "/metrics":
            return 200, self._metrics.render(), CONTENT_TYPE
        return None

    def not_ready_reasons(self) -> list[str]:
        return (["draining"] if self.draining else []) + self._not_ready()


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket; ConfigError names host and port when they cannot be had."""
    try:
        info = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(info[0], info[1])
    except OSError as error:
        raise ConfigError(f"cannot listen on host {host!r}: {error}") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(info[4])
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} on {host} is in use; stop what listens there or choose another with --port"
            ) from None
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from None
    listener.setblocking(False)
    return listener


async def respond(
    send: Send,
    status: int,
    body: bytes,
    content_type: str = "application/json",
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> None:
    """Sends one whole HTTP response."""
    own = [(b"content-type", content_type.encode()), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": [*own, *headers]})
    await send({"type": "http.response.body", "body": body})
