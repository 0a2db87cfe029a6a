"""Where a job goes, and the messages that send it there: the policy applied to the nodes as they are now."""

import secrets

from common.block_hash import ExtraKeys, event_hash
from common.kv_ticket import KVTicket
from common.messages import DecodeRequest, PrefillRequest
from router import policy
from router.prefix_index import PrefixIndex
from router.prepare import Job, Services
from router.registry import Node


def choose(services: Services, job: Job, tried: set[str]) -> tuple[Node, Node | None, int, int] | None:
    """(D, P or None, cut, cached tokens predicted on D); None if no decode node is left."""
    nodes = [n for n in services.hub.nodes.values() if not n.draining]
    length = len(job.token_ids)
    decodes = [
        n
        for n in nodes
        if n.decodes
        and n.node_id not in tried
        and n.register.max_model_len >= job.num_prompt_tokens + job.sampling.max_tokens
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
        # P samples one first token: not n of them, and none where the client has it already.
        carry=options.handoff == "carry" and job.n == 1 and job.num_outputs == 0,
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


def decode_request(job: Job, ticket: KVTicket | None, cut: int, attempt: int) -> DecodeRequest:
    """A request that goes on has an id of its own: the node may still be ending what the client saw of it."""
    return DecodeRequest(
        request_id=f"{job.request_id}.{attempt}" if job.num_outputs else job.request_id,
        token_ids=job.token_ids,
        sampling=job.sampling,
        n=job.n,
        ticket=ticket,
        cut=cut,
        num_prompt_tokens=job.num_prompt_tokens,
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
        sampling=job.sampling if cut == len(job.token_ids) else None,
    )
