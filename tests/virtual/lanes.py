"""Lanes between virtual processes that behave as UCX was measured to.

Messages match by tag and move in pieces from the sender's memory, as it then is, into the receiver's. Neither
the cancellation of a task nor the closing of a lane stops pieces that are on their way: they land until the
request is terminal. A stopped peer or a cut link is reported to nobody. Small messages are eager: a copy is
sent.

Broken contracts are problems of the world: bytes that change under a send, a tag posted twice.
"""

import asyncio
from typing import TYPE_CHECKING

import numpy as np

from kv_transfer.transport import Lane, Request, TransportError

if TYPE_CHECKING:
    from tests.virtual.world import Process, World

EAGER_BYTES = 16
_LATE_S = 0.13  # at most, until what was in flight when a lane closed is terminal
_NOTICED_S = 1.0  # at most, until the end of a peer is noticed


def _span(view: memoryview) -> tuple[int, int]:
    """First and last + 1 address."""
    if not len(view):
        return 0, 0
    start = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return start, start + len(view)


class _Message:
    """One send, and the receive it was matched with."""

    def __init__(self, lane: "FakeLane", tag: int, view: memoryview, request: Request) -> None:
        self.lane = lane
        self.tag = tag
        self.request = request
        self.posted = bytes(view)  # what the view must hold until the send is terminal
        self.eager = len(view) <= EAGER_BYTES
        self.view = memoryview(self.posted) if self.eager else view
        self.target: memoryview | None = None
        self.received: Request | None = None
        self.num_moved = 0
        self.last_pieces: int | None = None  # the sender's process is dead: only these are still on their way

    @property
    def is_over(self) -> bool:
        ends = (None if self.eager else self.request, self.received)
        return any(end is not None and end.terminal for end in ends)


class FakeLane:
    transport = "fake"

    def __init__(self, fabric: "Fabric", process: "Process", token: bytes) -> None:
        self.process = process
        self.token = token
        self.broken: str | None = None
        self.pending: dict[Request, tuple[int, int]] = {}
        self.posted: dict[int, tuple[memoryview, Request]] = {}
        self.early: dict[int, _Message] = {}  # arrived before their receive was posted
        self._fabric = fabric
        self._world = fabric.world
        self._fencing = False
        self._quiet = asyncio.Event()

    # --- the interface ---

    def post_send(self, tag: int, view: memoryview) -> Request:
        self._fabric.raise_if_buggy("send")
        request = self._post(view)
        if not request.terminal:
            self._fabric.on_send(self, view)
            message = _Message(self, tag, view, request)
            if message.eager:
                self.process.loop.call_soon(request.complete)
            self._world.after(self._world.latency_s(), self._fabric.arrive, message)
        return request

    def post_recv(self, tag: int, view: memoryview) -> Request:
        self._fabric.raise_if_buggy("recv")
        request = self._post(view)
        if request.terminal:
            return request
        if (self.process.name, tag) in self._fabric.tags:
            self._world.problem(f"{self.process.name} posts tag {tag:x} again")
        self._fabric.tags.add((self.process.name, tag))
        self.posted[tag] = (view, request)
        message = self.early.pop(tag, None)
        if message is not None:
            self._fabric.match(message, self)
        return request

    async def fence(self, timeout_s: float) -> bool:
        if not self._fencing:
            self._fencing = True
            self.fail("closed by force")
            self._fabric.tell_peer(self, "the peer closed the lane")
        try:
            async with asyncio.timeout(timeout_s):
                await self._quiet.wait()
        except TimeoutError:
            return False
        return True

    # --- inside ---

    def _post(self, view: memoryview) -> Request:
        self._world.count_step()
        request = Request()
        if self.broken is not None:
            request.complete(TransportError(self.broken))
            return request
        self.pending[request] = _span(view)
        request.add_done_callback(self._ended)
        return request

    def _ended(self, request: Request) -> None:
        del self.pending[request]
        if self.broken is not None and not self.pending:
            self._quiet.set()

    def fail(self, reason: str) -> None:
        """The lane is unusable; what is pending ends in a while, and moves until then."""
        if self.broken is not None:
            return
        self.broken = reason
        if not self.pending:
            self._quiet.set()
        elif not self._fabric.stuck:
            self._world.after(self._world.random.uniform(0, _LATE_S), self.settle)
        else:
            self._fabric.stuck_lanes.append(self)

    def settle(self) -> None:
        """Everything pending becomes terminal, once the process can hear it."""
        for request in list(self.pending):
            self.process.loop.deliver(request.complete, TransportError(str(self.broken)))


class FakeTransport:
    """A process's end of the fabric. Connecting takes no time and proves nothing, as with UCX endpoints."""

    name = "fake"

    def __init__(self, process: "Process") -> None:
        self.lanes: list[FakeLane] = []
        self._process = process
        self._fabric = process.world.fabric

    async def start(self, host: str | None) -> None:
        return None

    @property
    def address(self) -> bytes:
        return self._process.name.encode()

    async def connect(self, host: str, address: bytes, token: bytes) -> Lane:
        lane = self._lane(token)
        self._fabric.receivers[token] = lane
        return lane

    async def accept(self, address: bytes, token: bytes, timeout_s: float) -> Lane:
        lane = self._lane(token)
        self._fabric.senders[token] = lane
        return lane

    def _lane(self, token: bytes) -> FakeLane:
        if self._fabric.lanes_refused > 0:
            self._fabric.lanes_refused -= 1
            raise TransportError("no endpoint today")
        lane = FakeLane(self._fabric, self._process, token)
        self.lanes.append(lane)
        return lane

    async def close(self) -> None:
        for lane in self.lanes:
            await lane.fence(1.0)


