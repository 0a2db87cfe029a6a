"""An in-process transport with faults that a test chooses, and blocks filled with a telling pattern.

``FakeTransport`` implements the real interface: messages match by tag, arrive in an order and after a delay
that a seeded random source picks, and may be damaged or cut off.
"""

import asyncio
import random
from collections.abc import Mapping

import numpy as np

from kv_transfer.plan import Bytes, GroupPool, KvPools
from kv_transfer.transport import Lane, Request, TransportError

BLOCK_SIZE = 16


def pattern(seed: int, group: int, position: int, num_bytes: int) -> Bytes:
    """What the block of ``position`` of transfer ``seed`` holds: no two blocks are alike."""
    rng = np.random.default_rng((seed, group, position))
    return rng.integers(0, 256, num_bytes, dtype=np.uint8)


def make_pools(num_blocks: int, block_bytes: tuple[int, ...] = (8192, 1024)) -> KvPools:
    return KvPools(tuple(GroupPool(np.zeros((num_blocks, n), np.uint8), BLOCK_SIZE) for n in block_bytes))


def fill(pools: KvPools, seed: int, blocks: Mapping[int, Mapping[int, int]]) -> None:
    for group, placed in blocks.items():
        pool = pools.groups[group]
        for position, block_id in placed.items():
            pool.array_NB[block_id] = pattern(seed, group, position, pool.block_bytes)


def holds_pattern(pools: KvPools, seed: int, group: int, position: int, block_id: int) -> bool:
    pool = pools.groups[group]
    return bool((pool.array_NB[block_id] == pattern(seed, group, position, pool.block_bytes)).all())


class FakeNetwork:
    """Joins the lanes of any number of FakeTransports."""

    def __init__(self, seed: int = 0, max_delay_s: float = 0.002) -> None:
        self.random = random.Random(seed)
        self.max_delay_s = max_delay_s
        self.damage_next = False  # flips a byte of the next message that has bytes
        self.frozen = False  # nothing arrives, as with a stopped peer
        self.receivers: dict[bytes, FakeLane] = {}
        self.bug: str | None = None  # "send" or "recv": the next such post raises, against its contract

    def raise_if_buggy(self, post: str) -> None:
        if self.bug == post:
            self.bug = None
            raise RuntimeError(f"a bug in post_{post}")


class FakeLane:
    transport = "fake"

    def __init__(self, network: FakeNetwork, token: bytes) -> None:
        self._network = network
        self._token = token
        self._closed = False
        self._posted: dict[int, tuple[memoryview, Request]] = {}
        self._sends: set[Request] = set()

    @property
    def num_pending(self) -> int:
        return len(self._posted) + len(self._sends)

    def post_send(self, tag: int, view: memoryview) -> Request:
        self._network.raise_if_buggy("send")
        request = Request()
        if self._closed:
            request.complete(TransportError("closed"))
            return request
        self._sends.add(request)
        request.add_done_callback(self._sends.discard)
        self._arrive_later(tag, view, request)
        return request

    def _arrive_later(self, tag: int, view: memoryview, request: Request) -> None:
        delay_s = self._network.random.uniform(0, self._network.max_delay_s)
        asyncio.get_running_loop().call_later(delay_s, self._arrive, tag, view, request)

    def _arrive(self, tag: int, view: memoryview, request: Request) -> None:
        if request.terminal:
            return
        if self._network.frozen:
            self._arrive_later(tag, view, request)
            return
        peer = self._network.receivers.get(self._token)
        posted = peer._posted.pop(tag, None) if peer is not None else None
        if posted is not None:
            target, received = posted
            target[: len(view)] = view
            if self._network.damage_next and len(view):
                self._network.damage_next = False
                target[len(view) // 2] ^= 0x40
            received.complete()
        request.complete(TransportError("peer is gone") if peer is None else None)

    def post_recv(self, tag: int, view: memoryview) -> Request:
        self._network.raise_if_buggy("recv")
        request = Request()
        if self._closed:
            request.complete(TransportError("closed"))
        else:
            assert tag not in self._posted, "a tag is posted once"
            self._posted[tag] = (view, request)
        return request

    async def fence(self, timeout_s: float) -> bool:
        self._closed = True
        self._network.receivers.pop(self._token, None)
        pending = [request for _, request in self._posted.values()] + list(self._sends)
        self._posted.clear()
        for request in pending:
            request.complete(TransportError("closed by force"))
        return True


class FakeTransport:
    name = "fake"

    def __init__(self, network: FakeNetwork) -> None:
        self.lanes: list[FakeLane] = []
        self._network = network

    async def start(self, host: str | None) -> None:
        return None

    @property
    def address(self) -> bytes:
        return b"here"

    async def connect(self, host: str, address: bytes, token: bytes) -> Lane:
        lane = FakeLane(self._network, token)
        self._network.receivers[token] = lane
        self.lanes.append(lane)
        return lane

    async def accept(self, address: bytes, token: bytes, timeout_s: float) -> Lane:
        lane = FakeLane(self._network, token)
        self.lanes.append(lane)
        return lane

    async def close(self) -> None:
        for lane in self.lanes:
            await lane.fence(1.0)
