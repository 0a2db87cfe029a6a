"""Prefill side, per decode node: one control connection, one data lane, and the attempts served over them."""

import asyncio
import logging
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from kv_transfer.control import ConnectionLost, ControlConnection, VersionMismatch
from kv_transfer.geometry import GroupMap, difference, group_maps
from kv_transfer.plan import plan_chunks, plan_digest
from kv_transfer.protocol import (
    MAX_CHUNKS,
    Abort,
    AbortAck,
    Commit,
    Credit,
    Drop,
    Heartbeat,
    Hello,
    LaneRefused,
    Nak,
    NakCode,
    OpenLane,
    Pull,
    PullOk,
    Refusal,
    Released,
    SenderEvent,
    SenderState,
    ToSender,
    Welcome,
)
from kv_transfer.serving import Offer, Serve
from kv_transfer.transport import Lane, TransportError

if TYPE_CHECKING:
    from kv_transfer.sender import KvSender

logger = logging.getLogger(__name__)

_RETRY_MS = 50  # a decode node asks again after this, or at once when the offer is made
_MAX_WANTED_BLOCKS = 1 << 22


class SenderSession:
    def __init__(self, sender: "KvSender", connection: ControlConnection[ToSender]) -> None:
        self.connection = connection
        self._sender = sender
        self._loop = asyncio.get_running_loop()
        self._lane: Lane | None = None
        self._lane_token = b""
        self._serves: dict[tuple[str, int], Serve] = {}
        self._hello: Hello | None = None
        self._maps: tuple[GroupMap, ...] = ()

    async def run(self) -> None:
        """Until the connection ends; afterwards nothing of it reads blocks any more."""
        connection = self.connection
        reason = "connection closed"
        try:
            async with asyncio.timeout(self._sender.config.connect_timeout_s):
                welcomed = self._greet(await connection.receive())
            if welcomed:
                connection.start_heartbeats()
                while True:
                    await self._handle(await connection.receive())
        except VersionMismatch as error:
            connection.send(Refusal(code="version", reason=str(error)))
            reason = str(error)
        except (ConnectionLost, TimeoutError) as error:
            reason = str(error) or "no Hello in time"
        except asyncio.CancelledError:
            reason = "node is closing"
        except Exception as error:  # heartbeats without anybody who listens would keep the reader waiting
            logger.exception("KV transfer: a message from %s could not be handled", connection.peer)
            reason = f"internal: {error!r}"
        if self._serves:
            logger.warning("KV transfer: reader %s is lost: %s", connection.peer, reason)
        await self.close_by_force(reason)

    def _greet(self, hello: ToSender) -> bool:
        """Compares who we are before anything else; a mismatch is a typed refusal naming both sides."""
        sender = self._sender
        if not isinstance(hello, Hello):
            return self._refuse("version", f"expected Hello, got {type(hello).__name__}")
        if hello.fingerprint != sender.fingerprint:
            return self._refuse(
                "fingerprint",
                f"prefill node {sender.engine_id} and decode node {hello.engine_id} differ: "
                f"{_differing(sender.fingerprint, hello.fingerprint)}",
            )
        differing = difference(sender.pools.geometry, hello.geometry)
        if differing is not None:
            return self._refuse(
                "geometry",
                f"KV of prefill node {sender.engine_id} does not fit decode node {hello.engine_id}: "
                f"{differing}",
            )
        common = tuple(name for name in sender.transports if name in hello.transports)
        if not common:
            return self._refuse(
                "transport",
                f"no transport in common: prefill node {sender.engine_id} has {tuple(sender.transports)}, "
                f"decode node {hello.engine_id} has {hello.transports}",
            )
        self._hello = hello
        self._maps = group_maps(sender.pools.geometry, hello.geometry)
        self.connection.send(
            Welcome(
                engine_id=sender.engine_id,
                incarnation=sender.incarnation,
                geometry=sender.pools.geometry,
                transports=common,
                addresses={name: sender.transports[name].address for name in common},
            )
        )
        return True

    def _refuse(self, code: str, reason: str) -> bool:
        logger.warning("KV transfer refused to %s: %s", self.connection.peer, reason)
        self._sender.metrics.failures[f"refused_{code}"] += 1
        self.connection.send(Refusal(code=code, reason=reason))
        return False

    async def _handle(self, message: ToSender) -> None:
        match message:
            case Heartbeat(renew=renew):
                self._sender.renew(renew)
            case OpenLane():
                await self._open_lane(message)
            case Pull():
                self._on_pull(message)
            case Credit(transfer_id=transfer_id, attempt=attempt, credits=credits):
                serve = self._serves.get((transfer_id, attempt))
                if serve is None or serve.aborted:
                    self._sender.metrics.messages_unexpected += 1
                    return
                serve.credits = max(serve.credits, credits)
                if self._live(serve):
                    serve.offer.touch(self._loop.time())
                serve.pump()
            case Commit(transfer_id=transfer_id, attempt=attempt):
                serve = self._serves.pop((transfer_id, attempt), None)
                if serve is None or serve.offer.machine.state is not SenderState.FINISHED:
                    self._sender.metrics.messages_unexpected += 1
                else:
                    self._sender.stop(serve.offer, SenderEvent.COMMIT, "committed")
                self.connection.send(Released(transfer_id=transfer_id, attempt=attempt))
            case Abort():
                self._on_abort(message)
            case Drop(transfer_id=transfer_id, generation=generation, reason=reason):
                self._sender.drop(transfer_id, generation, reason)
            case Hello():
                raise ConnectionLost(f"{self.connection.peer} said Hello twice")

    def _live(self, serve: Serve) -> bool:
        return serve.offer.machine.state in (SenderState.SENDING, SenderState.FINISHED) and (
            self._loop.time() < serve.offer.deadline
        )

    # --- lanes ---

    async def _open_lane(self, request: OpenLane) -> None:
        """A second lane replaces the first: D found the first one unusable."""
        sender, hello = self._sender, self._hello
        assert hello is not None
        if request.token == self._lane_token:  # heard before: the lane it asked for is in use
            sender.metrics.messages_unexpected += 1
            return
        self._lane_token = request.token
        transport = sender.transports.get(request.transport)
        try:
            if transport is None:
                raise TransportError(f"transport {request.transport!r} is not offered here")
            if self._lane is not None:
                await self._lane.fence(sender.config.dead_s)
            address = hello.addresses.get(request.transport, b"")
            self._lane = await transport.accept(address, request.token, sender.config.connect_timeout_s)
        except TransportError as error:
            logger.warning(
                "KV transfer: no %s lane to %s: %s", request.transport, self.connection.peer, error
            )
            self.connection.send(LaneRefused(token=request.token, reason=str(error)))
            return
        sender.metrics.transports[request.transport] += 1
        self._lane.post_send(request.probe_tag, memoryview(request.token))

    # --- transfers ---

    def _on_pull(self, pull: Pull) -> None:
        nak = self._check_pull(pull)
        if nak is not None:
            code, reason = nak
            retry_ms = _RETRY_MS if code in (NakCode.UNKNOWN, NakCode.BUSY) else 0
            if code is NakCode.UNKNOWN:
                self._sender.remember_asker(pull.transfer_id, self)
            self._nak(pull.transfer_id, pull.attempt, code, reason, retry_ms)
            return
        sender, lane, hello = self._sender, self._lane, self._hello
        offer = sender.find(pull.transfer_id)
        assert offer is not None
        assert lane is not None
        assert hello is not None
        chunks = plan_chunks(pull.want, hello.geometry, pull.chunk_bytes)
        serve = Serve(
            offer,
            pull.attempt,
            pull.tag_base,
            chunks,
            sender.pools,
            self._maps,
            lane,
            self.connection.send,
            self._stop,
            self._settled,
            self._loop.time,
            sender.metrics,
            sender.config.checksum,
        )
        offer.machine.handle(SenderEvent.PULL)
        offer.serve = serve
        offer.touch(self._loop.time())
        self._serves[pull.transfer_id, pull.attempt] = serve
        sender.metrics.transfers_started += 1
        self.connection.send(
            PullOk(
                transfer_id=pull.transfer_id,
                attempt=pull.attempt,
                num_chunks=len(chunks),
                plan_digest=plan_digest(chunks),
            )
        )
        serve.pump()

    def _check_pull(self, pull: Pull) -> tuple[NakCode, str] | None:
        """Why this pull cannot be served, if it cannot."""
        sender = self._sender
        if pull.incarnation not in ("", sender.incarnation):
            return NakCode.INCARNATION, (
                f"the ticket is of {pull.incarnation}, this node has restarted as {sender.incarnation}"
            )
        offer = sender.find(pull.transfer_id)
        if offer is None:
            why = sender.why_over(pull.transfer_id)
            if why is None:
                return NakCode.UNKNOWN, "not offered yet"
            if why == "lease_expired":
                return NakCode.EXPIRED, "the lease ended before the blocks were asked for"
            return NakCode.GONE, f"the hold is over: {why}"
        if pull.generation not in (0, offer.generation):
            return NakCode.GENERATION, (
                f"the ticket is of generation {pull.generation}, the blocks are held for {offer.generation}"
            )
        if offer.machine.state is not SenderState.OFFERED:
            if offer.machine.state is SenderState.DRAINING:
                return NakCode.GONE, f"the hold is over: {offer.reason}"
            return NakCode.BUSY, "another attempt is being served"
        if self._loop.time() >= offer.deadline:
            sender.stop(offer, SenderEvent.EXPIRE, "lease_expired")
            return NakCode.EXPIRED, "the lease ended before the blocks were asked for"
        if self._lane is None:
            return NakCode.BAD_REQUEST, "no data lane is open"
        return self._check_want(pull)

    def _check_want(self, pull: Pull) -> tuple[NakCode, str] | None:
        num_groups = len(self._sender.pools.groups)
        total = 0
        for group, positions in pull.want.items():
            if not 0 <= group < num_groups:
                return NakCode.BAD_REQUEST, f"KV group {group} does not exist; there are {num_groups}"
            if any(b <= a for a, b in pairwise(positions)) or (positions and positions[0] < 0):
                return NakCode.BAD_REQUEST, f"positions of group {group} are not ascending"
            total += len(positions)
        if total > min(_MAX_WANTED_BLOCKS, MAX_CHUNKS) or pull.chunk_bytes < 1:
            return (
                NakCode.BAD_REQUEST,
                f"{total} blocks in chunks of {pull.chunk_bytes} bytes is out of range",
            )
        return None

    def _nak(self, transfer_id: str, attempt: int, code: NakCode, reason: str, retry_ms: int) -> None:
        self._sender.metrics.failures[f"nak_{code.value}"] += 1
        self.connection.send(
            Nak(transfer_id=transfer_id, attempt=attempt, code=code, reason=reason, retry_ms=retry_ms)
        )

    def tell_offered(self, transfer_id: str) -> None:
        """D asked too early and waits; attempt -1 means "whatever you asked last"."""
        self.connection.send(
            Nak(transfer_id=transfer_id, attempt=-1, code=NakCode.UNKNOWN, reason="offered now", retry_ms=0)
        )

    def _on_abort(self, abort: Abort) -> None:
        serve = self._serves.get((abort.transfer_id, abort.attempt))
        if serve is None:
            self._sender.drop(abort.transfer_id, abort.generation, abort.reason)
            self.connection.send(AbortAck(transfer_id=abort.transfer_id, attempt=abort.attempt))
            return
        if serve.aborted:
            self._sender.metrics.messages_unexpected += 1
            return
        if serve.offer.machine.allows(SenderEvent.ABORT):
            self._sender.stop(serve.offer, SenderEvent.ABORT, abort.reason)
        serve.abort(abort.credits)

    def _stop(self, offer: Offer, event: SenderEvent, reason: str) -> None:
        self._sender.stop(offer, event, reason)

    def _settled(self, serve: Serve) -> None:
        """A send ended, or an abort was taken in."""
        offer = serve.offer
        if offer.machine.state is SenderState.DRAINING and offer.serve is serve and serve.num_reading == 0:
            self._sender.release(offer)
        key = (serve.transfer_id, serve.attempt)
        if serve.aborted and serve.num_pending == 0 and self._serves.pop(key, None) is not None:
            serve.acknowledge_abort()

    def serves_offer(self, offer: Offer) -> bool:
        return any(serve.offer is offer for serve in self._serves.values())

    async def close_by_force(self, reason: str) -> None:
        """Ends the connection and the lane; offers being read end as ``peer_lost``."""
        for serve in list(self._serves.values()):
            if serve.offer.machine.allows(SenderEvent.PEER_LOST):
                self._sender.metrics.peers_lost += 1
                self._sender.stop(serve.offer, SenderEvent.PEER_LOST, f"peer_lost: {reason}")
        lane, self._lane = self._lane, None
        await self.connection.close()
        if lane is not None and not await lane.fence(self._sender.config.dead_s):
            logger.error("KV transfer: sends to %s do not end; their blocks stay held", self.connection.peer)
        self._serves.clear()


def _differing(mine: str, theirs: str) -> str:
    """The fields in which two fingerprints differ, P's value first; all of both where they have no fields."""
    try:
        a, b = (msgspec.json.decode(text, type=dict[str, str]) for text in (mine, theirs))
    except msgspec.MsgspecError:
        return f"one has {mine}, the other has {theirs}"
    names = sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))
    return "; ".join(f"{name} is {a.get(name)!r} and {b.get(name)!r}" for name in names)
