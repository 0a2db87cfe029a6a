"""The prefill node: computes prompts to their cut and hands their KV to decode nodes.

Life of a prompt (words of RequestState):
 1. PrefillRequest arrives: the transfer is offered under a lease, the prompt queued.          WAITING
 2. Chunks run; after every step the blocks that became final are offered.                     RUNNING
 3. The cut is reached: the rest is offered, with the carry; the blocks are held.              HELD
 4. The transfer is released - committed, aborted, lease over - and the engine's blocks go.    FINISHED

A request that brings sampling parameters (hand-over `carry`) is computed to its end, and its first token is
sampled here: it goes to the router at once, and with its drafts to D. Where it ends the answer, nothing is
shipped; the router then lets go of both nodes.

The engine owns the blocks throughout; the sender may read what was offered until it calls `on_released`,
and only then does the node end the request. A transfer that is released early ends the computing too.
"""

import asyncio
import logging
from dataclasses import dataclass

from common.engine.batch import RequestSummary, RequestUpdate, StepOutput
from common.engine.build import BuiltEngine
from common.engine.engine import Engine
from common.engine.first_token import FirstToken, encode_first_token, first_token_of
from common.engine.node_runtime import NodeRuntime, fire_and_log
from common.errors import BatonError, ConfigError
from common.extra_keys import ExtraKeys
from common.kv_cache.offered_blocks import final_blocks
from common.messages import (
    Abort,
    Accepted,
    Drain,
    Finished,
    PrefillRequest,
    Refused,
    RouterMessage,
    TokenChunk,
    TransferAddress,
)
from common.request import FinishReason, Request, SamplingParams
from kv_transfer.engine_pools import fingerprint_of, pools_of
from kv_transfer.metrics import publish
from kv_transfer.sender import KvSender
from prefill_node.config import PrefillConfig

logger = logging.getLogger(__name__)


@dataclass
class _Prefill:
    """One prompt on its way; owned by the event loop."""

    router_id: str
    request_id: str
    transfer_id: str
    summary: RequestSummary | None = None
    answered: bool = False  # the first token was the last: nothing is shipped


@dataclass(frozen=True)
class Offer:
    """What a step added to one request's transfer."""

    request_id: str
    blocks: dict[int, dict[int, int]]
    final_upto: int
    is_last: bool
    carry: bytes | None
    first: FirstToken | None  # token L, where it was sampled here


