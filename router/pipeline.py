"""The walk of one request through the router.

    prepare   chat template, tokenize once, check against vocabulary and context
    walk      hash the prompt, choose D and P; DecodeRequest to D (with P's address); when D has reserved,
              PrefillRequest to P; then D's tokens become text until every sequence has ended

Failures: D refuses or dies before its first token -> the next D, a bounded number of times; D dies later ->
NodeFailed. P refuses or dies -> nothing to do here, D's transfer fails and D computes the rest. Whoever
stops iterating (the client left) aborts the request on both nodes: the legs see to it.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

import msgspec

from common.block_hash import ExtraKeys, event_hash
from common.errors import (
    BatonError,
    DeadlineExceeded,
    InvalidRequest,
    NodeFailed,
    NoNodeAvailable,
    Overloaded,
    PromptTooLong,
)
from common.kv_ticket import KVTicket
from common.messages import Accepted, DecodeRequest, Finished, PrefillRequest, Refused, TokenChunk
from common.metrics import Metrics
from common.request import SamplingParams
from common.tokenizer import Tokenizer
from router import policy
from router.choice_text import ChoiceText, Delta
from router.config import RouterConfig
from router.node_hub import Leg, NodeHub
from router.openai_responses import Usage
from router.openai_types import GenerationRequest, check_token_ids
from router.prefix_index import PrefixIndex
from router.registry import Node

logger = logging.getLogger(__name__)

LONG_TEXT_CHARACTERS = 20_000  # tokenized on a thread: it would hold up every stream


@dataclass(frozen=True)
class Services:
    """What a walk uses."""

    config: RouterConfig
    tokenizer: Tokenizer
    hub: NodeHub
    index: PrefixIndex
    metrics: Metrics


@dataclass(frozen=True)
class Job:
    """One prompt, ready to be placed. ``n`` sequences share it; choices count from ``first_index``."""

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    n: int
    first_index: int
    arrival_s: float  # time.monotonic()
    cache_salt: str | None = None
    priority: int = 0


async def prepare(services: Services, request: GenerationRequest, request_id: str) -> list[Job]:
    """Token ids of every prompt. Raises InvalidRequest, PromptTooLong or NoNodeAvailable."""
    arrival_s = time.monotonic()
    nodes = [node for node in services.hub.nodes.values() if node.decodes]
    if not nodes:
        raise NoNodeAvailable("no decode node is connected to this router; start one, or try again later")
    vocab_size = min(node.register.vocab_size for node in nodes)
    context = max(node.register.max_model_len for node in nodes)
    check_token_ids(request.sampling.stop_token_ids, vocab_size, "stop_token_ids")
    check_token_ids(list(request.sampling.logit_bias), vocab_size, "logit_bias")
    jobs = []
    for number, token_ids in enumerate(await _tokenize(services.tokenizer, request, vocab_size)):
        max_tokens = _max_tokens(len(token_ids), request.max_tokens, context)
        jobs.append(
            Job(
                request_id=f"{request_id}-{number}" if len(request.prompts) > 1 else request_id,
                token_ids=token_ids,
                sampling=msgspec.structs.replace(request.sampling, max_tokens=max_tokens),
                n=request.n,
                first_index=number * request.n,
                arrival_s=arrival_s,
                cache_salt=request.cache_salt,
                priority=request.priority,
            )
        )
    return jobs


async def encode(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
    if len(text) > LONG_TEXT_CHARACTERS:
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)
    return tokenizer.encode(text, add_special_tokens)


async def _tokenize(tokenizer: Tokenizer, request: GenerationRequest, vocab_size: int) -> list[list[int]]:
    if request.messages is not None:
        text = tokenizer.apply_chat_template(request.messages, add_generation_prompt=True)
        return [await encode(tokenizer, text, add_special_tokens=False)]
    prompts = []
    for prompt in request.prompts:
        if isinstance(prompt, str):
            token_ids = await encode(tokenizer, prompt)
        else:
            check_token_ids(prompt, vocab_size, "prompt")
            token_ids = prompt
        if not token_ids:
            raise InvalidRequest("the prompt is empty; give at least one token", param="prompt")
        prompts.append(token_ids)
    return prompts


def _max_tokens(num_prompt_tokens: int, wanted: int | None, context: int) -> int:
    room = context - num_prompt_tokens
    if room < 1:
        raise PromptTooLong(
            f"the prompt has {num_prompt_tokens} tokens; prompt and output together may have {context}. "
            "Shorten the prompt"
        )
    if wanted is not None and wanted > room:
        raise PromptTooLong(
            f"the prompt has {num_prompt_tokens} tokens and max_tokens is {wanted}; together they may have "
            f"{context}. Shorten the prompt or lower max_tokens to {room}"
        )
    return room if wanted is None else wanted


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


def choose(services: Services, job: Job, tried: set[str]) -> tuple[Node, Node | None, int, int] | None:
    """(D, P or None, cut, cached tokens predicted on D); None if no decode node is left."""
    nodes = [n for n in services.hub.nodes.values() if not n.draining]
    length = len(job.token_ids)
    decodes = [
        n
        for n in nodes
        if n.decodes
        and n.node_id not in tried
        and n.register.max_model_len >= length + job.sampling.max_tokens
    ]
    if not decodes:
        return None
    prefills = [n for n in nodes if n.prefills and n.register.max_model_len >= length]
    cached = cached_tokens(services.index, job, [*decodes, *prefills])
    options = services.config.policy
    best = policy.rank([_candidate(n, cached) for n in decodes], options.busy_tolerance)[0]
    decode = services.hub.nodes[best.node_id]
    placement = policy.place(
        length,
        decode.register.num_modules,
        best,
        [_candidate(n, cached) for n in prefills],
        busy_tolerance=options.busy_tolerance,
        min_remote_prefill_tokens=options.min_remote_prefill_tokens,
        computes_alone=decode.register.role == "both",
    )
    prefill = services.hub.nodes[placement.prefill.node_id] if placement.prefill is not None else None
    return decode, prefill, placement.cut, best.cached_tokens


def cached_tokens(index: PrefixIndex, job: Job, nodes: list[Node]) -> dict[str, int]:
    """Prompt tokens that each node's cache would hit, by the index; the last token is always computed."""
    extra = ExtraKeys(cache_salt=job.cache_salt) if job.cache_salt else None
    found: dict[str, int] = {}
    for hasher in {node.hasher for node in nodes}:
        hashes: list[bytes] = []
        hasher.extend(hashes, job.token_ids, extra)
        depths = index.matches([event_hash(digest) for digest in hashes])
        limit = (len(job.token_ids) - 1) // hasher.block_size
        for node in nodes:
            if node.hasher == hasher and node.node_id in depths:
                found[node.node_id] = min(depths[node.node_id], limit) * hasher.block_size
    return found


