"""A ZMQ socket on the running event loop: callbacks for what arrives, sends that never wait.

libzmq's file descriptor is edge-triggered: it signals once, and both receiving and *sending* may swallow
the signal. So every wake-up reads until nothing is left, and every send looks whether something arrived
meanwhile. One reader callback and no futures, which is what a message per token needs.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import cast

import zmq

logger = logging.getLogger(__name__)

MESSAGES_PER_WAKEUP = 256  # then other callbacks of the loop get their turn


class ZmqPump:
    """Owns ``socket`` (not the context). ``on_message`` gets the frames of each message, in order.

    Create and use it on one event loop. After ``close`` nothing is delivered or sent.
    """

    def __init__(self, socket: zmq.Socket[bytes], on_message: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self._closed = False
        self._fd = cast(int, socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._read)
        self._look_again()

    def send(self, frames: list[bytes]) -> bool:
        """Queues a message; False when it cannot be queued (no room, or no such peer)."""
        if self._closed:
            return False
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=True)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise
            return False
        finally:
            if not self._scheduled and cast(int, self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._look_again()
        return True

    def close(self, linger_ms: int = 0) -> None:
        """Stops delivery and closes the socket; what was sent before gets ``linger_ms`` to leave."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=linger_ms)

    def _look_again(self) -> None:
        self._scheduled = True
        self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._scheduled = False
        for _ in range(MESSAGES_PER_WAKEUP):
            if self._closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._on_message(frames)
            except Exception:  # those behind it are read all the same: no signal would come for them
                logger.exception("handling a message of %d frames failed", len(frames))
        self._look_again()
