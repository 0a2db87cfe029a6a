"""Lanes over plain TCP sockets: works on every host and receives straight into place.

A lane is one socket. The receiving side connects and sends a 16-byte token; then the sending side writes
``tag (8) | length (8) | bytes`` messages. A message whose tag nobody posted (late, or aborted) is read and
thrown away. Bytes are copied only inside calls made by this loop, so ending the task is a true fence.
"""

import asyncio
import logging
import socket
import struct
from collections import deque
from collections.abc import Coroutine
from typing import Any

from kv_transfer.transport import Lane, Request, TransportError, TransportUnavailable

logger = logging.getLogger(__name__)

_HEADER = struct.Struct("!QQ")
TOKEN_BYTES = 16
_SCRATCH_BYTES = 256 * 1024
_TOKEN_TIMEOUT_S = 10.0
_MAX_UNCLAIMED = 64


class TcpLane:
    """One socket, one direction of bytes. ``sending`` tells which side this is."""

    transport = "tcp"

    def __init__(self, sock: socket.socket, *, sending: bool) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._closed: BaseException | None = None
        self._posted: dict[int, tuple[memoryview, Request]] = {}
        self._queue: deque[tuple[int, memoryview, Request]] = deque()
        self._wake = asyncio.Event()
        self.num_discarded = 0
        self._task = self._loop.create_task(self._send_loop() if sending else self._recv_loop())

    def post_send(self, tag: int, view: memoryview) -> Request:
        request = Request()
        if self._closed is not None:
            request.complete(TransportError(f"TCP lane is closed: {self._closed}"))
            return request
        self._queue.append((tag, view, request))
        self._wake.set()
        return request

    def post_recv(self, tag: int, view: memoryview) -> Request:
        request = Request()
        if self._closed is not None:
            request.complete(TransportError(f"TCP lane is closed: {self._closed}"))
            return request
        assert tag not in self._posted, "a tag is posted once"
        self._posted[tag] = (view, request)
        return request

    async def fence(self, timeout_s: float) -> bool:
        self._task.cancel()
        await asyncio.wait({self._task}, timeout=timeout_s)
        if not self._task.done():
            return False
        self._fail(self._closed or TransportError("closed by force"))
        return True

    def _fail(self, error: BaseException) -> None:
        """Everything pending becomes terminal. Only called when neither loop touches a buffer any more."""
        self._closed = error
        self._sock.close()
        pending = [r for _, _, r in self._queue] + [r for _, r in self._posted.values()]
        self._queue.clear()
        self._posted.clear()
        for request in pending:
            request.complete(TransportError(f"TCP lane failed: {error}"))

    async def _send_loop(self) -> None:
        try:
            while True:
                while not self._queue:
                    self._wake.clear()
                    await self._wake.wait()
                tag, view, request = self._queue[0]
                await self._loop.sock_sendall(self._sock, _HEADER.pack(tag, len(view)))
                if len(view):
                    await self._loop.sock_sendall(self._sock, view)
                self._queue.popleft()
                request.complete()
        except OSError as error:
            self._fail(error)

    async def _recv_loop(self) -> None:
        header = memoryview(bytearray(_HEADER.size))
        scratch = memoryview(bytearray(_SCRATCH_BYTES))
        try:
            while True:
                await self._recv_exactly(header)
                tag, length = _HEADER.unpack(header)
                posted = self._posted.get(tag)
                if posted is None:
                    self.num_discarded += 1
                    await self._discard(scratch, length)
                    continue
                view, request = posted
                if length > len(view):
                    raise TransportError(f"message of {length} bytes for a receive of {len(view)}")
                await self._recv_exactly(view[:length])
                del self._posted[tag]
                request.complete()
        except (OSError, TransportError) as error:
            self._fail(error)

    async def _recv_exactly(self, view: memoryview) -> None:
        while len(view):
            n = await self._loop.sock_recv_into(self._sock, view)
            if n == 0:
                raise ConnectionResetError("peer closed the lane")
            view = view[n:]

    async def _discard(self, scratch: memoryview, length: int) -> None:
        while length:
            n = await self._loop.sock_recv_into(self._sock, scratch[: min(length, len(scratch))])
            if n == 0:
                raise ConnectionResetError("peer closed the lane")
            length -= n


