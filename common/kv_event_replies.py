"""Answers the requests that readers of KV events send to a publisher's ROUTER socket.

    request  identity | empty | start_seq (8 bytes)     every batch kept with seq >= start_seq, one each:
    reply    identity | empty | topic | seq | payload   ... then  identity | empty | empty | -1 | empty
    request  identity | empty | "head"                  ours: identity | empty | "head" | Head
    request  identity | empty | "snapshot"              ours: identity | empty | "snapshot" | SnapshotPart ...

Replies are sent a few frames at a time and never wait for a reader, so that a long replay or a stuck
reader does not hold up the live stream, which the same thread sends.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import zmq

HEAD_REQUEST = b"head"
SNAPSHOT_REQUEST = b"snapshot"

IDLE_WAIT_S = 1.0  # longest sleep when no reply is under way; whatever arrives also wakes the thread
_BLOCKED_WAIT_S = 0.01  # before readers whose buffers are full are tried again
_FRAMES_PER_TURN = 32

Answer = Callable[[bytes], Iterable[list[bytes]] | None]
"""Request -> messages of the reply (without its address), or None if it is no known request."""


@dataclass
class ReplyStats:
    """Counters since start."""

    num_ignored_requests: int = 0  # malformed, unknown, or one too many at a time
    num_abandoned_replies: int = 0  # the reader left, or stopped reading


@dataclass
class _Reply:
    messages: Iterator[list[bytes]]
    deadline: float
    unsent: list[bytes] | None = None


class ReplyServer:
    """Owns no socket and no thread: ``accept`` and ``serve`` run on the thread that owns ``router``."""

    def __init__(
        self,
        router: zmq.Socket[bytes],
        answer: Answer,
        stats: ReplyStats,
        *,
        max_replies: int,
        reply_timeout_s: float,
    ) -> None:
        # A reader that is gone or full is an error to handle here, not a frame dropped in silence.
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router = router
        self._answer = answer
        self._max_replies = max_replies
        self._reply_timeout_s = reply_timeout_s
        self._replies: deque[_Reply] = deque()
        self._stats = stats

    def accept(self) -> None:
        """Take all requests that are waiting. Malformed ones and those beyond the bound get no reply:
        the reader's deadline tells it."""
        while self._router.poll(0):
            match self._router.recv_multipart(zmq.NOBLOCK):
                case [identity, b"", request] if len(self._replies) < self._max_replies:
                    messages = self._answer(request)
                case _:
                    messages = None
            if messages is None:
                self._stats.num_ignored_requests += 1
                continue
            addressed = _address(identity, messages)
            self._replies.append(_Reply(addressed, time.monotonic() + self._reply_timeout_s))

    def serve(self) -> float:
        """Send what can be sent of each reply's next messages; how long the thread may sleep now, in
        seconds."""
        any_sent = False
        for _ in range(len(self._replies)):
            reply = self._replies.popleft()
            for _ in range(_FRAMES_PER_TURN):
                if reply.unsent is None:
                    reply.unsent = next(reply.messages, None)
                if reply.unsent is None:
                    break  # all sent
                try:
                    self._router.send_multipart(reply.unsent, zmq.NOBLOCK)
                except zmq.Again:  # its buffer is full
                    if time.monotonic() < reply.deadline:
                        self._replies.append(reply)
                    else:
                        self._stats.num_abandoned_replies += 1
                    break
                except zmq.ZMQError:  # it is gone
                    self._stats.num_abandoned_replies += 1
                    break
                reply.unsent = None
                any_sent = True
            else:
                self._replies.append(reply)
        if not self._replies:
            return IDLE_WAIT_S
        return 0.0 if any_sent else _BLOCKED_WAIT_S


def _address(identity: bytes, messages: Iterable[list[bytes]]) -> Iterator[list[bytes]]:
    for message in messages:
        yield [identity, b"", *message]
