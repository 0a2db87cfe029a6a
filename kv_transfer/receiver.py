"""The decode node's end: fetches the blocks a ticket stands for into blocks that the caller has reserved.

``fetch`` owns the destination blocks from its call until it returns or raises. Success, failure and
cancellation all end the same way: nothing writes to a destination block any more - or, where that cannot be
reached within a deadline, the error names the blocks as quarantined and they stay with this receiver.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from common.errors import TransferError, TransferFailed
from common.kv_ticket import KVTicket
from kv_transfer.config import TransferConfig
from kv_transfer.fetching import Fetch
from kv_transfer.metrics import TransferMetrics
from kv_transfer.plan import KvPools
from kv_transfer.protocol import ReceiverState
from kv_transfer.receiver_session import ReceiverSession
from kv_transfer.transport import Lane, Transport, start_transports

logger = logging.getLogger(__name__)

# how often a session may be rebuilt because the peer turned out to be another process than the ticket's
_MAX_CONNECTS = 2


@dataclass(frozen=True)
class FetchResult:
    """``carry`` and ``extra`` are opaque here. ``num_bytes``: KV bytes received. ``seconds_moving``: time
    during which at least one announced chunk was on its way; ``seconds_waiting``: the rest (P computing,
    mostly)."""

    carry: bytes
    extra: bytes
    num_bytes: int
    seconds_waiting: float
    seconds_moving: float
    transport: str


@dataclass
class _Opening:
    """A session and the attempt to have it, which goes on for later fetches when earlier ones gave up."""

    started: float  # loop time
    reached: asyncio.Event = field(default_factory=asyncio.Event)  # the peer's host has answered
    task: "asyncio.Task[ReceiverSession]" = field(init=False)

    @property
    def is_usable(self) -> bool:
        """It stands, or may still come to."""
        task = self.task
        return not task.done() or (
            not task.cancelled() and task.exception() is None and task.result().lost is None
        )


class KvReceiver:
    """All methods must be called on one event loop."""

    def __init__(
        self,
        pools: KvPools,
        fingerprint: str | bytes,
        config: TransferConfig,
        *,
        engine_id: str | None = None,
        transports: Mapping[str, Transport] | None = None,
        on_quiet: Callable[[Mapping[int, tuple[int, ...]]], None] | None = None,
    ) -> None:
        """``on_quiet(blocks)``: blocks that a TransferFailed named as quarantined are the caller's again.
        ``transports``: already started ones, in place of those that ``config.transport`` names (tests)."""
        self.pools = pools
        self.fingerprint = fingerprint.hex() if isinstance(fingerprint, bytes) else fingerprint
        self.config = config
        self.engine_id = engine_id or uuid.uuid4().hex
        self.incarnation = uuid.uuid4().hex
        self.metrics = TransferMetrics()
        self.transports: dict[str, Transport] = dict(transports or {})
        self._starting = asyncio.Lock()
        self._on_quiet = on_quiet
        self._sessions: dict[tuple[str, int], _Opening] = {}
        self._fetches: set[asyncio.Task[FetchResult]] = set()
        self._last_attempt = 0
        # lanes that could not be fenced, and who goes on trying; they hold the buffers of quarantined blocks
        self._stuck_lanes: dict[Lane, asyncio.Task[None]] = {}
        self.quarantined: dict[int, set[int]] = {}  # group -> destination blocks that may still be written
        self._closed = False

    async def start(self) -> None:
        """Starts the transports now rather than at the first fetch. Raises TransportUnavailable when
        ``transport="ucx"`` cannot be had."""
        async with self._starting:
            if not self.transports:
                self.transports = await start_transports(self.config.transport, None)

    async def fetch(
        self,
        ticket: KVTicket,
        want: Mapping[int, Mapping[int, int]],
        cut: int,
        on_progress: Callable[[int], None] | None = None,
    ) -> FetchResult:
        """Receives ``want`` (group -> absolute block position -> local block id) and the carry.

        ``on_progress(upto)``: every wanted block below token position ``upto`` is in place and verified;
        called on the loop, with increasing values, and with ``cut`` before the return. An empty ``want``
        still fetches the carry and frees the prefill node. Raises TransferFailed (``final_upto``: the last
        progress) or IncompatiblePeer; cancellation propagates once the destination is quiet (TransferFailed
        if it cannot be).
        """
        if self._closed:
            raise TransferFailed("closed: this node is shutting down")
        fetch = Fetch(self, ticket, want, cut, on_progress)
        self.metrics.transfers_started += 1
        task = asyncio.get_running_loop().create_task(self._run(fetch))
        self._fetches.add(task)
        task.add_done_callback(self._fetches.discard)
        cancelled = False
        while not task.done():
            try:
                await asyncio.wait({task})
            except asyncio.CancelledError:
                # the inner task ends by fencing; however often we are cancelled, we leave only after that
                if not cancelled:
                    fetch.cancel("cancelled by the caller")
                cancelled = True
        error = None if task.cancelled() else task.exception()
        asyncio.get_running_loop().call_soon(fetch.caller_knows)
        if cancelled and not (isinstance(error, TransferFailed) and error.quarantined):
            raise asyncio.CancelledError
        return task.result()

    async def drop(self, ticket: KVTicket) -> None:
        """Tells the prefill node that nobody will fetch this; best effort (its lease ends otherwise)."""
        try:
            async with asyncio.timeout(self.config.connect_timeout_s):
                session = await self._session(ticket)
        except (TransferError, TimeoutError) as error:
            logger.info("transfer %s: drop was not delivered: %s", ticket.transfer_id, error)
            return
        session.send_drop(ticket)

    async def close(self) -> None:
        """Cancels every fetch (each fences), then closes connections and transports."""
        self._closed = True
        fetches = list(self._fetches)
        sessions = [opening.task for opening in self._sessions.values()]
        for task in sessions:
            if not task.done():
                task.cancel()
        await asyncio.gather(*sessions, return_exceptions=True)
        for task in sessions:
            if not task.cancelled() and task.exception() is None:
                await task.result().close("this node is shutting down")
        if fetches:
            await asyncio.wait(fetches)
        watches = list(self._stuck_lanes.values())
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        for transport in self.transports.values():
            await transport.close()

    # --- for fetches and sessions ---

    async def session(self, ticket: KVTicket) -> ReceiverSession:
        """The live session with the ticket's process, which was not silent lately: computing the prompt here
        is better than waiting for one that may be dead."""
        session = await self._session(ticket)
        if session.is_suspect:
            session.send_drop(ticket)
            raise TransferFailed(
                f"suspect: {ticket.host}:{ticket.port} has been silent for suspect_s "
                f"{self.config.suspect_s} s"
            )
        return session

    async def _session(self, ticket: KVTicket) -> ReceiverSession:
        """The live session with the ticket's process. One connection attempt serves all who wait for it."""
        await self.start()
        loop = asyncio.get_running_loop()
        key = (ticket.host, ticket.port)
        for connects_left in reversed(range(_MAX_CONNECTS)):
            opening = self._sessions.get(key)
            if opening is None or not opening.is_usable:
                opening = _Opening(loop.time())
                opening.task = loop.create_task(ReceiverSession.open(self, *key, opening.reached.set))
                opening.task.add_done_callback(_note_seen)
                self._sessions[key] = opening
            try:
                await self._wait_for_host(opening, ticket)
                # shielded: a caller that gives up must not break the connection for the others
                session = await asyncio.shield(opening.task)
            except asyncio.CancelledError:
                if not opening.task.cancelled():
                    raise
                raise TransferFailed("closed: this node is shutting down") from None
            reason = session.differs_from(ticket)
            if reason is None:
                return session
            if connects_left and not session.fetches:
                # perhaps it restarted and our connection to its predecessor has not noticed
                await session.close(reason)
                continue
            break
        raise TransferFailed(f"incarnation: {reason}")

    async def _wait_for_host(self, opening: _Opening, ticket: KVTicket) -> None:
        """A kernel answers at once however busy its processes are: where none does, the network is cut or
        the host is gone. The attempt goes on; the fetches that come meanwhile do not wait again."""
        loop = asyncio.get_running_loop()
        if opening.task.done() or opening.reached.is_set():
            return
        reached = loop.create_task(opening.reached.wait())
        left_s = opening.started + self.config.suspect_s - loop.time()
        try:
            await asyncio.wait(
                {opening.task, reached}, timeout=max(0.0, left_s), return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            reached.cancel()
        if not opening.task.done() and not opening.reached.is_set():
            raise TransferFailed(
                f"connect: {ticket.host}:{ticket.port} has not taken a connection within suspect_s "
                f"{self.config.suspect_s} s"
            )

    def new_attempt(self) -> int:
        """Never the same twice: what comes late for one fetch must not reach another."""
        self._last_attempt += 1
        return self._last_attempt

    def quarantine(self, blocks: Mapping[int, tuple[int, ...]], lane: Lane) -> None:
        """Receives into these blocks did not end. They stay out of use until they do, however long."""
        for group, ids in blocks.items():
            self.quarantined.setdefault(group, set()).update(ids)
            self.metrics.blocks_quarantined += len(ids)
            self.metrics.blocks_in_quarantine += len(ids)
        logger.error("KV transfer: blocks %s stay out of use: their receives do not end", dict(blocks))
        if lane not in self._stuck_lanes:
            watch = asyncio.get_running_loop().create_task(self._fence_on(lane))
            self._stuck_lanes[lane] = watch
            watch.add_done_callback(lambda _: self._stuck_lanes.pop(lane, None))

    async def _fence_on(self, lane: Lane) -> None:
        while not await lane.fence(0.0):
            await asyncio.sleep(self.config.heartbeat_s)

    def release_quarantine(self, group: int, blocks: tuple[int, ...]) -> None:
        """Their receives are terminal: the blocks are the caller's again."""
        self.quarantined[group].difference_update(blocks)
        if not self.quarantined[group]:
            del self.quarantined[group]
        self.metrics.blocks_in_quarantine -= len(blocks)
        if self._on_quiet is not None:
            self._on_quiet({group: blocks})

    async def _run(self, fetch: Fetch) -> FetchResult:
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            try:
                async with asyncio.timeout(self.config.fetch_timeout_s):
                    session = await fetch.unless_cancelled(self.session(fetch.ticket))
                    finish = await fetch.run(session)
            except TimeoutError as error:
                raise TransferFailed(
                    f"timeout: not complete within fetch_timeout_s {self.config.fetch_timeout_s} s"
                ) from error
        except BaseException as error:
            reason, state, failed = _reason_of(error), fetch.machine.state, loop.time()
            if isinstance(error, Exception) and not isinstance(error, TransferError):
                logger.exception("transfer %s broke", fetch.ticket.transfer_id)
            quarantined = await fetch.quiesce(reason)
            self._note_failure(fetch, reason, state, quarantined, failed - started, loop.time() - failed)
            if isinstance(error, TransferError) and not isinstance(error, TransferFailed):
                assert not quarantined, "nothing is posted before the session stands"
                raise
            if not isinstance(error, Exception):
                raise
            raise TransferFailed(reason, final_upto=fetch.progress, quarantined=quarantined) from error
        total_s = loop.time() - started
        self.metrics.transfers_committed += 1
        self.metrics.seconds_moving += fetch.seconds_moving
        self.metrics.seconds_waiting += total_s - fetch.seconds_moving
        return FetchResult(
            carry=finish.carry,
            extra=finish.extra,
            num_bytes=fetch.num_bytes,
            seconds_waiting=total_s - fetch.seconds_moving,
            seconds_moving=fetch.seconds_moving,
            transport=session.transport,
        )

    def _note_failure(
        self,
        fetch: Fetch,
        reason: str,
        state: ReceiverState,
        quarantined: Mapping[int, tuple[int, ...]],
        seconds: float,
        fence_seconds: float,
    ) -> None:
        """Counts the failure by the first words of ``reason`` and tells its story in one line. ``state``: in
        which it struck; ``seconds``: until then, ``fence_seconds``: from then on."""
        self.metrics.failures[reason.split(":")[0]] += 1
        ticket = fetch.ticket
        logger.warning(
            "transfer %s from %s:%d, attempt %d, failed in %s after %.3f s (%.3f s moving, fence %.3f s), "
            "%d of %d chunks and %d bytes (positions < %d kept, %d blocks in quarantine): %s",
            ticket.transfer_id, ticket.host, ticket.port, fetch.attempt, state.name, seconds,
            fetch.seconds_moving, fence_seconds, fetch.num_done, len(fetch.chunks), fetch.num_bytes,
            fetch.progress, sum(map(len, quarantined.values())), reason,
        )  # fmt: skip


def _reason_of(error: BaseException) -> str:
    """``kind: what happened``; the kind is what failures are counted by."""
    if isinstance(error, TransferFailed):
        return error.reason
    if isinstance(error, TransferError):
        return f"{type(error).__name__}: {error}"
    return f"internal: {error!r}"


def _note_seen(task: "asyncio.Task[ReceiverSession]") -> None:
    """A failed connection is reported to whoever waits; nobody may be left to."""
    if not task.cancelled():
        task.exception()
