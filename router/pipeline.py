"""The walk of one request through the router.

    prepare   (prepare.py) chat template, tokenize once, check against vocabulary and context
    walk      hash the prompt, choose D and P; DecodeRequest to D (with P's address); when D has reserved,
              PrefillRequest to P; then D's tokens become text until every sequence has ended

Failures: D refuses or dies before its first token -> the next D, a bounded number of times; D dies later ->
NodeFailed. P refuses or dies -> nothing to do here, D's transfer fails and D computes the rest. Whoever
stops iterating (the client left) aborts the request on both nodes: the legs see to it.
"""

import contextlib
import logging
import time
from collections.abc import AsyncGenerator

from common.errors import (
    BatonError,
    DeadlineExceeded,
    InvalidRequest,
    NodeFailed,
    NoNodeAvailable,
    Overloaded,
)
from common.messages import Accepted, Finished, Refused, TokenChunk
from common.metrics import Metrics
from router.choice_text import ChoiceText, Delta
from router.node_hub import Leg
from router.openai_responses import Usage
from router.placement import choose, decode_request, make_ticket, prefill_request
from router.prepare import Job, Services
from router.registry import Node

logger = logging.getLogger(__name__)


async def walk(services: Services, job: Job, usage: Usage) -> AsyncGenerator[Delta, None]:
    """Yields text of the job's choices as it comes; adds to ``usage`` when all have ended.

    Raises NoNodeAvailable, Overloaded, NodeFailed, DeadlineExceeded, or what a node says is wrong with
    the request. Iterate it under ``contextlib.aclosing``: leaving early aborts on the nodes.
    """
    config = services.config
    tried: set[str] = set()
    failure: BatonError | None = None
    started = False
    for attempt in range(config.limits.max_decode_attempts):
        chosen = choose(services, job, tried)
        if chosen is None:
            break
        decode, prefill, cut, predicted = chosen
        tried.add(decode.node_id)
        ticket = make_ticket(prefill, job) if prefill is not None else None
        try:
            with contextlib.ExitStack() as legs:
                leg = legs.enter_context(services.hub.open(decode, decode_request(job, ticket, cut)))
                await _reserved(leg, config.timeouts.reserve_timeout_s)
                if prefill is not None and ticket is not None:
                    # Only now: P never computes for a D that has no room.
                    prefill_leg = services.hub.open(prefill, prefill_request(job, ticket, cut, attempt))
                    legs.enter_context(prefill_leg)
                services.metrics.counter("router_placements").labels(
                    "local" if prefill is None else "remote"
                ).inc()
                services.metrics.counter("router_cached_tokens_predicted").inc(predicted)
                async with contextlib.aclosing(_tokens(services, job, leg, prefill, usage)) as deltas:
                    async for delta in deltas:
                        started = True
                        yield delta
            return
        except (NodeFailed, NoNodeAvailable, Overloaded) as error:
            if started:
                raise
            failure = error
            services.metrics.counter("router_decode_retries").labels(type(error).__name__).inc()
            logger.warning("decode node %s: %s; trying another", decode.node_id, error.message)
    raise failure or NoNodeAvailable("no decode node can take this request now; try again later")


async def _reserved(leg: Leg, timeout_s: float) -> None:
    """Returns once D has accepted; raises what its refusal means."""
    try:
        answer = await leg.answer(timeout_s, "its acceptance")
    except DeadlineExceeded as error:
        raise NodeFailed(error.message) from None  # nothing was promised: the next node may be asked
    if isinstance(answer, Refused):
        raise _refusal(leg.node, answer)
    if not isinstance(answer, Accepted):
        raise NodeFailed(f"node {leg.node.node_id} answered {type(answer).__name__} before accepting")


def _refusal(node: Node, refused: Refused) -> BatonError:
    if not refused.retry and refused.http_status < 500:
        error: BatonError = InvalidRequest(refused.reason, param=refused.param)
        error.http_status = refused.http_status
        return error
    kind = Overloaded if refused.http_status == 429 else NoNodeAvailable
    return kind(f"decode node {node.node_id} refused: {refused.reason}")


async def _tokens(
    services: Services, job: Job, leg: Leg, prefill: Node | None, usage: Usage
) -> AsyncGenerator[Delta, None]:
    """D's answers as text, until every sequence has ended."""
    timeouts = services.config.timeouts
    wait_s = timeouts.prefill_timeout_s + timeouts.first_token_timeout_s
    if prefill is not None:
        wait_s += timeouts.transfer_timeout_s
    waiting_for = "the first token"
    choices = [ChoiceText(job.first_index + i, services.tokenizer, job.sampling) for i in range(job.n)]
    timing = _Timing(services.metrics, job)
    ends: list[Finished] = []
    while len(ends) < job.n:
        answer = await leg.answer(wait_s, waiting_for)
        match answer:
            case TokenChunk(index=index) if index < job.n:
                timing.tokens(index, len(answer.token_ids))
                wait_s, waiting_for = timeouts.between_tokens_timeout_s, "the next token"
                delta = choices[index].push(answer.token_ids, answer.logprobs)
                if delta is not None:
                    yield delta
            case Finished(index=index) if index < job.n and not choices[index].finished:
                if answer.reason not in ("stop", "length"):
                    raise NodeFailed(
                        f"node {leg.node.node_id} ended the request: {answer.error or answer.reason}"
                    )
                ends.append(answer)
                yield choices[index].finish(answer.reason, answer.stop_string)
            case Refused():
                raise _refusal(leg.node, answer)
            case _:
                raise NodeFailed(f"node {leg.node.node_id} answered nonsense: {answer!r:.200}")
    usage.add_prompt(len(job.token_ids), ends)
    timing.finished(ends)


class _Timing:
    """Latency and token metrics of one job."""

    def __init__(self, metrics: Metrics, job: Job) -> None:
        self._metrics = metrics
        self._job = job
        self._last_s: dict[int, float] = {}

    def tokens(self, index: int, count: int) -> None:
        now = time.monotonic()
        last = self._last_s.get(index)
        if last is None and not self._last_s:
            self._metrics.histogram("time_to_first_token_seconds").observe(now - self._job.arrival_s)
        if last is not None and count:
            # An accepted run arrives at once: its tokens share the time since the last one.
            for _ in range(count):
                self._metrics.histogram("inter_token_latency_seconds").observe((now - last) / count)
        self._last_s[index] = now

    def finished(self, ends: list[Finished]) -> None:
        metrics = self._metrics
        metrics.histogram("e2e_request_latency_seconds").observe(time.monotonic() - self._job.arrival_s)
        metrics.counter("prompt_tokens").inc(len(self._job.token_ids))
        metrics.counter("generation_tokens").inc(sum(end.output_tokens for end in ends))
        metrics.counter("router_cached_tokens_delivered").inc(max(end.cached_tokens for end in ends))
