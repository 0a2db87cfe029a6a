"""The prefill node's end: offers prompts' blocks under leases and serves decode nodes that ask for them.

    offer() -> extend()* -> finish()          from the node, as the prompt is computed
    PULL, CREDIT*, COMMIT | ABORT             from a decode node, in any order relative to the above
    on_released(transfer_id, reason)          exactly once per offer: the blocks are the engine's again

A hold ends at the commit, at an abort or drop, when the lease ends or when the reader dies, whichever is
first, and never before the last send that reads the blocks has ended.
"""

import asyncio
import logging
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping

import msgspec

from common.kv_ticket import KVTicket
from kv_transfer.config import TransferConfig
from kv_transfer.control import ControlConnection
from kv_transfer.metrics import TransferMetrics
from kv_transfer.plan import KvPools
from kv_transfer.protocol import SenderEvent, SenderState, ToSender
from kv_transfer.sender_session import SenderSession
from kv_transfer.serving import Offer, Serve
from kv_transfer.transport import Transport, start_transports

logger = logging.getLogger(__name__)

_REMEMBERED = 8192  # ids of transfers that are over, so that late questions get the right answer
_DRAIN_GRACE_S = 2.0  # for sends in flight to end by themselves before the lane is closed by force

# ends that the reader does not know about yet
_TOLD = frozenset({SenderEvent.EXPIRE, SenderEvent.CANCEL, SenderEvent.FAIL})