class PrefillNode:
    """Wires a NodeRuntime to a KvSender."""

    def __init__(self, config: PrefillConfig, built: BuiltEngine | None = None) -> None:
        self.runtime = NodeRuntime("prefill", config.model, config.engine, config.node, config.log, built)
        self.config = config
        built = self.runtime.built
        self.sender = KvSender(pools_of(built), fingerprint_of(built), config.transfer, self._released)
        metrics = self.runtime.metrics
        metrics.before_render = lambda: publish(self.sender.metrics, metrics)
        self._prefills: dict[str, _Prefill] = {}  # by request id
        self._by_transfer: dict[str, _Prefill] = {}
        self._offered_upto: dict[str, int] = {}  # engine thread: positions offered so far
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        host, port = self.config.node.host, self.config.node.transfer_port
        try:
            await self.sender.start(host, port)
        except OSError as error:
            raise ConfigError(
                f"port {port} on {host} for the KV transfer cannot be had ({error}); choose another with "
                "--transfer-port"
            ) from None
        address = TransferAddress(
            engine_id=self.sender.engine_id,
            incarnation=self.sender.incarnation,
            host=self.sender.address[0],
            port=self.sender.address[1],
            transports=tuple(self.sender.transports),
            lease_s=self.config.transfer.lease_s,
        )
        try:
            await self.runtime.serve(
                self._handle, self._router_lost, self._collect, self._on_step, self._is_idle, address
            )
        finally:
            await self.sender.close()

    # ---- from the router --------------------------------------------------------------------------------

    async def _handle(self, router_id: str, message: RouterMessage) -> None:
        match message:
            case PrefillRequest():
                self._admit(router_id, message)
            case Abort(request_id):
                self._abort(request_id)
            case Drain():
                self.runtime.drain()
            case _:
                logger.warning("a prefill node does not serve %s", type(message).__name__)

    def _admit(self, router_id: str, message: PrefillRequest) -> None:
        """Registers the prompt at once: an abort, or the router's end, may be the very next thing."""
        request_id, transfer_id = message.request_id, message.ticket.transfer_id
        if request_id in self._prefills or transfer_id in self._by_transfer:
            self._refuse(router_id, request_id, f"request {request_id} is already here", retry=False)
            return
        self.sender.offer(transfer_id, message.ticket.lease_s)
        if self.runtime.draining:
            self._turn_away(router_id, message, "this node is draining", retry=True)
            return
        end = len(message.token_ids)
        if not (0 < message.cut < end if message.sampling is None else message.cut == end):
            kind = "without" if message.sampling is None else "with"
            reason = f"cut {message.cut} is none of a prompt of {end} tokens {kind} sampling parameters"
            self._turn_away(router_id, message, reason, retry=False)
            return
        prefill = _Prefill(router_id, request_id, transfer_id)
        self._prefills[request_id] = self._by_transfer[transfer_id] = prefill
        # Not awaited: many admissions share one pause between two steps.
        fire_and_log("admit", self._add(prefill, message), self._tasks)

    async def _add(self, prefill: _Prefill, message: PrefillRequest) -> None:
        request = self.make_request(message)
        try:
            await self.runtime.call(lambda engine: engine.add(request))
        except TimeoutError:  # perhaps the engine has it all the same: it ends as an aborted one does
            self.sender.cancel(prefill.transfer_id, "the engine does not answer")
        except BatonError as error:
            self._prefills.pop(prefill.request_id, None)
            self._by_transfer.pop(prefill.transfer_id, None)
            self._turn_away(prefill.router_id, message, error.message, retry=error.retryable)
        else:
            self.runtime.send(prefill.router_id, Accepted(prefill.request_id))

    def make_request(self, message: PrefillRequest) -> Request:
        """The whole prompt, so that the modules read real tokens past the cut (02-exactness 4)."""
        return Request(
            message.request_id,
            message.token_ids,
            message.sampling or SamplingParams(),
            stop_at=message.cut,
            hold_blocks=True,
            priority=message.priority,
            extra_keys=ExtraKeys.of(message.lora_name, message.cache_salt),
            lora_name=message.lora_name,
            arrival_time_s=asyncio.get_running_loop().time(),
        )

    def _turn_away(self, router_id: str, message: PrefillRequest, reason: str, *, retry: bool) -> None:
        """D asks for these blocks already: ending the offer is how it hears that they will never come."""
        self.sender.cancel(message.ticket.transfer_id, reason)
        self._refuse(router_id, message.request_id, reason, retry=retry)

    def _refuse(self, router_id: str, request_id: str, reason: str, *, retry: bool) -> None:
        self.runtime.send(router_id, Refused(request_id, reason, retry))

    def _abort(self, request_id: str) -> None:
        prefill = self._prefills.get(request_id)
        if prefill is not None:
            self.sender.cancel(prefill.transfer_id, "aborted by the router")

    def _router_lost(self, router_id: str) -> None:
        for prefill in list(self._prefills.values()):
            if prefill.router_id == router_id:
                self._abort(prefill.request_id)

    # ---- from the engine --------------------------------------------------------------------------------

    def _collect(self, engine: Engine, output: StepOutput) -> list[Offer]:
        """Engine thread: which blocks each update makes final. Block ids are read before anything moves."""
        sizes = [group.block_size for group in self.runtime.built.layout.groups]
        offers = []
        for update in output.updates:
            is_last = update.finish_reason is not None
            first = self._offered_upto.get(update.request_id, 0)
            end = update.num_computed if is_last else update.final_upto
            blocks = final_blocks(engine.tables(update.request_id), sizes, first, end, partial=is_last)
            token = first_token_of(update)
            rows = None if token else 1  # all of the carry, or the row of the one slot that waits at the cut
            carry = engine.runner.carry_rows(update.request_id, rows) if is_last else None
            offers.append(Offer(update.request_id, blocks, end, is_last, carry, token))
            self._offered_upto[update.request_id] = end
            if is_last:
                del self._offered_upto[update.request_id]
        return offers

    def _on_step(self, output: StepOutput, offers: list[Offer]) -> None:
        for update, offer in zip(output.updates, offers, strict=True):
            prefill = self._prefills.get(offer.request_id)
            if prefill is None:
                continue
            prefill.summary = update.summary
            if update.new_tokens:
                chunk = TokenChunk(
                    offer.request_id, update.new_tokens, logprobs=update.logprobs, offset=update.offset
                )
                self.runtime.send(prefill.router_id, chunk)
            if update.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                prefill.answered = True
                self._answered(prefill, update)
                continue
            self.sender.extend(prefill.transfer_id, offer.blocks, offer.final_upto)
            if offer.is_last:
                extra = encode_first_token(offer.first)
                self.sender.finish(prefill.transfer_id, offer.carry or b"", extra)

    def _answered(self, prefill: _Prefill, update: RequestUpdate) -> None:
        """The client has everything. The hold ends when the router lets go, of D and of us."""
        assert update.finish_reason is not None
        assert update.summary is not None
        self.runtime.send(
            prefill.router_id,
            Finished(
                prefill.request_id,
                update.finish_reason.value,
                prompt_tokens=update.summary.prompt_tokens,
                output_tokens=update.summary.output_tokens,
                cached_tokens=update.summary.cached_tokens,
                stop_string=update.stop_string,
            ),
        )

    # ---- from the sender --------------------------------------------------------------------------------

    def _released(self, transfer_id: str, reason: str) -> None:
        """Nothing reads the transfer's blocks any more: old owner the transfer, new owner the pool."""
        prefill = self._by_transfer.pop(transfer_id, None)
        if prefill is not None:
            fire_and_log("prefill-release", self._end(prefill, reason), self._tasks)

    async def _end(self, prefill: _Prefill, reason: str) -> None:
        def end(engine: Engine) -> None:
            engine.abort(prefill.request_id)  # computing or held: either way it ends here
            self._offered_upto.pop(prefill.request_id, None)

        await self.runtime.tell(end)
        self._prefills.pop(prefill.request_id, None)
        summary = prefill.summary
        committed = summary is not None and reason == "committed"
        if not committed and not prefill.answered:
            logger.info("prefill %s ended early: %s", prefill.request_id, reason)
        self.runtime.send(
            prefill.router_id,
            Finished(
                prefill.request_id,
                "cut" if committed else "abort",
                prompt_tokens=summary.prompt_tokens if summary else 0,
                cached_tokens=summary.cached_tokens if summary else 0,
                error=None if committed else reason,
            ),
        )

    def _is_idle(self) -> bool:
        return not self._prefills


async def serve(config: PrefillConfig) -> None:
    """Runs a prefill node until SIGTERM or SIGINT."""
    await PrefillNode(config).serve()
