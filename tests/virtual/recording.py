"""Records what two nodes say to each other in a virtual world, for the picture in docs/kv-transfer.md.

Messages, chunks, states and calls are watched where the real code sends, receives and moves on; what a router
asks for and when a fault strikes is in `tests/virtual/stories.py`.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kv_transfer.config import TransferConfig
from kv_transfer.fetching import Fetch
from kv_transfer.protocol import (
    Abort,
    ChunkSent,
    Credit,
    Heartbeat,
    Machine,
    Message,
    Nak,
    PullOk,
    ReceiverState,
    SenderState,
    ToReceiver,
    ToSender,
)
from kv_transfer.sender import KvSender
from kv_transfer.transport import Request
from tests.virtual.lanes import FakeLane
from tests.virtual.nodes import DecodeNode, Plan, PrefillNode
from tests.virtual.sockets import Socket
from tests.virtual.world import World

CONFIG = TransferConfig(chunk_bytes=4 * 64, window_chunks=2)  # times are the defaults
_SEQ_MASK = (1 << 24) - 1

Watch = tuple[type, str, Callable[..., None]]  # class, method, who is told of its calls


@dataclass
class Arrow:
    """A message between the nodes. ``arrived`` is None for one that never did."""

    side: str  # of the sender: D or P
    label: str
    is_data: bool
    sent: int  # row
    arrived: int | None = None


@dataclass(frozen=True)
class Mark:
    """Something that happened on one side. kind: state | call | fault."""

    side: str
    kind: str
    text: str
    row: int


@dataclass
class Recording:
    """Rows are moments in order; what one side does at once shares a row. ``times``: seconds, by row."""

    title: str
    times: list[float] = field(default_factory=list)
    arrows: list[Arrow] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)


class Recorder:
    """One P, one D, and what passes between them while ``watching``."""

    def __init__(self, title: str) -> None:
        self.world = World(1)
        self.p = PrefillNode(self.world, "P", "host-p", CONFIG)
        self.d = DecodeNode(self.world, "D", "host-d", CONFIG)
        self.world.fabric.slow_s = 0.008
        self.world.pass_time(0.1)
        self.recording = Recording(title)
        self._began = self.world.now
        self._row: tuple[str, set[str]] = "", set()  # whose the last row is, and what it has already
        self._on_the_way: dict[Socket, deque[Arrow | None]] = {}
        self._chunks: dict[int, Arrow] = {}  # tag -> its bytes
        self._decoder = msgspec.msgpack.Decoder(ToSender | ToReceiver)
        self._told = 0

    # --- rows ---

    def _place(self, side: str, what: str) -> int:
        """The row for an arrow's end or a mark: a further one, unless this side has room in the last."""
        last_side, has = self._row
        times = self.recording.times
        now = self.world.now - self._began
        if last_side != side or what in has or "fault" in (what, *has) or now > times[-1] + 1e-6:
            times.append(now)
            self._row = side, set()
        self._row[1].add(what)
        return len(times) - 1

    def mark(self, side: str, kind: str, text: str) -> None:
        self.recording.marks.append(
            Mark(side, kind, text, self._place(side, "fault" if kind == "fault" else "mark"))
        )

    def _send(self, side: str, label: str, is_data: bool) -> Arrow:
        arrow = Arrow(side, label, is_data, self._place(side, "arrow"))
        self.recording.arrows.append(arrow)
        return arrow

    def _arrive(self, arrow: Arrow | None) -> None:
        if arrow is not None:
            arrow.arrived = self._place("P" if arrow.side == "D" else "D", "arrow")

    # --- what is watched ---

    @contextmanager
    def watching(self) -> Iterator[None]:
        before: list[Watch] = [
            (Socket, "write", self._frame_leaves),
            (Socket, "receive", self._frame_arrives),
            (FakeLane, "post_send", self._bytes_leave),
            (FakeLane, "fence", lambda lane, _s: self.mark(lane.process.name, "call", "lane.fence()")),
            (KvSender, "offer", lambda *_: self.mark("P", "call", "offer()")),
            (KvSender, "extend", lambda _s, _n, _b, upto: self.mark("P", "call", f"extend({upto})")),
            (KvSender, "finish", lambda *_: self.mark("P", "call", "finish()")),
            (DecodeNode, "_end", self._ended),
        ]
        after: list[Watch] = [
            (KvSender, "offer", lambda *_: self.mark("P", "state", SenderState.OFFERED.name)),
            (KvSender, "release", lambda *_: self.mark("P", "call", "on_released()")),
            (FakeLane, "post_recv", self._receive_posted),
            (Machine, "handle", self._state_changed),
            (Fetch, "_advance", self._progressed),
        ]
        try:
            with ExitStack() as stack:
                for owner, name, watch in before:
                    stack.enter_context(_around(owner, name, before=watch))
                for owner, name, watch in after:
                    stack.enter_context(_around(owner, name, after=watch))
                yield
        finally:
            self.world.end()  # unwatched

    def _frame_leaves(self, socket: Socket, frame: bytes) -> None:
        message = self._decoder.decode(memoryview(frame)[5:])
        quiet = isinstance(message, Heartbeat)
        arrow = None if quiet else self._send(socket.process.name, _label(message), False)
        self._on_the_way.setdefault(socket, deque()).append(arrow)

    def _frame_arrives(self, socket: Socket, frame: bytes | None) -> None:
        queue = self._on_the_way.get(socket.peer)
        if frame is not None and queue:
            self._arrive(queue.popleft())

    def _bytes_leave(self, lane: FakeLane, tag: int, view: memoryview) -> None:
        seq = tag & _SEQ_MASK
        if bytes(view) == lane.token:
            label = "probe"
        else:
            label = f"bytes of chunk {seq}" if len(view) else f"empty message {seq}"
        self._chunks[tag] = self._send(lane.process.name, label, True)

    def _receive_posted(self, _lane: FakeLane, tag: int, _view: memoryview, request: Request) -> None:
        def ended(request: Request) -> None:
            if request.error is None:
                self._arrive(self._chunks.get(tag))

        request.add_done_callback(ended)

    def _state_changed(self, machine: Machine[Any, Any], event: object, after: object) -> None:
        side = "P" if isinstance(after, SenderState) else "D"
        marks = [m for m in self.recording.marks if (m.side, m.kind) == (side, "state")]
        if not marks or marks[-1].text != machine.state.name:
            self.mark(side, "state", machine.state.name)

    def _progressed(self, fetch: Fetch, _upto: int, _result: object) -> None:
        if fetch.progress > self._told:
            self._told = fetch.progress
            self.mark("D", "call", f"on_progress({self._told})")

    def _ended(self, _node: DecodeNode, _name: str, what: str, reason: str, *_: object) -> None:
        text = "fetch() returns" if what == "committed" else f"fetch() raises: {reason.split(':')[0] or what}"
        self.mark("D", "call", text)

    # --- what a story does ---

    def began(self) -> None:
        """Time counts from now."""
        self._began, self._told = self.world.now, 0

    def transfer(self, plan: Plan, *, offered: bool = False) -> None:
        """D asks; P has offered just before (``offered``), or hears of the prompt a little later."""
        self.world.after(0.0 if offered else 0.06, lambda: self.p.process.spawn(self.p.prefill(plan)))
        self.world.pass_time(0.005)
        self.mark("D", "call", "fetch()")
        self.mark("D", "state", ReceiverState.CONNECTING.name)
        self.d.process.spawn(self.d.decode(plan, self.p.ticket(plan.name)))

    def until(self, condition: Callable[[], bool], limit_s: float = 30.0) -> None:
        assert self.world.run(condition, limit_s), "\n".join(self.world.story)


@contextmanager
def _around(
    owner: type,
    name: str,
    *,
    before: Callable[..., None] = lambda *_: None,
    after: Callable[..., None] = lambda *_: None,
) -> Iterator[None]:
    """Calls a watcher with each call's arguments before, or with its result too after the method."""
    original = getattr(owner, name)

    def watched(*args: Any) -> Any:
        before(*args)
        result = original(*args)
        after(*args, result)
        return result

    setattr(owner, name, watched)
    try:
        yield
    finally:
        setattr(owner, name, original)


def _label(message: Message) -> str:
    name = type(message).__name__
    match message:
        case Nak(attempt=-1, reason=reason):
            return f"{name}: {reason}"
        case Nak(code=code):
            return f"{name} {code.name}"
        case PullOk(num_chunks=count):
            return f"{name}, {count} chunks"
        case Credit(credits=count):
            return f"{name} {count}"
        case Abort(credits=count):
            return f"{name}, credits {count}"
        case ChunkSent(seq=seq):
            return f"{name} {seq}"
    return name