def _candidate(node: Node, cached: dict[str, int]) -> policy.Candidate:
    return policy.Candidate(
        node.node_id, node.num_requests, cached.get(node.node_id, 0), node.load.free_blocks
    )


def make_ticket(prefill: Node, job: Job) -> KVTicket:
    """A fresh ticket on ``prefill``, written before it has heard of the prompt."""
    address = prefill.register.transfer
    assert address is not None, "prefill nodes without a transfer address are refused"
    return KVTicket(
        transfer_id=f"{job.request_id}.{secrets.token_hex(4)}",
        engine_id=address.engine_id,
        incarnation=address.incarnation,
        host=address.host,
        port=address.port,
        transports=address.transports,
        lease_s=address.lease_s,
    )


def decode_request(job: Job, ticket: KVTicket | None, cut: int) -> DecodeRequest:
    return DecodeRequest(
        request_id=job.request_id,
        token_ids=job.token_ids,
        sampling=job.sampling,
        n=job.n,
        ticket=ticket,
        cut=cut,
        num_prompt_tokens=len(job.token_ids),
        priority=job.priority,
        cache_salt=job.cache_salt,
    )


def prefill_request(job: Job, ticket: KVTicket, cut: int, attempt: int) -> PrefillRequest:
    """Each attempt has an id of its own on P, which may still be ending the one before. On D the id stays:
    unseeded random numbers are drawn from it."""
    return PrefillRequest(
        request_id=f"{job.request_id}.{attempt}" if attempt else job.request_id,
        token_ids=job.token_ids,
        cut=cut,
        ticket=ticket,
        priority=job.priority,
        cache_salt=job.cache_salt,
    )


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
