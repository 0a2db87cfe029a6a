"""A hand-over between two engines in one process: P's final blocks are copied into D's reserved ones."""

from typing import Literal

from common.engine.batch import RequestUpdate
from common.engine.engine import Engine
from common.engine.first_token import decode_first_token, encode_first_token, first_token_of
from common.kv_cache.layout import NULL_BLOCK
from common.kv_cache.storage import KVStorage
from common.request import FinishReason, Request, RequestState
from router.policy import cut_of

Handoff = Literal["backoff", "carry"]
HANDOFFS: tuple[Handoff, ...] = ("backoff", "carry")


def hand_over(
    prefill: tuple[Engine, KVStorage],
    decode: tuple[Engine, KVStorage],
    request: Request,
    num_modules: int,
    *,
    handoff: Handoff = "backoff",
    ship_carry: bool = True,
    broken_at: int | None = None,
) -> RequestUpdate | None:
    """Runs ``request``'s prompt on P to the cut, moves its KV to D and makes it ready there.

    ``handoff`` "carry": to the end of the prompt, and token L with it. ``broken_at``: the transfer ends
    early, only blocks wholly below that position have arrived. Returns P's last word, None where P had no
    part; a request that ended on P is gone from both engines.
    """
    p_engine, p_storage = prefill
    d_engine, d_storage = decode
    cut = request.num_tokens if handoff == "carry" else cut_of(request.num_tokens, num_modules)
    if cut is None:
        d_engine.add(request)
        return None
    d_engine.reserve(request, cut)
    remote = Request(
        request.request_id, list(request.token_ids), request.sampling, stop_at=cut, hold_blocks=True,
        extra_keys=request.extra_keys, num_prompt_tokens=request.num_prompt_tokens,
    )  # fmt: skip
    last = compute(p_engine, remote)
    if last.finish_reason is not FinishReason.CUT:
        p_engine.release(remote.request_id)
        d_engine.abort(request.request_id)
        return last
    assert remote.num_computed == cut
    for g, blocks in d_engine.wanted(request.request_id, cut).items():
        size = d_storage.layout.groups[g].block_size
        for i, destination in blocks.items():
            if broken_at is not None and (i + 1) * size > broken_at:
                continue
            source = remote.tables[g][i]
            assert source != NULL_BLOCK
            d_storage.block_bytes(g)[destination] = p_storage.block_bytes(g)[source]
    first = first_token_of(last)
    carry = p_engine.runner.carry_rows(remote.request_id, at_most=None if first else 1)
    p_engine.release(remote.request_id)
    if broken_at is not None:
        d_engine.kv_failed(request.request_id, min(broken_at, cut))
        return last
    extra = encode_first_token(first)
    d_engine.kv_arrived(request.request_id, cut, carry if ship_carry else None, decode_first_token(extra))
    return last


def compute(engine: Engine, prefill: Request, max_steps: int = 500) -> RequestUpdate:
    """Steps P until ``prefill`` is held; its last update."""
    engine.add(prefill)
    for _ in range(max_steps):
        updates = engine.step().updates
        engine.check_invariants()
        for update in updates:
            if update.request_id == prefill.request_id and update.finish_reason is not None:
                assert prefill.state is RequestState.HELD
                return update
    raise AssertionError(f"{prefill!r} is not done after {max_steps} steps")