class KvSender:
    """All methods must be called on the event loop that ran :meth:`start`."""

    def __init__(
        self,
        pools: KvPools,
        fingerprint: str | bytes,
        config: TransferConfig,
        on_released: Callable[[str, str], None],
        *,
        engine_id: str | None = None,
        incarnation: str | None = None,
        transports: Mapping[str, Transport] | None = None,
    ) -> None:
        """``transports``: already started ones, in place of those that ``config.transport`` names (tests)."""
        self.pools = pools
        self.fingerprint = fingerprint.hex() if isinstance(fingerprint, bytes) else fingerprint
        self.config = config
        self.engine_id = engine_id or uuid.uuid4().hex
        self.incarnation = incarnation or uuid.uuid4().hex
        self.metrics = TransferMetrics()
        self.transports: dict[str, Transport] = dict(transports or {})
        self._on_released = on_released
        self._offers: dict[str, Offer] = {}
        self._generation = 0
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._over: OrderedDict[str, str] = OrderedDict()  # transfer id -> why
        self._dropped_early: OrderedDict[str, str] = OrderedDict()  # refused by D before we offered
        self._askers: dict[str, SenderSession] = {}  # asked for a transfer that is not offered yet
        self._sessions: dict[SenderSession, asyncio.Task[None]] = {}
        self._drains: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._host = ""
        self._port = 0

    # --- life ---

    async def start(self, host: str, port: int = 0, *, advertise_host: str | None = None) -> None:
        """Listens for decode nodes. ``advertise_host`` is what tickets carry when ``host`` is a wildcard.
        Raises OSError if the port is taken, TransportUnavailable if ``transport="ucx"`` cannot be had."""
        self._loop = asyncio.get_running_loop()
        if not self.transports:
            self.transports = await start_transports(self.config.transport, host)
        self._server = await asyncio.start_server(self._accept, host, port)
        self._port = self._server.sockets[0].getsockname()[1]
        self._host = advertise_host or host

    @property
    def address(self) -> tuple[str, int]:
        return self._host, self._port

    async def close(self) -> None:
        """Ends every hold (reason ``closed``), fences the lanes and stops listening."""
        if self._server is not None:
            self._server.close()
        for offer in list(self._offers.values()):
            self.stop(offer, SenderEvent.CANCEL, "closed")
        tasks = list(self._sessions.values())
        for session in list(self._sessions):
            session.connection.abort()
        if tasks:
            await asyncio.wait(tasks)
        if self._drains:
            await asyncio.wait(self._drains)
        for transport in self.transports.values():
            await transport.close()
        if self._server is not None:
            await self._server.wait_closed()

    # --- from the node ---

    def offer(self, transfer_id: str, lease_s: float | None = None) -> KVTicket:
        """Announces a transfer, before any block of it need exist. Hold until ``on_released``."""
        if transfer_id in self._offers:
            raise ValueError(f"transfer {transfer_id} is already offered")
        self._generation += 1
        lease_s = self.config.lease_s if lease_s is None else lease_s
        offer = Offer(transfer_id, self._generation, lease_s, self._loop.time() + lease_s)
        self._offers[transfer_id] = offer
        self.metrics.leases_live += 1
        self._over.pop(transfer_id, None)
        self._arm(offer)
        why = self._dropped_early.pop(transfer_id, None)
        if why is not None:
            # not from inside offer(): the caller does not hold the ticket yet
            self._loop.call_soon(self.stop, offer, SenderEvent.DROP, why)
        asker = self._askers.pop(transfer_id, None)
        if asker is not None:
            asker.tell_offered(transfer_id)
        return KVTicket(
            transfer_id=transfer_id,
            engine_id=self.engine_id,
            host=self._host,
            port=self._port,
            incarnation=self.incarnation,
            generation=offer.generation,
            transports=tuple(self.transports),
            lease_s=lease_s,
        )

    def extend(self, transfer_id: str, blocks: Mapping[int, Mapping[int, int]], final_upto: int) -> bool:
        """More blocks are final: group -> absolute block position -> block id; ``final_upto`` in tokens.
        Returns whether anybody can still want them (False: the hold is over)."""
        offer = self._offers.get(transfer_id)
        if offer is None or offer.machine.state in (SenderState.DRAINING, SenderState.RELEASED):
            return False
        for group, placed in blocks.items():
            num_blocks = self.pools.groups[group].num_blocks
            for position, block_id in placed.items():
                if not 0 <= block_id < num_blocks:
                    raise ValueError(
                        f"block id {block_id} (position {position}, group {group}) is not in the pool"
                    )
            offer.blocks.setdefault(group, {}).update(placed)
        offer.final_upto = max(offer.final_upto, final_upto)
        offer.touch(self._loop.time())
        self._pump(offer)
        return True

    def finish(self, transfer_id: str, carry: bytes, extra: bytes = b"") -> bool:
        """The last word: carry row(s) and opaque extra. What D wants and was never given now fails by
        name."""
        offer = self._offers.get(transfer_id)
        if offer is None or offer.machine.state in (SenderState.DRAINING, SenderState.RELEASED):
            return False
        offer.finished = (carry, extra)
        offer.touch(self._loop.time())
        self._pump(offer)
        return True

    def _pump(self, offer: Offer) -> None:
        """An error while posting is this transfer's, not the node's that has just computed a block."""
        try:
            if offer.serve is not None:
                offer.serve.pump()
        except Exception as error:
            logger.exception("transfer %s broke", offer.transfer_id)
            self.stop(offer, SenderEvent.FAIL, f"internal: {error!r}")

    def cancel(self, transfer_id: str, reason: str) -> None:
        """Our own node gives up; a reader is told. Legal at any time, also for an unknown id."""
        offer = self._offers.get(transfer_id)
        if offer is not None:
            self.stop(offer, SenderEvent.CANCEL, reason)

    @property
    def num_held(self) -> int:
        return len(self._offers)

    # --- from sessions ---

    def find(self, transfer_id: str) -> Offer | None:
        return self._offers.get(transfer_id)

    def why_over(self, transfer_id: str) -> str | None:
        return self._over.get(transfer_id)

    def remember_asker(self, transfer_id: str, session: SenderSession) -> None:
        self._askers[transfer_id] = session
        self._dropped_early.pop(transfer_id, None)  # somebody wants it after all

    def drop(self, transfer_id: str, generation: int, reason: str) -> None:
        """D does not want the transfer, perhaps before we have heard of it. Touches no hold that somebody
        reads and none of another generation."""
        offer = self._offers.get(transfer_id)
        self._askers.pop(transfer_id, None)
        if offer is None:
            if transfer_id not in self._over:
                _remember(self._dropped_early, transfer_id, reason)
            return
        if generation in (0, offer.generation) and offer.machine.state is SenderState.OFFERED:
            self.stop(offer, SenderEvent.DROP, reason)

    def stop(self, offer: Offer, event: SenderEvent, reason: str) -> None:
        """Every end of a hold passes here; the release follows when no send reads the blocks any more."""
        if not offer.machine.allows(event):
            self.metrics.messages_unexpected += 1
            return
        state, serve = offer.machine.state, offer.serve
        offer.machine.handle(event)
        offer.reason = reason
        if event is SenderEvent.COMMIT:
            self.metrics.transfers_committed += 1
        elif event is SenderEvent.EXPIRE:
            self.metrics.leases_expired += 1
        if event is not SenderEvent.COMMIT:
            self.metrics.failures[event.name.lower()] += 1
            logger.info(
                "transfer %s: hold ends (%s: %s) in %s, positions < %d computed, %s",
                offer.transfer_id, event.name, reason, state.name, offer.final_upto,
                f"{serve.next_seq} of {len(serve.chunks)} chunks sent" if serve else "nobody reads it",
            )  # fmt: skip
        if serve is not None and event in _TOLD:
            serve.tell_failed(reason)
        if serve is None or serve.num_reading == 0:
            self.release(offer)
            return
        drain = self._loop.create_task(self._drain(offer, serve))
        self._drains.add(drain)
        drain.add_done_callback(self._drains.discard)

    def release(self, offer: Offer) -> None:
        """No send reads the blocks any more: they go back to the engine."""
        offer.machine.handle(SenderEvent.QUIET)
        del self._offers[offer.transfer_id]
        self.metrics.leases_live -= 1
        timer = self._timers.pop(offer.transfer_id, None)
        if timer is not None:
            timer.cancel()
        _remember(self._over, offer.transfer_id, offer.reason)
        try:
            self._on_released(offer.transfer_id, offer.reason)
        except Exception:  # the caller's bug must not stop other transfers
            logger.exception("on_released of transfer %s failed", offer.transfer_id)

    async def _drain(self, offer: Offer, serve: Serve) -> None:
        """Sends that do not end by themselves (a stopped reader) are ended by closing the lane."""
        deadline = self._loop.time() + _DRAIN_GRACE_S
        while serve.num_reading and self._loop.time() < deadline:
            await asyncio.sleep(0.02)
        if serve.num_reading:
            for session in list(self._sessions):
                if session.serves_offer(offer):
                    self.metrics.fences_forced += 1
                    await session.close_by_force(f"sends of transfer {offer.transfer_id} do not end")

    # --- leases ---

    def _arm(self, offer: Offer) -> None:
        self._timers[offer.transfer_id] = self._loop.call_at(offer.deadline, self._on_lease_timer, offer)

    def _on_lease_timer(self, offer: Offer) -> None:
        """Renewals only move the deadline; the timer follows when it fires."""
        if self._offers.get(offer.transfer_id) is not offer:
            return
        if self._loop.time() < offer.deadline:
            self._arm(offer)
        else:
            self.stop(offer, SenderEvent.EXPIRE, "lease_expired")

    def renew(self, transfer_ids: tuple[str, ...]) -> None:
        now = self._loop.time()
        for transfer_id in transfer_ids:
            offer = self._offers.get(transfer_id)
            if offer is not None and offer.deadline > now:
                offer.touch(now)

    # --- connections ---

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        decoder = msgspec.msgpack.Decoder[ToSender](ToSender)
        connection = ControlConnection[ToSender](reader, writer, decoder, self.config, self.metrics)
        session = SenderSession(self, connection)
        task = asyncio.current_task()
        assert task is not None
        self._sessions[session] = task
        self.metrics.sessions_open += 1
        try:
            await session.run()
        finally:
            del self._sessions[session]
            self.metrics.sessions_open -= 1
            self._askers = {t: s for t, s in self._askers.items() if s is not session}


def _remember(table: OrderedDict[str, str], transfer_id: str, reason: str) -> None:
    table[transfer_id] = reason
    while len(table) > _REMEMBERED:
        table.popitem(last=False)
