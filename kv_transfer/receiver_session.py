"""Decode side, per prefill node: one control connection, one data lane, and the fetches that share them."""

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from common.errors import IncompatiblePeer, TransferFailed
from common.kv_ticket import KVTicket
from kv_transfer.control import ConnectionLost, ControlConnection, VersionMismatch
from kv_transfer.geometry import GroupMap, group_maps
from kv_transfer.protocol import (
    AbortAck,
    ChunkSent,
    Drop,
    Failed,
    Finish,
    Heartbeat,
    Hello,
    LaneRefused,
    Message,
    Nak,
    OpenLane,
    PullOk,
    Refusal,
    Released,
    ToReceiver,
    Welcome,
    tag_base,
)
from kv_transfer.tcp import TOKEN_BYTES
from kv_transfer.transport import Lane, TransportError

if TYPE_CHECKING:
    from kv_transfer.fetching import Fetch
    from kv_transfer.receiver import KvReceiver

logger = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 10.0  # for the first message over a new lane, before the next transport is tried
_FINGERPRINT_CODES = frozenset({"fingerprint", "geometry", "version"})


class ReceiverSession:
    """Made by :meth:`open`; dead for good once ``lost`` is set."""

    lane: Lane
    transport: str
    maps: tuple[GroupMap, ...]  # by group: from the prefill node's blocks to ours

    def __init__(self, receiver: "KvReceiver", connection: ControlConnection[ToReceiver], name: str) -> None:
        self.fetches: dict[tuple[str, int], Fetch] = {}
        self.lost: str | None = None
        self.lost_event = asyncio.Event()
        self._receiver = receiver
        self._connection = connection
        self._name = name
        self._welcome: Welcome | None = None
        self._reader: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._refused: dict[bytes, str] = {}
        self._counted = False  # in `sessions_open`: one that is lost while it opens never was

    @classmethod
    async def open(
        cls, receiver: "KvReceiver", host: str, port: int, reached: Callable[[], None]
    ) -> "ReceiverSession":
        """Connects (then calls ``reached``), compares fingerprints and opens a lane. Raises IncompatiblePeer
        or TransferFailed."""
        config = receiver.config
        try:
            async with asyncio.timeout(config.connect_timeout_s):
                reader, writer = await asyncio.open_connection(host, port)
                reached()
                session: ReceiverSession
                decoder = msgspec.msgpack.Decoder[ToReceiver](ToReceiver)
                connection = ControlConnection[ToReceiver](
                    reader, writer, decoder, config, receiver.metrics, lambda: session.renewals()
                )
                session = cls(receiver, connection, f"{host}:{port}")
                try:
                    await session._greet()
                    connection.start_heartbeats()
                    session._reader = asyncio.get_running_loop().create_task(session._read())
                    await session._open_lane(host)
                except BaseException:
                    await session._shut("could not be opened")
                    raise
        except TimeoutError as error:
            raise TransferFailed(
                f"connect: prefill node {host}:{port} did not answer within connect_timeout_s "
                f"{config.connect_timeout_s} s"
            ) from error
        except (TransferFailed, IncompatiblePeer):
            raise
        except VersionMismatch as error:
            raise IncompatiblePeer(str(error)) from error
        except (OSError, ConnectionLost, TransportError) as error:
            raise TransferFailed(f"connect: no session with prefill node {host}:{port}: {error}") from error
        except Exception as error:
            logger.exception("KV transfer: opening a session with %s:%d broke", host, port)
            raise TransferFailed(f"internal: no session with {host}:{port}: {error!r}") from error
        if session.lost is None:
            session._counted = True
            receiver.metrics.sessions_open += 1
        return session

    async def _greet(self) -> None:
        receiver = self._receiver
        self._connection.send(
            Hello(
                engine_id=receiver.engine_id,
                incarnation=receiver.incarnation,
                fingerprint=receiver.fingerprint,
                geometry=receiver.pools.geometry,
                transports=tuple(receiver.transports),
                addresses={name: t.address for name, t in receiver.transports.items()},
            )
        )
        answer = await self._connection.receive()
        if isinstance(answer, Refusal):
            if answer.code in _FINGERPRINT_CODES:
                raise IncompatiblePeer(answer.reason)
            raise TransferFailed(f"refused: {answer.reason}")
        if not isinstance(answer, Welcome):
            raise ConnectionLost(f"{self._name} answered Hello with {type(answer).__name__}")
        self._welcome = answer
        self.maps = group_maps(answer.geometry, receiver.pools.geometry)

    async def _open_lane(self, host: str) -> None:
        """The first transport over which a probe message really arrives."""
        welcome = self._welcome
        assert welcome is not None
        problems: list[str] = []
        for name in welcome.transports:
            token = secrets.token_bytes(TOKEN_BYTES)
            try:
                lane = await self._receiver.transports[name].connect(host, welcome.addresses[name], token)
            except TransportError as error:
                problems.append(f"{name}: {error}")
                continue
            try:
                await self._probe(lane, name, token)
            except TransportError as error:
                await lane.fence(_PROBE_TIMEOUT_S)
                problems.append(f"{name}: {error}")
                logger.warning("KV transfer: no %s lane to %s (%s); trying the next", name, self._name, error)
                continue
            except BaseException:
                await lane.fence(_PROBE_TIMEOUT_S)
                raise
            self.lane, self.transport = lane, name
            self._receiver.metrics.transports[name] += 1
            logger.info("KV transfer: lane to %s over %s", self._name, name)
            return
        raise TransportError(f"no transport works: {'; '.join(problems)}")

    async def _probe(self, lane: Lane, name: str, token: bytes) -> None:
        buffer = bytearray(TOKEN_BYTES)
        tag = tag_base(self._receiver.new_attempt())
        arrived = asyncio.Event()
        request = lane.post_recv(tag, memoryview(buffer))
        request.add_done_callback(lambda _: arrived.set())
        self._connection.send(OpenLane(transport=name, token=token, probe_tag=tag))
        deadline = asyncio.get_running_loop().time() + min(
            _PROBE_TIMEOUT_S, self._receiver.config.connect_timeout_s / 2
        )
        while not arrived.is_set():
            if self.lost is not None:
                raise ConnectionLost(self.lost)
            if token in self._refused:
                raise TransportError(self._refused.pop(token))
            left_s = deadline - asyncio.get_running_loop().time()
            if left_s <= 0:
                raise TransportError("the probe message did not arrive")
            waits = {
                asyncio.ensure_future(arrived.wait()),
                asyncio.ensure_future(self.lost_event.wait()),
            }
            await asyncio.wait(waits, timeout=min(left_s, 0.1), return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        if request.error is not None:
            raise TransportError(str(request.error))
        if bytes(buffer) != token:
            raise TransportError("the probe message is wrong")

    async def _read(self) -> None:
        try:
            while True:
                self._dispatch(await self._connection.receive())
        except ConnectionLost as error:
            self._receiver.metrics.peers_lost += 1
            self._begin_close(str(error))
        except Exception as error:  # without its reader a session would look alive, and serve nobody
            logger.exception("KV transfer: a message from %s could not be handled", self._name)
            self._begin_close(f"internal: {error!r}")

    def _dispatch(self, message: ToReceiver) -> None:
        match message:
            case Heartbeat():
                return
            case LaneRefused(token=token, reason=reason):
                self._refused[token] = reason
            case Nak(transfer_id=transfer_id, attempt=-1):
                for key, fetch in list(self.fetches.items()):
                    if key[0] == transfer_id:
                        fetch.handle(message)
            case Nak() | PullOk() | ChunkSent() | Finish() | Failed() | Released() | AbortAck():
                fetch_ = self.fetches.get((message.transfer_id, message.attempt))
                if fetch_ is not None:
                    fetch_.handle(message)
                elif not isinstance(message, Released | AbortAck):
                    self._receiver.metrics.messages_unexpected += 1
            case Welcome() | Refusal():
                self._receiver.metrics.messages_unexpected += 1

    # --- for fetches ---

    def renewals(self) -> tuple[str, ...]:
        return tuple(transfer_id for transfer_id, _ in self.fetches)

    @property
    def is_suspect(self) -> bool:
        return self._connection.suspect

    def send(self, message: Message) -> None:
        self._connection.send(message)

    def send_drop(self, ticket: KVTicket) -> None:
        self.send(
            Drop(transfer_id=ticket.transfer_id, generation=ticket.generation, reason="dropped by the reader")
        )

    def differs_from(self, ticket: KVTicket) -> str | None:
        """Why this session's process is not the one that the ticket is of, if so."""
        welcome = self._welcome
        assert welcome is not None
        if ticket.engine_id and welcome.engine_id != ticket.engine_id:
            return f"{self._name} is engine {welcome.engine_id}, the ticket is of engine {ticket.engine_id}"
        if ticket.incarnation and welcome.incarnation != ticket.incarnation:
            return (
                f"{self._name} restarted: it is {welcome.incarnation}, the ticket is of {ticket.incarnation}"
            )
        return None

    def lane_broke(self, reason: str) -> None:
        """The lane serves nobody any more: the next fetch gets a new session, though the peer still talks."""
        self._begin_close(reason)

    async def close(self, reason: str) -> None:
        """Ends the session: its fetches fail, its lane is fenced. Returns when that is done; repeatable."""
        self._begin_close(reason)
        assert self._closing is not None
        await asyncio.shield(self._closing)

    def _begin_close(self, reason: str) -> None:
        if self._closing is not None:
            return
        self.lost = reason
        self.lost_event.set()
        for fetch in list(self.fetches.values()):
            fetch.fail(f"peer_lost: {reason}")
        self._receiver.metrics.sessions_open -= self._counted
        self._closing = asyncio.get_running_loop().create_task(self._shut(reason))

    async def _shut(self, reason: str) -> None:
        self.lost = self.lost or reason
        self.lost_event.set()
        await self._connection.close()
        if self._reader is not None and self._reader is not asyncio.current_task():
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        if hasattr(self, "lane"):
            await self.lane.fence(self._receiver.config.dead_s)