class TcpTransport:
    """Listens on a port of its own choice, which travels in :attr:`address`."""

    name = "tcp"

    def __init__(self) -> None:
        self._listener: socket.socket | None = None
        self._lanes: list[TcpLane] = []
        self._arrived: dict[bytes, socket.socket] = {}
        self._expected: dict[bytes, asyncio.Future[socket.socket]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str | None) -> None:
        if host is None:
            return
        try:
            infos = await asyncio.get_running_loop().getaddrinfo(host or None, 0, type=socket.SOCK_STREAM)
            family, kind, proto, _, address = infos[0]
            listener = socket.socket(family, kind, proto)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(64)
            listener.setblocking(False)
        except OSError as error:
            raise TransportUnavailable(f"cannot listen for KV data on {host!r}: {error}") from error
        self._listener = listener
        self._spawn(self._accept_loop(listener))

    @property
    def address(self) -> bytes:
        if self._listener is None:
            return b""
        return str(self._listener.getsockname()[1]).encode()

    async def connect(self, host: str, address: bytes, token: bytes) -> Lane:
        loop = asyncio.get_running_loop()
        try:
            infos = await loop.getaddrinfo(host, int(address), type=socket.SOCK_STREAM)
            family, kind, proto, _, target = infos[0]
            sock = socket.socket(family, kind, proto)
            sock.setblocking(False)
            try:
                await loop.sock_connect(sock, target)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await loop.sock_sendall(sock, token)
            except BaseException:
                sock.close()
                raise
        except (OSError, ValueError) as error:
            raise TransportError(f"cannot open a TCP lane to {host}:{address!r}: {error}") from error
        return self._keep(TcpLane(sock, sending=False))

    async def accept(self, address: bytes, token: bytes, timeout_s: float) -> Lane:
        sock = self._arrived.pop(token, None)
        if sock is None:
            future: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
            self._expected[token] = future
            try:
                sock = await asyncio.wait_for(future, timeout_s)
            except TimeoutError as error:
                raise TransportError(f"no TCP lane arrived within {timeout_s} s") from error
            finally:
                self._expected.pop(token, None)
        return self._keep(TcpLane(sock, sending=True))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener is not None:
            self._listener.close()
        for sock in self._arrived.values():
            sock.close()
        self._arrived.clear()
        await asyncio.gather(*(lane.fence(5.0) for lane in self._lanes))
        self._lanes.clear()

    def _keep(self, lane: TcpLane) -> TcpLane:
        self._lanes = [one for one in self._lanes if one._closed is None]
        self._lanes.append(lane)
        return lane

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept_loop(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of file descriptors, or the peer left at once
                logger.warning("KV data listener: %s", error)
                await asyncio.sleep(0.1)
                continue
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._spawn(self._read_token(sock))

    async def _read_token(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        token = b""
        try:
            async with asyncio.timeout(_TOKEN_TIMEOUT_S):
                while len(token) < TOKEN_BYTES:
                    part = await loop.sock_recv(sock, TOKEN_BYTES - len(token))
                    if not part:
                        raise ConnectionResetError
                    token += part
        except (OSError, TimeoutError):
            sock.close()
            return
        except asyncio.CancelledError:
            sock.close()
            raise
        future = self._expected.get(token)
        if future is not None and not future.done():
            future.set_result(sock)
            return
        while len(self._arrived) >= _MAX_UNCLAIMED:  # strangers: the oldest goes
            self._arrived.pop(next(iter(self._arrived))).close()
        self._arrived[token] = sock
