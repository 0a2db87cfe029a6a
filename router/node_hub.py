"""The router's end of the control channel: one ROUTER socket, the live nodes, and a leg per request.

A node lives as long as it is heard. One that falls silent, says goodbye or comes back under a new epoch
is dropped, and every leg on it fails at that moment. Every heartbeat is answered, unknown nodes are told
to register again: a restarted router finds its nodes within one heartbeat.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from types import TracebackType

import msgspec
import zmq

from common.errors import ConfigError, DeadlineExceeded, NodeFailed
from common.messages import (
    Abort,
    Accepted,
    DecodeRequest,
    Finished,
    Heartbeat,
    HeartbeatReply,
    Leave,
    PrefillRequest,
    Refused,
    Register,
    Registered,
    RegisterRefused,
    RouterMessage,
    TokenChunk,
    encoder,
    node_message_decoder,
)
from common.metrics import Metrics
from common.zmq_pump import ZmqPump
from router.registry import Node, make_node

logger = logging.getLogger(__name__)

SEND_QUEUE_MESSAGES = 100_000
SWEEPS_PER_TIMEOUT = 8
LET_GO = "was let go: the router stops"

Answer = Accepted | Refused | TokenChunk | Finished


class Leg:
    """One request on one node: what the node answers, in order, and the duty to abort what is left.

    Use as a context manager: leaving it aborts the request on the node unless the node has ended it.
    ``num_sequences`` ``Finished`` (or one ``Refused``) end it. A prefill's leg tells its ``onward`` leg the
    first token (hand-over `carry`), and the answer's end if that is it; its own end comes later.
    """

    def __init__(
        self,
        hub: "NodeHub",
        node: Node,
        request_id: str,
        num_sequences: int = 1,
        onward: "Leg | None" = None,
    ) -> None:
        self.node = node
        self.request_id = request_id
        self._hub = hub
        self._answers: deque[Answer] = deque()
        self._arrived = asyncio.Event()
        self.num_sequences = self._unfinished = num_sequences
        self._lost: str | None = None
        self._onward = onward
        self.begun = False  # its own node has told a token

    @property
    def ended(self) -> bool:
        """The node holds nothing for this request any more (or is gone itself)."""
        return self._unfinished <= 0 or self._lost is not None

    async def answer(self, timeout_s: float, waiting_for: str) -> Answer:
        """The node's next answer. Raises NodeFailed when the node is lost, DeadlineExceeded after
        ``timeout_s``; both say what was waited for."""
        if not self._answers:
            await self._wait(timeout_s, waiting_for)
        return self._answers.popleft()

    async def _wait(self, timeout_s: float, waiting_for: str) -> None:
        if self._lost is None:
            self._arrived.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._arrived.wait()
            except TimeoutError:
                raise DeadlineExceeded(
                    f"node {self.node.node_id} did not deliver {waiting_for} within {timeout_s:g} s"
                ) from None
        if not self._answers:
            raise NodeFailed(f"node {self.node.node_id} {self._lost} while waiting for {waiting_for}")

    def deliver(self, answer: Answer) -> None:
        match answer:
            case Finished() if self._onward is None or not answer.is_answer:
                self._unfinished -= 1
            case Refused():
                self._unfinished = 0
            case TokenChunk() | Finished() if self._onward is not None:
                self._onward.hear(answer)
            case TokenChunk():
                self.begun = True
        self._take(answer)

    def hear(self, answer: Answer) -> None:
        """What another node says of this request: moot once its own node has begun."""
        if not self.begun:
            self._take(answer)

    def _take(self, answer: Answer) -> None:
        self._answers.append(answer)
        self._arrived.set()

    def lose(self, how: str) -> None:
        if self._lost is None:
            self._lost = how
            self._arrived.set()

    def __enter__(self) -> "Leg":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.node.legs.pop(self.request_id, None)
        if not self.ended:
            self._hub.send(self.node, Abort(self.request_id))


class NodeHub:
    """Binds in ``start``; ``nodes`` are the live ones by name.

    ``refusal(register)`` says why a node may not join, None if it may. ``on_join``, ``on_leave`` and
    ``on_heartbeat`` are called on the loop.
    """

    def __init__(
        self,
        *,
        router_id: str,
        heartbeat_timeout_s: float,
        refusal: Callable[[Register], str | None],
        metrics: Metrics,
        on_join: Callable[[Node], None],
        on_leave: Callable[[Node], None],
        on_heartbeat: Callable[[Node], None],
    ) -> None:
        self.router_id = router_id
        self.nodes: dict[str, Node] = {}
        self._by_identity: dict[bytes, Node] = {}
        self._timeout_s = heartbeat_timeout_s
        self._refusal = refusal
        self._metrics = metrics
        self._on_join = on_join
        self._on_leave = on_leave
        self._on_heartbeat = on_heartbeat
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pump: ZmqPump | None = None
        self._sweeper: asyncio.Task[None] | None = None

    def start(self, host: str, port: int) -> int:
        """Binds the control port and returns it. Raises ConfigError when it is taken."""
        socket = self._context.socket(zmq.ROUTER)
        socket.set_hwm(SEND_QUEUE_MESSAGES)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an error instead of silence for a peer that is gone
        address = f"tcp://{host}:{port or '*'}"
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close()
            raise ConfigError(
                f"control port {port} on {host} cannot be had ({error}); choose another with --control-port"
            ) from None
        bound = int(socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0").rpartition(":")[2])
        self._pump = ZmqPump(socket, self._arrived)
        self._sweeper = asyncio.create_task(self._sweep(), name="node-sweeper")
        return bound

    async def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sweeper
        for node in list(self.nodes.values()):
            self._drop(node, LET_GO)
        if self._pump is not None:
            self._pump.close(linger_ms=200)
        await asyncio.to_thread(self._context.term)

    def open(self, node: Node, message: DecodeRequest | PrefillRequest, onward: Leg | None = None) -> Leg:
        """Sends a request to a node; the leg yields its answers. ``onward``: of a prefill, its decode leg."""
        num_sequences = message.n if isinstance(message, DecodeRequest) else 1
        leg = Leg(self, node, message.request_id, num_sequences, onward)
        node.legs[message.request_id] = leg
        if node.identity not in self._by_identity or not self.send(node, message):
            leg.lose("cannot be reached")
        return leg

    def send(self, node: Node, message: RouterMessage) -> bool:
        return self._send(node.identity, message)

    def _send(self, identity: bytes, message: RouterMessage) -> bool:
        assert self._pump is not None, "start() first"
        return self._pump.send([identity, encoder.encode(message)])

    def _arrived(self, frames: list[bytes]) -> None:
        identity = frames[0]
        try:
            message = node_message_decoder.decode(frames[-1])
        except msgspec.DecodeError as error:
            logger.warning("undecodable message from node %r: %s", identity[:80], error)
            return
        match message:
            case TokenChunk() | Accepted() | Refused() | Finished():
                self._deliver(identity, message)
            case Heartbeat():
                self._heartbeat(identity, message)
            case Register():
                self._register(identity, message)
            case Leave():
                node = self._by_identity.get(identity)
                if node is not None:
                    self._drop(node, "left")

    def _deliver(self, identity: bytes, answer: Answer) -> None:
        node = self._by_identity.get(identity)
        leg = node.legs.get(answer.request_id) if node is not None else None
        if node is None or leg is None:
            self._metrics.counter("router_unknown_messages").inc()
            return
        leg.deliver(answer)
        if leg.ended:  # a prefill's leg stays open for the whole answer: it must not count as load so long
            del node.legs[answer.request_id]

    def _heartbeat(self, identity: bytes, heartbeat: Heartbeat) -> None:
        node = self._by_identity.get(identity)
        self._send(identity, HeartbeatReply(self.router_id, node is not None))
        if node is not None:
            node.heard(heartbeat, asyncio.get_running_loop().time())
            self._on_heartbeat(node)

    def _register(self, identity: bytes, register: Register) -> None:
        known = self._by_identity.get(identity)
        if known is None:
            reason = self._refusal(register)
            if reason is not None:
                logger.error("node %s is refused: %s", register.node_id, reason)
                self._send(identity, RegisterRefused(reason))
                return
            predecessor = self.nodes.get(register.node_id)
            if predecessor is not None:
                self._drop(predecessor, "restarted")
            node = make_node(identity, register, asyncio.get_running_loop().time())
            self.nodes[register.node_id] = self._by_identity[identity] = node
            logger.info("node %s joins as %s", register.node_id, register.role)
            self._on_join(node)
        elif known.beats:
            # We were silent for so long that it gave us up, and everything that it had of ours.
            known.beats = False
            known.last_heard_s = asyncio.get_running_loop().time()
            logger.warning("node %s registers again; %d requests on it", known.node_id, len(known.legs))
            for leg in list(known.legs.values()):
                leg.lose("lost touch with this router")
        self._send(identity, Registered(self.router_id))

    def _drop(self, node: Node, how: str) -> None:
        if self._by_identity.pop(node.identity, None) is None:
            return
        if self.nodes.get(node.node_id) is node:
            del self.nodes[node.node_id]
        # Going without leaving anybody waiting is no cause for alarm.
        level = logging.WARNING if node.legs or how not in ("left", LET_GO) else logging.INFO
        logger.log(level, "node %s %s; %d requests on it", node.node_id, how, len(node.legs))
        self._metrics.counter("router_nodes_lost").inc()
        for leg in list(node.legs.values()):
            leg.lose(how)
        self._on_leave(node)

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        interval_s = self._timeout_s / SWEEPS_PER_TIMEOUT
        while True:
            slept_from = loop.time()
            await asyncio.sleep(interval_s)
            now = loop.time()
            # When this loop itself stood still, heartbeats wait unread in the socket: nobody is to blame.
            own_delay_s = now - slept_from - interval_s
            for node in list(self.nodes.values()):
                node.last_heard_s += own_delay_s
                if now - node.last_heard_s > self._timeout_s:
                    self._drop(node, f"was not heard for {self._timeout_s:g} s")
