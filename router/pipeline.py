"""The walk of one request through the router.

    prepare   (prepare.py) chat template, tokenize once, check against vocabulary and context
    walk      hash the prompt, choose D and P; DecodeRequest to D (with P's address); when D has reserved,
              PrefillRequest to P; then D's tokens become text until every sequence has ended

Failures: D refuses or dies before its first token -> the next D, a bounded number of times (and with the
token that P has told, if the client saw it); D dies later -> NodeFailed. P refuses or dies -> nothing to do
here, D's transfer fails and D computes the rest, or ends the request where it was told to (TransferFailed).
Whoever stops iterating (the client left) aborts the request on both nodes: the legs see to it.
"""

import contextlib
import logging
from collections.abc import AsyncGenerator

from common.errors import (
    BatonError,
    DeadlineExceeded,
    InvalidRequest,
    NodeFailed,
    NoNodeAvailable,
    Overloaded,
    TransferFailed,
)
from common.messages import Accepted, Finished, Refused, TokenChunk
from router.choice_text import Delta
from router.node_hub import Leg
from router.openai_responses import Usage
from router.placement import choose, decode_request, make_ticket, prefill_request
from router.prepare import Job, Services
from router.progress import Contradicted, Progress
from router.registry import Node

logger = logging.getLogger(__name__)


async def walk(services: Services, job: Job, usage: Usage) -> AsyncGenerator[Delta, None]:
    """Yields text of the job's choices as it comes; adds to ``usage`` when all have ended.

    Raises NoNodeAvailable, Overloaded, NodeFailed, TransferFailed, DeadlineExceeded, or what a node says is
    wrong with the request. Iterate it under ``contextlib.aclosing``: leaving early aborts on the nodes.
    """
    config = services.config
    tried: set[str] = set()
    failure: BatonError | None = None
    progress, shown, from_prefill = Progress(services, job), False, False
    for attempt in range(config.limits.max_decode_attempts):
        if not shown:  # what the client has not seen may come anew
            progress = Progress(services, job)
        rest = progress.rest() if shown else job
        chosen = choose(services, rest, tried)
        if chosen is None:
            break
        decode, prefill, cut, predicted = chosen
        tried.add(decode.node_id)
        ticket = make_ticket(prefill, rest) if prefill is not None else None
        try:
            with contextlib.ExitStack() as legs:
                leg = legs.enter_context(
                    services.hub.open(decode, decode_request(rest, ticket, cut, attempt))
                )
                await _reserved(leg, config.timeouts.reserve_timeout_s)
                if prefill is not None and ticket is not None:
                    # Only now: P never computes for a D that has no room.
                    work = prefill_request(rest, ticket, cut, attempt)
                    from_prefill = from_prefill or work.sampling is not None
                    legs.enter_context(services.hub.open(prefill, work, onward=leg))
                services.metrics.counter("router_placements").labels(
                    "local" if prefill is None else "remote"
                ).inc()
                services.metrics.counter("router_cached_tokens_predicted").inc(predicted)
                async with contextlib.aclosing(_deltas(services, progress, leg, prefill)) as deltas:
                    async for delta in deltas:
                        shown = True
                        yield delta
            progress.account(usage)
            return
        except (NodeFailed, NoNodeAvailable, Overloaded) as error:
            if shown and not (from_prefill and progress.num_tokens == 1):
                raise
            if isinstance(error, Contradicted):
                tried.discard(decode.node_id)
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


async def _deltas(
    services: Services, progress: Progress, leg: Leg, prefill: Node | None
) -> AsyncGenerator[Delta, None]:
    """The answers on D's leg as text, until every sequence has ended."""
    timeouts = services.config.timeouts
    wait_s = timeouts.prefill_timeout_s + timeouts.first_token_timeout_s
    if prefill is not None:
        wait_s += timeouts.transfer_timeout_s
    waiting_for = "the first token"
    while not progress.complete:
        answer = await leg.answer(wait_s, waiting_for)
        match answer:
            case TokenChunk(index=index) if index < leg.num_sequences:
                delta = progress.take(answer)
                if leg.begun:  # until then D may still wait for KV
                    wait_s, waiting_for = timeouts.between_tokens_timeout_s, "the next token"
                if delta is not None:
                    yield delta
            case Finished() if progress.expects(answer):
                if answer.transfer_failed:
                    raise TransferFailed(f"decode node {leg.node.node_id}: {answer.error}")
                if not answer.is_answer:
                    raise NodeFailed(
                        f"node {leg.node.node_id} ended the request: {answer.error or answer.reason}"
                    )
                yield progress.end(answer)
            case Refused():
                raise _refusal(leg.node, answer)
            case _:
                raise NodeFailed(f"node {leg.node.node_id} answered nonsense: {answer!r:.200}")
