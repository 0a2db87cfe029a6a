"""The control connection of a pair of nodes: length-prefixed msgpack over TCP, apart from the data lanes.

Frame: ``length (4, big-endian) | version (1) | msgpack``. It is separate so that a lane can be closed by
force while aborts still flow. Both sides send heartbeats; silence is how a stopped process or a cut network
is found, because neither TCP nor UCX reports one in useful time.
"""

import asyncio
import contextlib
import logging
import struct
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from common.errors import ConfigError, TransferError
from kv_transfer.config import TransferConfig
from kv_transfer.metrics import TransferMetrics
from kv_transfer.protocol import PROTOCOL_VERSION, Heartbeat, Message

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("!I")
MAX_FRAME_BYTES = 64 * 1024 * 1024  # a carry of a few rows and a list of positions fit a thousand times over

M = TypeVar("M", bound=Message)


class ConnectionLost(TransferError):
    """The control connection ended or fell silent; the message says how."""


class VersionMismatch(ConnectionLost):
    """The peer speaks another protocol version; the message names both."""


class ControlConnection(Generic[M]):
    """Sends any message, yields typed ones. ``M`` is the union that this side receives."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decoder: "msgspec.msgpack.Decoder[M]",
        config: TransferConfig,
        metrics: TransferMetrics,
        renewals: Callable[[], tuple[str, ...]] = tuple,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder
        self._encoder = msgspec.msgpack.Encoder()
        self._config = config
        self._metrics = metrics
        self._renewals = renewals
        self._loop = asyncio.get_running_loop()
        self._last_heard = self._loop.time()
        self._beat: asyncio.Task[None] | None = None
        self._lost: ConnectionLost | None = None
        self.suspect = False  # silent for more than suspect_s, as the last heartbeat found
        peer = writer.get_extra_info("peername")
        self.peer = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else str(peer)

    def send(self, message: Message) -> None:
        """Queues a message; never blocks. After the loss of the connection it does nothing."""
        if self._writer.is_closing():
            return
        body = self._encoder.encode(message)
        self._writer.write(_LENGTH.pack(len(body) + 1) + bytes((PROTOCOL_VERSION,)) + body)

    async def receive(self) -> M:
        """The next message. Raises ConnectionLost (end, silence, garbage) or VersionMismatch."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if not 1 <= length <= MAX_FRAME_BYTES:
                raise ConnectionLost(f"{self.peer} sent a frame of {length} bytes: not Baton's protocol")
            frame = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, OSError) as error:
            raise self._lost or ConnectionLost(f"{self.peer} closed the connection") from error
        self._last_heard = self._loop.time()
        self.suspect = False
        if frame[0] != PROTOCOL_VERSION:
            raise VersionMismatch(
                f"{self.peer} speaks transfer protocol version {frame[0]}, this node {PROTOCOL_VERSION}; "
                "run the same Baton version on both"
            )
        try:
            return self._decoder.decode(memoryview(frame)[1:])
        except (msgspec.MsgspecError, ConfigError) as error:
            self._metrics.messages_unexpected += 1
            raise ConnectionLost(f"{self.peer} sent an undecodable message: {error}") from error

    def start_heartbeats(self) -> None:
        self._beat = self._loop.create_task(self._heartbeats())

    async def _heartbeats(self) -> None:
        while True:
            self.send(Heartbeat(renew=self._renewals()))
            slept_since = self._loop.time()
            await asyncio.sleep(self._config.heartbeat_s)
            # A loop that stood still could not hear either: that is not the peer's silence.
            overslept_s = self._loop.time() - slept_since - self._config.heartbeat_s
            if overslept_s > self._config.heartbeat_s:
                self._last_heard = min(self._last_heard + overslept_s, self._loop.time())
            silence_s = self._loop.time() - self._last_heard
            if silence_s > self._config.dead_s:
                self._lost = ConnectionLost(
                    f"{self.peer} was silent for {silence_s:.1f} s (dead_s {self._config.dead_s})"
                )
                logger.warning("KV transfer: %s", self._lost)
                self.abort()
                return
            if silence_s > self._config.suspect_s and not self.suspect:
                self.suspect = True
                self._metrics.peers_suspected += 1
                logger.warning("KV transfer: %s has been silent for %.1f s", self.peer, silence_s)

    def abort(self) -> None:
        """Ends the connection at once; a pending :meth:`receive` raises."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Flushes what was sent, then ends."""
        if self._beat is not None:
            self._beat.cancel()
            await asyncio.gather(self._beat, return_exceptions=True)
        self._writer.close()
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._writer.wait_closed()
        self._writer.transport.abort()
