"""The small interface behind which bytes move, and the choice between its implementations.

A *transport* makes *lanes* (one per pair of nodes); a lane posts sends and receives that match by a 64-bit
tag chosen by the receiving process. A request is terminal once nothing will touch its buffer any more;
that, and not the cancellation of whoever waits for it, is what frees memory (see :meth:`Lane.fence`).
Everything here runs on one event loop.
"""

import logging
from collections.abc import Callable
from typing import Protocol

from common.errors import TransferError

logger = logging.getLogger(__name__)


class TransportError(TransferError):
    """A lane or a request failed; the message says which and why."""


class TransportUnavailable(TransportError):
    """This host cannot run the transport (library missing or broken)."""


class Request:
    """One posted send or receive. ``error`` is None for success; valid once ``terminal``."""

    def __init__(self) -> None:
        self.terminal = False
        self.error: BaseException | None = None
        self._callbacks: list[Callable[[Request], None]] = []

    def add_done_callback(self, callback: Callable[["Request"], None]) -> None:
        if self.terminal:
            callback(self)
        else:
            self._callbacks.append(callback)

    def complete(self, error: BaseException | None = None) -> None:
        """For transports: the buffer is quiet from now on. A second call changes nothing."""
        if self.terminal:
            return
        self.terminal = True
        self.error = error
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)


class Lane(Protocol):
    transport: str

    def post_send(self, tag: int, view: memoryview) -> Request:
        """Sends ``view`` (may be empty) under ``tag``. The bytes must not change until terminal. Never
        blocks."""

    def post_recv(self, tag: int, view: memoryview) -> Request:
        """Receives the message with ``tag`` into ``view`` (a shorter message is fine). Each tag is posted
        once."""

    async def fence(self, timeout_s: float) -> bool:
        """Closes the lane by force and waits until every request is terminal. True: no byte of any posted
        buffer is read or written from now on. False: some requests did not end; their buffers must stay."""


class Transport(Protocol):
    name: str

    async def start(self, host: str | None) -> None:
        """Makes it ready to connect and, bound to ``host`` unless that is None, to accept; raises
        TransportUnavailable."""

    @property
    def address(self) -> bytes:
        """Opaque; the peer passes it to :meth:`accept` or :meth:`connect`."""

    async def connect(self, host: str, address: bytes, token: bytes) -> Lane:
        """The receiving side of a lane; the peer must accept the same token."""

    async def accept(self, address: bytes, token: bytes, timeout_s: float) -> Lane:
        """The sending side of a lane."""

    async def close(self) -> None:
        """Fences what is open and frees threads and sockets."""


def make_transport(name: str) -> Transport:
    """``ucx`` or ``tcp``; the UCX binding is imported only when it is asked for."""
    if name == "tcp":
        from kv_transfer.tcp import TcpTransport

        return TcpTransport()
    if name == "ucx":
        from kv_transfer.ucx import UcxTransport

        return UcxTransport()
    raise ValueError(f"unknown transport {name!r}; choose ucx or tcp")


async def start_transports(choice: str, host: str | None) -> dict[str, Transport]:
    """Starts what ``choice`` (auto, ucx, tcp) allows on this host, best first. ``auto`` falls back to TCP
    with one warning when UCX cannot run; ``ucx`` raises TransportUnavailable instead."""
    started: dict[str, Transport] = {}
    for name in {"auto": ("ucx", "tcp"), "ucx": ("ucx",), "tcp": ("tcp",)}[choice]:
        transport = make_transport(name)
        try:
            await transport.start(host)
        except TransportUnavailable as error:
            if choice == "ucx":
                raise
            logger.warning("KV transfer falls back to TCP: %s", error)
            continue
        started[name] = transport
    return started
