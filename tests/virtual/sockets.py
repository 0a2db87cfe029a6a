"""Streams between virtual processes, under asyncio's own `open_connection` and `start_server`.

Bytes of one direction keep their order and take a random time. A write is one frame to the faults: frames may
come again later (`duplicate`), and a byte of a marked one may be flipped (`damage`); TCP would do neither.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.virtual.world import Process, World

Factory = Callable[[], asyncio.BaseProtocol]
_LOST_S = 0.2  # at most, until the death of a process is seen by its peers' kernels


class Server:
    """What `asyncio.start_server` returns, as far as it is used."""

    def __init__(
        self, network: "Network", process: "Process", factory: Factory, host: str, port: int
    ) -> None:
        self.process = process
        self.factory = factory
        self.sockets = (self,)
        self._network = network
        self._name = (host, port)

    def getsockname(self) -> tuple[str, int]:
        return self._name

    async def start_serving(self) -> None:
        return None

    def close(self) -> None:
        if self._network.servers.get(self._name) is self:
            del self._network.servers[self._name]

    async def wait_closed(self) -> None:
        return None


class Socket(asyncio.Transport):
    """One end of a connection. ``_sent``: frames on their way to the peer, None for the end of the stream."""

    peer: "Socket"

    def __init__(
        self, network: "Network", process: "Process", protocol: Any, peername: tuple[str, int]
    ) -> None:
        super().__init__({"peername": peername})
        self.process = process
        self.gone = False  # nothing comes in or goes out any more
        self._network = network
        self._world = network.world
        self._protocol = protocol
        self._closing = False
        self._sent: deque[bytes | None] = deque()
        self._moving = False

    def write(self, data: Any) -> None:
        if self._closing or self.gone:
            return
        network, frame = self._network, bytes(data)
        self._world.count_step()
        if network.damage is not None and network.damage in frame:
            at = frame.index(network.damage) + len(network.damage)
            frame = frame[:at] + bytes((frame[at] ^ 0x40,)) + frame[at + 1 :]
            network.damage, network.num_damaged = None, network.num_damaged + 1
        self._push(frame)
        if network.duplicate and self._world.random.random() < network.duplicate:
            network.num_duplicated += 1
            self._world.after(self._world.random.uniform(0, 0.3), self._push, frame)

    def _push(self, frame: bytes | None) -> None:
        if not self.gone:
            self._sent.append(frame)
            self._move()

    def _move(self) -> None:
        if not self._moving and self._sent:
            self._moving = True
            self._world.after(self._network.delay_s(), self._arrive)

    def _arrive(self) -> None:
        """The oldest frame is at the peer's kernel, unless the link is cut."""
        target = self.peer
        if not self._world.open(self.process, target.process) or target.process.silent:
            self._world.when_changed(self._arrive)
            return
        self._moving = False
        if not self._sent:
            return
        frame = self._sent.popleft()
        if target.gone or not target.process.alive:
            if self.process.alive and frame is not None:
                self._world.after(self._world.latency_s(), self.reset, target)
            return
        target.process.loop.deliver(target.receive, frame)
        self._move()

    def receive(self, frame: bytes | None) -> None:
        if self.gone or self._closing:
            return
        if frame is not None:
            self._protocol.data_received(frame)
        elif not self._protocol.eof_received():
            self.close()

    def reset(self, source: "Socket") -> None:
        """The peer's kernel knows this connection no more."""
        if self.gone or not self.process.alive:
            return
        if not self._world.open(source.process, self.process) or source.process.silent:
            self._world.when_changed(self.reset, source)
            return
        self.process.loop.deliver(self._lose, ConnectionResetError("reset by the peer"))

    def close(self) -> None:
        if self._closing or self.gone:
            return
        self._closing = True
        self._push(None)
        self.process.loop.call_soon(self._lose, None)

    def abort(self) -> None:
        """What was not delivered may be lost."""
        if self.gone:
            return
        self._closing = True
        if self._sent and self._world.random.random() < 0.5:
            self._sent.clear()
        self._push(None)
        self.process.loop.call_soon(self._lose, None)

    def _lose(self, error: Exception | None) -> None:
        if not self.gone:
            self.gone = self._closing = True
            self._network.sockets.pop(self, None)
            self._protocol.connection_lost(error)

    def is_closing(self) -> bool:
        return self._closing

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        """Frames are small here: the reader's limit is the protocol's business."""

    def resume_reading(self) -> None:
        pass

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol

    def get_protocol(self) -> Any:
        return self._protocol


class Network:
    def __init__(self, world: "World") -> None:
        self.world = world
        self.servers: dict[tuple[str, int], Server] = {}
        self.sockets: dict[Socket, None] = {}  # open ones of living processes
        self.slow_s = 0.0  # more delay for control frames, so that they come behind what lanes carry
        self.duplicate = 0.0  # share of frames that come twice
        self.damage: bytes | None = None  # flips the byte behind this mark, once
        self.num_duplicated = 0
        self.num_damaged = 0
        self._ports = 40000

    def delay_s(self) -> float:
        return self.world.latency_s() + (self.world.random.uniform(0, self.slow_s) if self.slow_s else 0.0)

    def listen(self, process: "Process", factory: Factory, host: str, port: int) -> Server:
        if port == 0:
            self._ports += 1
            port = self._ports
        old = self.servers.get((host, port))
        if old is not None and old.process.alive:
            raise OSError(f"{host}:{port} is taken")
        self.servers[host, port] = server = Server(self, process, factory, host, port)
        return server

    async def connect(
        self, process: "Process", factory: Factory, host: str, port: int
    ) -> tuple[Socket, asyncio.BaseProtocol]:
        opened: asyncio.Future[tuple[Socket, asyncio.BaseProtocol]] = process.loop.create_future()
        self.world.after(self.world.latency_s(), self._reach, process, factory, (host, port), opened)
        return await opened

    def _reach(
        self, process: "Process", factory: Factory, name: tuple[str, int], opened: "asyncio.Future[Any]"
    ) -> None:
        if opened.done() or not process.alive:
            return
        server = self.servers.get(name)
        target = server.process if server is not None else None
        if target is not None and (
            not self.world.open(process, target) or not self.world.open(target, process) or target.silent
        ):
            self.world.when_changed(self._reach, process, factory, name, opened)
            return
        if server is None or target is None or not target.alive:
            process.loop.deliver(_fail, opened, ConnectionRefusedError(f"{name[0]}:{name[1]} refused"))
            return
        ours, theirs = factory(), server.factory()
        near = Socket(self, process, ours, name)
        far = Socket(self, target, theirs, (process.host, 1))
        near.peer, far.peer = far, near
        self.sockets |= {near: None, far: None}
        # the kernel accepts, also for a stopped process
        target.loop.deliver(theirs.connection_made, far)
        process.loop.deliver(self._opened, opened, near, ours)

    def _opened(self, opened: "asyncio.Future[Any]", socket: Socket, protocol: asyncio.BaseProtocol) -> None:
        if opened.done():  # whoever waited left
            socket.abort()
            return
        protocol.connection_made(socket)
        opened.set_result((socket, protocol))

    def end(self) -> None:
        for socket in self.sockets:
            socket.gone = socket._closing = True

    def killed(self, process: "Process") -> None:
        for socket in [s for s in self.sockets if s.process is process]:
            del self.sockets[socket]
            socket.gone = socket._closing = True
            self.world.after(self.world.random.uniform(0, _LOST_S), socket.peer.reset, socket)


def _fail(future: "asyncio.Future[Any]", error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
