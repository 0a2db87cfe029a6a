"""Prefill and decode nodes in this process around a real hub: what `verify` and `bench arms` drive.

Everything on the way is the real thing - nodes, control channel, KV transfer - except that all of it shares
one process, so that weights are loaded once and engines can be looked into. Requests name their nodes.
"""

import asyncio
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

from common.errors import BatonError, NodeFailed
from common.kv_ticket import KVTicket
from common.messages import Accepted, DecodeRequest, Finished, PrefillRequest, Refused, TokenChunk
from common.metrics import ROUTER_METRICS, Metrics
from common.request import SamplingParams
from decode_node.node import DecodeNode
from prefill_node.node import PrefillNode
from router.node_hub import Leg, NodeHub
from router.policy import cut_of

HOST = "127.0.0.1"
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 15.0
ANSWER_TIMEOUT_S = 300.0
POLL_S = 0.01

AnyNode = PrefillNode | DecodeNode


@dataclass(frozen=True)
class Generation:
    """One answer; times in seconds. ``chunk_times_s``: arrival of each run of tokens after the request."""

    tokens: tuple[int, ...]
    finished: Finished
    ttft_s: float
    total_s: float
    chunk_times_s: tuple[float, ...]
    prefill: Finished | None  # P's word, None without a hand-over


class LocalCluster:
    """``async with LocalCluster(nodes, control_address_of(...))``; nodes by the name they register."""

    def __init__(self) -> None:
        self.hub = NodeHub(
            router_id="local",
            heartbeat_timeout_s=60.0,
            refusal=lambda register: None,
            metrics=Metrics(ROUTER_METRICS, model_name="local"),
            on_join=lambda node: None,
            on_leave=lambda node: None,
            on_heartbeat=lambda node: None,
        )
        self.control_address = ""
        self.nodes: dict[str, AnyNode] = {}
        self._serving: dict[str, asyncio.Task[None]] = {}

    async def __aenter__(self) -> "LocalCluster":
        port = self.hub.start(HOST, 0)
        self.control_address = f"tcp://{HOST}:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in self.nodes.values():
            node.runtime.service.stop()
        if self._serving:
            await asyncio.wait(self._serving.values(), timeout=STOP_TIMEOUT_S)
        await self.hub.close()

    async def start(self, nodes: Mapping[str, AnyNode]) -> None:
        """Serves ``nodes`` and waits until all have registered. Raises NodeFailed when one does not."""
        self.nodes.update(nodes)
        for name, node in nodes.items():
            self._serving[name] = asyncio.create_task(node.serve(), name=name)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self.nodes.keys() <= self.hub.nodes.keys():
            for name, task in self._serving.items():
                if task.done():
                    raise NodeFailed(f"{name} ended at its start: {task.exception()}")
            if time.monotonic() > deadline:
                missing = sorted(self.nodes.keys() - self.hub.nodes.keys())
                raise NodeFailed(f"{', '.join(missing)} did not register within {START_TIMEOUT_S:g} s")
            await asyncio.sleep(POLL_S)
        # Each node asked for the signals of its own process; here they are the command's.
        main = asyncio.current_task()
        assert main is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, main.cancel)

    async def generate(
        self,
        request_id: str,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        decode: str,
        prefill: str | None = None,
        handoff: str = "backoff",
    ) -> Generation:
        """One request on ``decode``, its prompt on ``prefill`` where the cut leaves anything to it."""
        d_node, carry = self.hub.nodes[decode], handoff == "carry"
        cut = None
        if prefill:
            cut = len(token_ids) if carry else cut_of(len(token_ids), d_node.register.num_modules)
        ticket = self._ticket(request_id, prefill) if prefill and cut else None
        message = DecodeRequest(
            request_id=request_id,
            token_ids=list(token_ids),
            sampling=sampling,
            ticket=ticket,
            cut=cut or 0,
            num_prompt_tokens=len(token_ids),
        )
        start_s = time.monotonic()
        with self.hub.open(d_node, message) as leg:
            accepted = await _answer(leg)
            if not isinstance(accepted, Accepted):
                raise NodeFailed(f"{decode} did not accept {request_id}: {accepted}")
            if prefill is None or ticket is None or cut is None:
                return await _collect(leg, start_s, None)
            work = PrefillRequest(
                request_id=request_id,
                token_ids=list(token_ids),
                cut=cut,
                ticket=ticket,
                sampling=sampling if carry else None,
            )
            with self.hub.open(self.hub.nodes[prefill], work, onward=leg) as p_leg:
                generation = await _collect(leg, start_s, p_leg)
        return generation

    def transports_of(self, decode: str) -> set[str]:
        """Transports that the decode node's transfers went over."""
        node = self.nodes[decode]
        assert isinstance(node, DecodeNode)
        return node.transports_used

    def _ticket(self, request_id: str, prefill: str) -> KVTicket:
        address = self.hub.nodes[prefill].register.transfer
        assert address is not None
        return KVTicket(
            transfer_id=request_id,
            engine_id=address.engine_id,
            incarnation=address.incarnation,
            host=address.host,
            port=address.port,
            transports=address.transports,
            lease_s=address.lease_s,
        )


async def _answer(leg: Leg) -> Accepted | Refused | TokenChunk | Finished:
    return await leg.answer(ANSWER_TIMEOUT_S, "its answer")


async def _collect(leg: Leg, start_s: float, p_leg: Leg | None) -> Generation:
    tokens: list[int] = []
    times_s: list[float] = []
    while True:
        answer = await _answer(leg)
        match answer:
            case TokenChunk():
                fresh = answer.token_ids[len(tokens) - answer.offset :]
                if fresh:  # token L may come from both nodes
                    tokens += fresh
                    times_s.append(time.monotonic() - start_s)
            case Finished() if answer.is_answer:
                total_s = time.monotonic() - start_s
                prefill = await _prefill_end(p_leg) if p_leg else None
                ttft_s = times_s[0] if times_s else total_s
                return Generation(tuple(tokens), answer, ttft_s, total_s, tuple(times_s), prefill)
            case _:
                raise BatonError(f"request {leg.request_id} went wrong: {answer}")


async def _prefill_end(leg: Leg) -> Finished:
    while True:
        answer = await _answer(leg)
        if isinstance(answer, Finished):
            return answer
        if isinstance(answer, Refused):
            raise NodeFailed(f"{leg.node.node_id} refused {leg.request_id}: {answer.reason}")
