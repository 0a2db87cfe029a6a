"""The node's end of the control channel: one DEALER per router address, used by both kinds of node.

Per address:  CONNECTING -> REGISTERED -> CONNECTING ...
    CONNECTING   `Register` goes out and is repeated until `Registered` or `RegisterRefused` comes.
    REGISTERED   a heartbeat every ``heartbeat_s``, each answered by the router.
                 `HeartbeatReply(known=False)` (the router restarted, or dropped us): register again.
                 Another router id, or silence for ``router_timeout_s``: that router is lost.
What belongs to a lost router must be aborted by the node (``on_router_lost``): nobody reads it any more.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec
import zmq

from common.errors import ConfigError
from common.messages import (
    Heartbeat,
    HeartbeatReply,
    Leave,
    NodeMessage,
    Register,
    Registered,
    RegisterRefused,
    RouterMessage,
    encoder,
    router_message_decoder,
)
from common.zmq_pump import ZmqPump

logger = logging.getLogger(__name__)

HEARTBEAT_S = 0.5
REGISTER_INTERVAL_S = 0.5
UNANSWERED_BEFORE_LOG = 20
ROUTER_TIMEOUT_S = 10.0
GOODBYE_LINGER_MS = 200
RECONNECT_MAX_MS = 1000
# A router that reads nothing for so many messages is as good as dead; its timeout says so soon after.
SEND_QUEUE_MESSAGES = 100_000

Handler = Callable[[str, RouterMessage], Awaitable[None]]


@dataclass(eq=False)
class _Link:
    address: str
    pump: ZmqPump
    router_id: str | None = None  # None: not registered
    last_heard_s: float = 0.0
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # registered, or lost: act at once


class ControlClient:
    """Keeps a node registered with every router and carries its messages.

    ``handler(router_id, message)`` is awaited for one message after another of each router, in their
    order; it must not wait for long. ``heartbeat()`` is called on the loop every ``heartbeat_s``.
    ``refused`` is a future that holds the reason once a router refuses the node for good.
    """

    def __init__(
        self,
        addresses: str,
        *,
        register: Register,
        heartbeat: Callable[[], Heartbeat],
        handler: Handler,
        on_router_lost: Callable[[str], None] | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        router_timeout_s: float = ROUTER_TIMEOUT_S,
    ) -> None:
        self._addresses = [a.strip() for a in addresses.split(",") if a.strip()]
        if not self._addresses:
            raise ConfigError("--router names no control address; expected tcp://host:port[,tcp://...]")
        self._register = register
        self._heartbeat = heartbeat
        self._handler = handler
        self._on_router_lost = on_router_lost
        self._heartbeat_s = heartbeat_s
        self._router_timeout_s = router_timeout_s
        self._links: list[_Link] = []
        self._inbox: asyncio.Queue[tuple[str, RouterMessage]] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._registered = asyncio.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self.num_dropped = 0  # messages to routers that are gone
        self.refused: asyncio.Future[str] | None = None

    def start(self) -> None:
        """Connects and begins to register; needs a running loop. Raises ConfigError for a bad address."""
        self.refused = asyncio.get_running_loop().create_future()
        self._context = zmq.Context()
        try:
            for address in self._addresses:
                self._links.append(self._connect(self._context, address))
        except ConfigError:
            for link in self._links:
                link.pump.close()
            self._context.term()
            raise
        self._tasks = [asyncio.create_task(self._dispatch(), name="control-dispatch")]
        self._tasks += [asyncio.create_task(self._keep(link), name="control-keep") for link in self._links]

    @property
    def router_ids(self) -> list[str]:
        """Routers that know this node now."""
        return [link.router_id for link in self._links if link.router_id is not None]

    async def wait_registered(self, timeout_s: float) -> bool:
        """Whether at least one router knew the node within ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._registered.wait()
        except TimeoutError:
            return False
        return True

    async def wait_refused(self) -> str:
        """Waits until a router refuses the node for good; returns the reason. Legal after ``start``."""
        assert self.refused is not None, "start() first"
        return await asyncio.shield(self.refused)

    def send(self, router_id: str, message: NodeMessage) -> bool:
        """Queues ``message`` for that router, in order, without waiting; False if the router is gone. One
        that leaves no room is given up: no stream goes on with a hole in it."""
        for link in self._links:
            if link.router_id == router_id:
                if link.pump.send([encoder.encode(message)]):
                    return True
                self._lose(link)
        self.num_dropped += 1
        return False

    async def close(self, *, goodbye: bool = True) -> None:
        """Says goodbye to every router and closes the sockets. Without ``goodbye`` routers find out by the
        missing heartbeats, as after a crash."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        leave = encoder.encode(Leave(self._register.node_id, self._register.epoch))
        for link in self._links:
            if goodbye and link.router_id is not None:
                link.pump.send([leave])
            link.pump.close(linger_ms=GOODBYE_LINGER_MS if goodbye else 0)
        if self._context is not None:
            await asyncio.to_thread(self._context.term)  # waits for the lingering goodbyes

    def _connect(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> _Link:
        socket = context.socket(zmq.DEALER)
        # The epoch makes the identity unique: a restarted node is never mistaken for its predecessor.
        socket.identity = f"{self._register.node_id}/{self._register.epoch}".encode()
        socket.set_hwm(SEND_QUEUE_MESSAGES)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.close()
            raise ConfigError(
                f"--router: {address!r} is no control address ({error}); expected tcp://host:port"
            ) from None
        link: _Link
        link = _Link(address, ZmqPump(socket, lambda frames: self._arrived(link, frames)))
        return link

    def _arrived(self, link: _Link, frames: list[bytes]) -> None:
        try:
            message = router_message_decoder.decode(frames[-1])
        except msgspec.DecodeError as error:
            logger.warning("undecodable message from the router at %s: %s", link.address, error)
            return
        link.last_heard_s = asyncio.get_running_loop().time()
        match message:
            case Registered(router_id):
                if link.router_id != router_id:
                    self._lose(link)
                    link.router_id = router_id
                    link.changed.set()
                    logger.info("registered with router %s at %s", router_id, link.address)
                self._registered.set()
            case RegisterRefused(reason):
                logger.error("the router at %s refused this node: %s", link.address, reason)
                if self.refused is not None and not self.refused.done():
                    self.refused.set_result(reason)
            case HeartbeatReply(router_id, known):
                if link.router_id is not None and not (known and router_id == link.router_id):
                    self._lose(link)
            case _ if link.router_id is not None:
                self._inbox.put_nowait((link.router_id, message))
            case _:
                self.num_dropped += 1  # from a router that forgot us; it aborts when we register again

    def _lose(self, link: _Link) -> None:
        if link.router_id is None:
            return
        lost, link.router_id = link.router_id, None
        link.changed.set()
        if not self.router_ids:
            self._registered.clear()
        logger.warning("router %s at %s is lost", lost, link.address)
        if self._on_router_lost is not None:
            self._on_router_lost(lost)

    async def _keep(self, link: _Link) -> None:
        loop = asyncio.get_running_loop()
        register = encoder.encode(self._register)
        unanswered = 0
        while self.refused is not None and not self.refused.done():
            if link.router_id is not None and loop.time() - link.last_heard_s > self._router_timeout_s:
                self._lose(link)
            link.changed.clear()
            if link.router_id is None:
                link.pump.send([register])
                unanswered += 1
                if unanswered % UNANSWERED_BEFORE_LOG == 0:
                    logger.warning("no router answers at %s; still trying", link.address)
                wait_s = REGISTER_INTERVAL_S
            else:
                self._beat(link)
                unanswered = 0
                wait_s = self._heartbeat_s
            slept_from = loop.time()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await link.changed.wait()
            # When this loop itself stood still, replies wait unread: the router is not to blame.
            link.last_heard_s += max(0.0, loop.time() - slept_from - wait_s)

    def _beat(self, link: _Link) -> None:
        try:
            heartbeat = self._heartbeat()
        except Exception:  # the link outlives it: the router hears nothing, and the log says why
            logger.exception("no heartbeat to %s: this node's figures failed", link.address)
            return
        link.pump.send([encoder.encode(heartbeat)])

    async def _dispatch(self) -> None:
        while True:
            router_id, message = await self._inbox.get()
            if router_id not in self.router_ids:
                self.num_dropped += 1  # lost since: what it has here was aborted, and nobody would abort this
                continue
            try:
                await self._handler(router_id, message)
            except Exception:
                logger.exception("handling %s failed", type(message).__name__)
