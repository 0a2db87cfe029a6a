"""A node without an engine: speaks the real control channel and publishes real KV events.

Decode requests are answered with scripted tokens; what arrives is kept in ``received``. Behaviour is set by
attributes: refuse, hang, take time, fail. Prefill requests are accepted and finished at once.
"""

import asyncio
import secrets
from collections.abc import Sequence

import msgspec

from common.block_hash import BlockHasher, event_hash
from common.control_client import ControlClient
from common.kv_event_publisher import KVEventPublisher
from common.kv_events import BlockStored
from common.messages import (
    Abort,
    Accepted,
    DecodeRequest,
    Finished,
    Heartbeat,
    NodeLoad,
    PrefillRequest,
    Refused,
    Register,
    RouterMessage,
    TokenChunk,
    TransferAddress,
)
from common.request import TokenLogprob

FINGERPRINT = {"model": "fake", "num_modules": "4"}
BLOCK_SIZE = 4
LOOKAHEAD = 4


def make_register(node_id: str, role: str = "decode", epoch: str = "") -> Register:
    """What a node says of itself; without KV events."""
    epoch = epoch or secrets.token_hex(4)
    return Register(
        node_id=node_id,
        epoch=epoch,
        role=role,
        version="0",
        model="fake",
        fingerprint=FINGERPRINT,
        block_size=BLOCK_SIZE,
        num_lookahead=LOOKAHEAD,
        hash_algorithm="blake2b",
        hash_seed="",
        num_modules=4,
        vocab_size=400,
        max_model_len=128,
        total_blocks=100,
        events_endpoint="",
        replay_endpoint="",
        http_url="http://127.0.0.1:1",
        transfer=TransferAddress(engine_id=node_id, incarnation=epoch, host="127.0.0.1", port=1),
    )


