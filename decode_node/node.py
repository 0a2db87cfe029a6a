"""The decode node: reserves, receives, finishes the prompt, decodes, streams.

Life of a request (words of RequestState):
 1. DecodeRequest with a ticket: local hits are kept, the rest of the prompt's blocks reserved. Without room
    it waits its turn, for a while, and is then refused; P computes for nobody before.        RECEIVING_KV
 2. KV arrives under the transfer's deadline. Complete: the carry comes with it.              READY
    Broken: received final blocks are kept, the rest is computed here.                        WAITING
    (With `--on-transfer-failure fail` the request ends there, with an error.)                FINISHED
 3. What P left of the prompt is computed, waiting slots are re-prefilled, drafting begins.   RUNNING
 4. Tokens stream to the router until the sequence ends or the client leaves.                 FINISHED
The cut tells the hand-over: N-1 (or 1) tokens before the prompt's end is `backoff`, D samples the first
token; the end itself is `carry`, and the first token, sampled on P, comes with the KV and is streamed too.
Without a ticket the request starts in WAITING and the whole prompt is computed here.

Until `fetch` returns, the destination blocks are the receiver's to write; the engine owns them throughout
and frees them only after the fetch has ended (its fence included).
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from common.engine.batch import RequestUpdate, StepOutput
from common.engine.build import BuiltEngine
from common.engine.engine import Engine
from common.engine.first_token import decode_first_token
from common.engine.node_runtime import NodeRuntime, fire_and_log
from common.errors import TransferError, TransferFailed
from common.extra_keys import ExtraKeys
from common.kv_ticket import KVTicket
from common.messages import (
    Abort,
    Accepted,
    DecodeRequest,
    Drain,
    Finished,
    Refused,
    RouterMessage,
    TokenChunk,
)
from common.request import FinishReason, Request
from decode_node.admission import AdmissionQueue, Applicant, Entered, Outcome, enter_in_order
from decode_node.config import DecodeConfig
from kv_transfer.engine_pools import fingerprint_of, pools_of
from kv_transfer.metrics import publish
from kv_transfer.receiver import KvReceiver

logger = logging.getLogger(__name__)

GIVEN_UP = "the KV pool has shrunk (blocks in quarantine) below what this request needs"

_SHORT_ID = 8  # characters of a transfer id's end that an error tells: the random part


@dataclass
class _Decode:
    """One request and its n sequences; owned by the event loop."""

    router_id: str
    request_id: str
    num_sequences: int
    num_tokens: int = 0  # as asked for: the prompt, and what the client has already
    fetch: asyncio.Task[None] | None = None
    transferred_tokens: int = 0
    transferred_bytes: int = 0
    aborted: bool = False
    accepted: bool = False
    early: list[RequestUpdate] = field(default_factory=list)  # of steps that ended before `accepted` was sent
    finished: set[int] = field(default_factory=set)  # indices that ended


class DecodeNode:
    """Wires a NodeRuntime to a KvReceiver. ``role`` "both": no transfers are expected."""

    def __init__(self, config: DecodeConfig, built: BuiltEngine | None = None) -> None:
        role = "both" if config.decode.aggregated else "decode"
        self.runtime = NodeRuntime(role, config.model, config.engine, config.node, config.log, built)
        built = self.runtime.built
        self.receiver = KvReceiver(
            pools_of(built), fingerprint_of(built), config.transfer, on_quiet=self._quiet_again
        )
        self._decodes: dict[str, _Decode] = {}
        self._recompute = config.decode.on_transfer_failure == "recompute"
        self._admission_timeout_s = config.decode.admission_timeout_s
        self._admission = AdmissionQueue(self._decide, self._settled, self._is_gone)
        self._tasks: set[asyncio.Task[None]] = set()
        self.transports_used: set[str] = set()
        # Transfers that ended, those that failed, bytes. The engine's thread reads it: replaced as a whole,
        # so that no heartbeat sees a failure without its transfer.
        self._transfers = (0, 0, 0)
        self.runtime.transfer_load = lambda: self._transfers
        metrics = self.runtime.metrics
        metrics.before_render = lambda: publish(self.receiver.metrics, metrics)

    async def serve(self) -> None:
        await self.receiver.start()
        admitting = fire_and_log("admission", self._admission.run(), self._tasks)
        try:
            await self.runtime.serve(
                self._handle, self._router_lost, lambda engine, output: None, self._on_step, self._is_idle
            )
        finally:
            admitting.cancel()
            await self.receiver.close()

    # ---- from the router --------------------------------------------------------------------------------

    async def _handle(self, router_id: str, message: RouterMessage) -> None:
        match message:
            case DecodeRequest():
                self._admit(router_id, message)
            case Abort(request_id):
                self._abort(request_id)
            case Drain():
                self.runtime.drain()
            case _:
                logger.warning("a decode node does not serve %s", type(message).__name__)

    def _admit(self, router_id: str, message: DecodeRequest) -> None:
        if self.runtime.draining:
            self._refuse(router_id, message, "this node is draining", retry=True)
            return
        if message.request_id in self._decodes:
            self._refuse(router_id, message, f"request {message.request_id} is already here", retry=False)
            return
        if message.ticket is not None and not 0 < message.cut <= len(message.token_ids):
            reason = f"cut {message.cut} is not inside a prompt of {len(message.token_ids)} tokens"
            self._refuse(router_id, message, reason, retry=False)
            return
        if message.ticket is not None and message.cut == len(message.token_ids) and message.n > 1:
            reason = (
                f"{message.n} sequences cannot share the first token of one prefill; cut the prompt before"
            )
            self._refuse(router_id, message, reason, retry=False)
            return
        request = Request(
            message.request_id,
            message.token_ids,
            message.sampling,
            priority=message.priority,
            num_sequences=message.n,
            extra_keys=ExtraKeys.of(message.lora_name, message.cache_salt),
            lora_name=message.lora_name,
            arrival_time_s=asyncio.get_running_loop().time(),
            num_prompt_tokens=message.num_prompt_tokens or len(message.token_ids),
        )
        num_tokens = len(message.token_ids)
        self._decodes[message.request_id] = _Decode(router_id, message.request_id, message.n, num_tokens)
        deadline_s = asyncio.get_running_loop().time() + self._admission_timeout_s
        self._admission.add(Applicant(router_id, message, request, deadline_s))

    async def _decide(self, applicants: Sequence[Applicant]) -> list[Outcome]:
        return await self.runtime.call(lambda engine: enter_in_order(engine, applicants))

    def _is_gone(self, applicant: Applicant) -> bool:
        decode = self._decodes.get(applicant.message.request_id)
        return decode is None or decode.aborted

    def _settled(self, applicant: Applicant, outcome: Outcome) -> None:
        message, request_id = applicant.message, applicant.message.request_id
        if self._is_gone(applicant):
            self._drop(message.ticket)  # its abort is on the way to the engine
            return
        if not isinstance(outcome, Entered):
            del self._decodes[request_id]
            self._drop(message.ticket)
            refused = Refused(
                request_id, outcome.message, outcome.retryable, outcome.http_status, outcome.param
            )
            self.runtime.send(applicant.router_id, refused)
            return
        if message.ticket is not None:
            decode = self._decodes[request_id]
            work = self._receive(decode, message.ticket, outcome.wanted, message.cut, outcome.cached)
            decode.fetch = fire_and_log("kv-receive", work, self._tasks)
        self.runtime.send(applicant.router_id, Accepted(request_id, outcome.cached))
        entered = self._decodes[request_id]
        entered.accepted = True
        for update in entered.early:
            self._tell(entered, update)
        entered.early.clear()

    def _refuse(self, router_id: str, message: DecodeRequest, reason: str, *, retry: bool) -> None:
        self._drop(message.ticket)
        self.runtime.send(router_id, Refused(message.request_id, reason, retry))

    def _drop(self, ticket: KVTicket | None) -> None:
        """Nobody will fetch this: P need not wait for its lease to end."""
        if ticket is not None:
            fire_and_log("kv-drop", self.receiver.drop(ticket), self._tasks)

    def _abort(self, request_id: str) -> None:
        decode = self._decodes.get(request_id)
        if decode is not None and not decode.aborted:
            decode.aborted = True
            fire_and_log("abort", self._end_aborted(decode), self._tasks)

    async def _end_aborted(self, decode: _Decode) -> None:
        """The fetch ends first (fence), then the engine may free its destination blocks."""
        if decode.fetch is not None:
            decode.fetch.cancel()
            await asyncio.wait([decode.fetch])

        def abort(engine: Engine) -> None:
            for index in range(decode.num_sequences):
                engine.abort(_sequence_id(decode.request_id, index))

        await self.runtime.tell(abort)
        self._admission.look_again()
        if self._decodes.pop(decode.request_id, None) is not None:
            self.runtime.send(decode.router_id, Finished(decode.request_id, "abort"))

    def _router_lost(self, router_id: str) -> None:
        for decode in list(self._decodes.values()):
            if decode.router_id == router_id:
                self._abort(decode.request_id)

    # ---- the transfer -----------------------------------------------------------------------------------

    async def _receive(
        self, decode: _Decode, ticket: KVTicket, wanted: dict[int, dict[int, int]], cut: int, cached: int
    ) -> None:
        """Fetches the wanted blocks and tells the engine how it went, whatever way it went."""
        request_id = decode.request_id
        try:
            result = await self.receiver.fetch(ticket, wanted, cut)
        except TransferError as error:
            self._count_transfer(num_failures=1)
            upto = error.final_upto if isinstance(error, TransferFailed) else 0
            stuck = error.quarantined if isinstance(error, TransferFailed) else {}
            logger.warning(
                "request %s: KV transfer %s failed (%s); %d of %d tokens are kept, %s",
                request_id, ticket.transfer_id, error.message, max(upto, cached), cut,
                "the rest is computed here" if self._recompute else "the request fails",
            )  # fmt: skip
            decode.transferred_tokens = max(0, upto - cached)
            # An abort may cancel us here; blocks in quarantine must not reach the pool all the same.
            if self._recompute:
                await self.runtime.tell(lambda engine: engine.kv_failed(request_id, upto, stuck))
                self._admission.look_again()  # its blocks are free until its turn comes
            else:
                await self._end_failed(decode, ticket, error, upto, stuck)
            return
        self._count_transfer(num_bytes=result.num_bytes)
        self.transports_used.add(result.transport)
        decode.transferred_bytes = result.num_bytes
        decode.transferred_tokens = cut - cached
        carry, first = self._rows_of(decode, result.carry, cut), decode_first_token(result.extra)
        await self.runtime.tell(lambda engine: engine.kv_arrived(request_id, cut, carry, first))

    async def _end_failed(
        self,
        decode: _Decode,
        ticket: KVTicket,
        error: TransferError,
        upto: int,
        stuck: Mapping[int, Sequence[int]],
    ) -> None:
        """`--on-transfer-failure fail`: what arrived stays in the prefix cache, nothing is computed, and all
        sequences end with one answer. An abort that crosses takes the request over and answers instead."""
        request_id = decode.request_id

        def end(engine: Engine) -> None:
            engine.kv_failed(request_id, upto, stuck)  # quarantine first: the pool gets only quiet blocks
            engine.abort(request_id)

        await self.runtime.tell(end)
        self._admission.look_again()
        if self._decodes.pop(request_id, None) is None:
            return
        reason = (
            f"KV transfer {ticket.transfer_id[-_SHORT_ID:]} from {ticket.host}:{ticket.port} failed "
            f"({error.message}), and --on-transfer-failure is fail here; send the request again, or run "
            "decode nodes with --on-transfer-failure recompute"
        )
        self.runtime.send(decode.router_id, Finished(request_id, "error", error=reason, transfer_failed=True))

    def _rows_of(self, decode: _Decode, carry: bytes, cut: int) -> bytes | None:
        """The carry; None where it does not hold the rows of this hand-over: D then starts earlier."""
        built = self.runtime.built
        most = max(0, built.num_modules - 1)
        count = min(most, cut if cut == decode.num_tokens else 1)
        if len(carry) != count * built.carry_row_bytes:
            logger.warning(
                "request %s: its carry has %d bytes instead of %d rows of %d; it starts a few tokens earlier",
                decode.request_id, len(carry), count, built.carry_row_bytes,
            )  # fmt: skip
            return None
        return carry or None

    def _quiet_again(self, blocks: Mapping[int, tuple[int, ...]]) -> None:
        async def give_back() -> None:
            await self.runtime.tell(lambda engine: engine.kv_quiet(blocks))
            self._admission.look_again()

        logger.info("blocks %s leave quarantine", dict(blocks))
        fire_and_log("kv-quiet", give_back(), self._tasks)

    def _count_transfer(self, *, num_failures: int = 0, num_bytes: int = 0) -> None:
        ended, failed, received = self._transfers
        self._transfers = (ended + 1, failed + num_failures, received + num_bytes)

    # ---- from the engine --------------------------------------------------------------------------------

    def _on_step(self, output: StepOutput, _: None) -> None:
        for update in output.updates:
            decode = self._decodes.get(update.request_id.partition("#")[0])
            if decode is None or decode.aborted:
                continue
            if decode.accepted:
                self._tell(decode, update)
            else:  # a step may be faster than the way back of the call that admitted the request
                decode.early.append(update)

    def _tell(self, decode: _Decode, update: RequestUpdate) -> None:
        request_id, _sep, index = update.request_id.partition("#")
        position = int(index or 0)
        if update.new_tokens:
            chunk = TokenChunk(request_id, update.new_tokens, position, update.logprobs, update.offset)
            self.runtime.send(decode.router_id, chunk)
        if update.finish_reason is not None:
            self._finished(decode, position, update)

    def _finished(self, decode: _Decode, index: int, update: RequestUpdate) -> None:
        summary, reason = update.summary, update.finish_reason
        assert summary is not None
        assert reason is not None
        decode.finished.add(index)
        self.runtime.send(
            decode.router_id,
            Finished(
                decode.request_id,
                reason.value,
                index,
                prompt_tokens=summary.prompt_tokens,
                output_tokens=summary.output_tokens,
                cached_tokens=summary.cached_tokens,
                transferred_tokens=decode.transferred_tokens if index == 0 else 0,
                transferred_bytes=decode.transferred_bytes if index == 0 else 0,
                stop_string=update.stop_string,
                error=GIVEN_UP if reason is FinishReason.ERROR else None,
                num_drafts=summary.num_drafts,
                num_draft_tokens=summary.num_draft_tokens,
                num_accepted=summary.num_accepted,
                accepted_per_pos=summary.accepted_per_pos,
                verified_per_pos=summary.verified_per_pos,
            ),
        )
        if len(decode.finished) == decode.num_sequences:
            del self._decodes[decode.request_id]
        self._admission.look_again()

    def _is_idle(self) -> bool:
        return not self._decodes


def _sequence_id(request_id: str, index: int) -> str:
    return request_id if index == 0 else f"{request_id}#{index}"


async def serve(config: DecodeConfig) -> None:
    """Runs a decode node until SIGTERM or SIGINT."""
    await DecodeNode(config).serve()