class Fabric:
    """Joins lanes by their token and moves what they carry."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.receivers: dict[bytes, FakeLane] = {}
        self.senders: dict[bytes, FakeLane] = {}
        self.tags: set[tuple[str, int]] = set()  # ever posted, by process
        self.moving: dict[_Message, None] = {}  # in order: a set of objects has none
        self.slow_s = 0.004  # at most, per piece
        self.reads_stopped = False  # pieces move out of a stopped sender, as with shared memory
        self.damage_next = False
        self.num_damaged = 0
        self.num_late_pieces = 0  # landed on a lane that was closed already
        self.stuck = False  # a lane that closes now does not become quiet
        self.stuck_lanes: list[FakeLane] = []
        self.lanes_refused = 0
        self.bug: str | None = None  # "send" or "recv": the next such post raises, against its contract

    def raise_if_buggy(self, post: str) -> None:
        if self.bug == post:
            self.bug = None
            raise RuntimeError(f"a bug in post_{post}")

    def on_send(self, lane: FakeLane, view: memoryview) -> None:
        """A test may look at what is sent, at the moment of posting."""

    def touches(self, start: int, end: int) -> bool:
        """Whether a request that is not terminal reads or writes there. For owners that free memory."""
        return any(
            first < end and start < last
            for lanes in (self.receivers, self.senders)
            for lane in lanes.values()
            if lane.process.alive
            for first, last in lane.pending.values()
        )

    def num_pending(self) -> int:
        lanes = list(self.receivers.values()) + list(self.senders.values())
        return sum(len(lane.pending) for lane in lanes if lane.process.alive)

    def unstick(self) -> None:
        self.stuck = False
        lanes, self.stuck_lanes = self.stuck_lanes, []
        for lane in lanes:
            lane.settle()

    def arrive(self, message: _Message) -> None:
        if not message.eager and message.request.terminal:
            return
        lane = self.receivers.get(message.lane.token)
        if lane is None or not lane.process.alive:
            if lane is not None:
                return
            self.world.when_changed(self.arrive, message)
        elif not self.world.open(message.lane.process, lane.process):
            self.world.when_changed(self.arrive, message)
        elif message.tag in lane.posted:
            self.match(message, lane)
        elif lane.broken is None:
            lane.early[message.tag] = message

    def match(self, message: _Message, lane: FakeLane) -> None:
        message.target, message.received = lane.posted.pop(message.tag)
        self.moving[message] = None
        self._move_on(message, lane)

    def _move_on(self, message: _Message, lane: FakeLane) -> None:
        self.world.after(self.world.random.uniform(0.0001, self.slow_s), self._piece, message, lane)

    def _piece(self, message: _Message, lane: FakeLane) -> None:
        if message.is_over or message.last_pieces == 0:
            self.moving.pop(message, None)
            return
        sender, receiver = message.lane.process, lane.process
        flows = self.world.open(sender, receiver) and receiver.running
        if not flows or (sender.stopped and not self.reads_stopped):
            self.world.when_changed(self._piece, message, lane)
            return
        if message.last_pieces is not None:
            message.last_pieces -= 1
        self._copy(message, lane)
        if message.num_moved < len(message.view):
            self._move_on(message, lane)
            return
        self.moving.pop(message, None)
        assert message.received is not None
        receiver.loop.deliver(message.received.complete)
        if not message.eager:
            self.world.after(self.world.latency_s(), self._acknowledge, message, lane)

    def _copy(self, message: _Message, lane: FakeLane) -> None:
        assert message.target is not None
        self.world.count_step()
        start, total = message.num_moved, len(message.view)
        end = total if message.eager else min(total, start + 1 + int(self.world.random.random() * total))
        message.num_moved = end
        if lane.broken is not None:
            self.num_late_pieces += 1
        if message.view[start:end] != message.posted[start:end]:
            self.world.problem(
                f"{message.lane.process.name}: bytes changed under a send, tag {message.tag:x}"
            )
        message.target[start:end] = message.view[start:end]
        if self.damage_next and end > start and not message.eager:
            self.damage_next, self.num_damaged = False, self.num_damaged + 1
            message.target[start] ^= 0x40

    def _acknowledge(self, message: _Message, lane: FakeLane) -> None:
        if not self.world.open(lane.process, message.lane.process):
            self.world.when_changed(self._acknowledge, message, lane)
        else:
            message.lane.process.loop.deliver(message.request.complete)

    # --- ends ---

    def tell_peer(self, lane: FakeLane, reason: str) -> None:
        for lanes, peers in ((self.receivers, self.senders), (self.senders, self.receivers)):
            if lanes.get(lane.token) is lane and lane.token in peers:
                delay_s = self.world.random.uniform(0.001, _NOTICED_S)
                self.world.after(delay_s, self._notice, lane, peers[lane.token], reason)

    def _notice(self, lane: FakeLane, peer: FakeLane, reason: str) -> None:
        if not peer.process.alive:
            return
        if not self.world.open(lane.process, peer.process) or lane.process.silent:
            self.world.when_changed(self._notice, lane, peer, reason)
        else:
            peer.process.loop.deliver(peer.fail, reason)

    def killed(self, process: "Process") -> None:
        for message in self.moving:
            if message.lane.process is process:  # what its kernel has still goes out
                message.last_pieces = int(self.world.random.random() * 2)
        for lanes in (self.receivers, self.senders):
            for lane in lanes.values():
                if lane.process is process:
                    self.tell_peer(lane, "the peer died")