class FakeNode:
    """``tokens`` are what every sequence generates, up to the request's max_tokens; a prefill that is asked
    to sample tells the first of them."""

    def __init__(self, node_id: str, role: str, tokens: Sequence[int] = (), *, vocab_size: int = 400) -> None:
        self.node_id = node_id
        self.role = role
        self.tokens = list(tokens)
        self.vocab_size = vocab_size
        self.max_model_len = 128
        self.fingerprint = dict(FINGERPRINT)
        self.model = "fake"
        self.chunk_size = 1
        self.delay_s = 0.0  # before each chunk
        self.hang_after: int | None = None  # tokens, then silence
        self.fail_after: int | None = None  # tokens, then Finished(error)
        self.fails_transfer = False  # requests with a ticket: Finished(error, transfer_failed)
        self.refuse: Refused | None = None  # its request_id is filled in
        self.stop_string: str | None = None  # reported after the last token
        self.ends_at_first: str | None = None  # a prefill: the reason why its token ends the answer
        self.draining = False
        self.load = NodeLoad(total_blocks=100, free_blocks=100)
        self.received: list[RouterMessage] = []
        self.lost_routers: list[str] = []
        self.epoch = secrets.token_hex(4)
        self.hasher = BlockHasher(BLOCK_SIZE, LOOKAHEAD)
        self.publisher = KVEventPublisher(epoch=self.epoch)
        self._running: dict[str, asyncio.Task[None]] = {}

    async def start(
        self, addresses: str, *, heartbeat_s: float = 0.05, router_timeout_s: float = 1.0
    ) -> None:
        self.publisher.start()
        self.client = ControlClient(
            addresses,
            register=self.register(),
            heartbeat=self._heartbeat,
            handler=self._handle,
            on_router_lost=self.lost_routers.append,
            heartbeat_s=heartbeat_s,
            router_timeout_s=router_timeout_s,
        )
        self.client.start()

    async def stop(self, *, goodbye: bool = True) -> None:
        """With ``goodbye`` False: dies without a word."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        await self.client.close(goodbye=goodbye)
        await asyncio.to_thread(self.publisher.close)

    def register(self) -> Register:
        return msgspec.structs.replace(
            make_register(self.node_id, self.role, self.epoch),
            model=self.model,
            fingerprint=self.fingerprint,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            events_endpoint=self.publisher.endpoint,
            replay_endpoint=self.publisher.replay_endpoint,
        )

    def store(self, token_ids: Sequence[int]) -> int:
        """Announces the prompt's blocks as cached; returns how many."""
        hashes: list[bytes] = []
        self.hasher.extend(hashes, token_ids)
        parent: int | None = None
        for i, digest in enumerate(hashes):
            end = (i + 1) * BLOCK_SIZE
            event = BlockStored(
                block_hashes=[event_hash(digest)],
                parent_block_hash=parent,
                token_ids=list(token_ids[end - BLOCK_SIZE : end]),
                block_size=BLOCK_SIZE,
                lora_id=None,
                medium="CPU",
                lora_name=None,
                lookahead_token_ids=[list(token_ids[end : end + LOOKAHEAD])],
            )
            self.publisher.publish([event])
            parent = event_hash(digest)
        return len(hashes)

    def requests(self) -> list[DecodeRequest]:
        return [m for m in self.received if isinstance(m, DecodeRequest)]

    def prefills(self) -> list[PrefillRequest]:
        return [m for m in self.received if isinstance(m, PrefillRequest)]

    def aborts(self) -> list[str]:
        return [m.request_id for m in self.received if isinstance(m, Abort)]

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(self.node_id, self.epoch, self.publisher.last_seq, self.load, self.draining)

    async def _handle(self, router_id: str, message: RouterMessage) -> None:
        self.received.append(message)
        match message:
            case DecodeRequest() | PrefillRequest() if self.refuse is not None:
                self.client.send(
                    router_id,
                    Refused(
                        message.request_id,
                        self.refuse.reason,
                        self.refuse.retry,
                        self.refuse.http_status,
                        self.refuse.param,
                    ),
                )
            case DecodeRequest():
                self._running[message.request_id] = asyncio.create_task(self._decode(router_id, message))
            case PrefillRequest():
                self.client.send(router_id, Accepted(message.request_id))
                self._running[message.request_id] = asyncio.create_task(self._prefill(router_id, message))
            case Abort():
                task = self._running.pop(message.request_id, None)
                if task is not None:
                    task.cancel()
                    self.client.send(router_id, Finished(message.request_id, "abort"))

    async def _prefill(self, router_id: str, request: PrefillRequest) -> None:
        if request.sampling is not None:
            await asyncio.sleep(self.delay_s)
            self.client.send(router_id, TokenChunk(request.request_id, (self.tokens[0],)))
            if self.ends_at_first is not None:
                self.client.send(router_id, Finished(request.request_id, self.ends_at_first, output_tokens=1))
                await asyncio.Event().wait()  # holds until it is aborted
        self.client.send(router_id, Finished(request.request_id, "cut"))

    async def _decode(self, router_id: str, request: DecodeRequest) -> None:
        self.client.send(router_id, Accepted(request.request_id))
        if self.fails_transfer and request.ticket is not None:
            end = Finished(request.request_id, "error", error="no KV came", transfer_failed=True)
            self.client.send(router_id, end)
            return
        await asyncio.gather(*(self._sequence(router_id, request, i) for i in range(request.n)))
        self._running.pop(request.request_id, None)

    async def _sequence(self, router_id: str, request: DecodeRequest, index: int) -> None:
        wanted = self.tokens[: request.sampling.max_tokens]
        told = len(request.token_ids) - request.num_prompt_tokens
        for start in range(told, len(wanted), self.chunk_size):
            if self.hang_after is not None and start >= self.hang_after:
                await asyncio.Event().wait()
            if self.fail_after is not None and start >= self.fail_after:
                self.client.send(router_id, Finished(request.request_id, "error", index, error="scripted"))
                return
            await asyncio.sleep(self.delay_s)
            chunk = tuple(wanted[start : start + self.chunk_size])
            logprobs = None
            if request.sampling.logprobs is not None:
                logprobs = tuple(TokenLogprob(-0.5, ((token, -0.5), (0, -2.0))) for token in chunk)
            self.client.send(router_id, TokenChunk(request.request_id, chunk, index, logprobs, start))
        ended_early = len(wanted) < request.sampling.max_tokens or self.stop_string is not None
        self.client.send(
            router_id,
            Finished(
                request.request_id,
                "stop" if ended_early else "length",
                index,
                prompt_tokens=len(request.token_ids),
                output_tokens=len(wanted),
                cached_tokens=4,
                transferred_tokens=request.cut if request.ticket else 0,
                transferred_bytes=100 * request.cut if request.ticket else 0,
                stop_string=self.stop_string,
                num_drafts=2,
                num_draft_tokens=8,
                num_accepted=3,
                accepted_per_pos=(2, 1, 0, 0),
                verified_per_pos=(2, 2, 2, 2),
            ),
        )
