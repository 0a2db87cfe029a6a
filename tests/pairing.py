"""A hand-over between two engines in one process: P's final blocks are copied into D's reserved ones."""

from common.engine.engine import Engine
from common.kv_cache.layout import NULL_BLOCK
from common.kv_cache.storage import KVStorage
from common.request import Request, RequestState
from tests.builders import drain, make_request


def cut_of(prompt_len: int, num_modules: int) -> int | None:
    """C = L - max(1, N-1), None where there is no remote prefill."""
    backoff = max(1, num_modules - 1)
    return prompt_len - backoff if prompt_len > backoff else None


def hand_over(
    prefill: tuple[Engine, KVStorage],
    decode: tuple[Engine, KVStorage],
    request: Request,
    num_modules: int,
    *,
    ship_carry: bool = True,
    broken_at: int | None = None,
) -> None:
    """Runs ``request``'s prompt on P to the cut, moves its KV to D and makes it ready there.

    ``broken_at``: the transfer ends early, only blocks wholly below that position have arrived.
    """
    p_engine, p_storage = prefill
    d_engine, d_storage = decode
    cut = cut_of(request.num_tokens, num_modules)
    if cut is None:
        d_engine.add(request)
        return
    d_engine.reserve(request, cut)
    remote = make_request(request.token_ids, stop_at=cut, hold_blocks=True)
    p_engine.add(remote)
    drain(p_engine)
    assert remote.state is RequestState.HELD
    assert remote.num_computed == cut
    for g, blocks in d_engine.wanted(request.request_id, cut).items():
        size = d_storage.layout.groups[g].block_size
        for i, destination in blocks.items():
            if broken_at is not None and (i + 1) * size > broken_at:
                continue
            source = remote.tables[g][i]
            assert source != NULL_BLOCK
            d_storage.block_bytes(g)[destination] = p_storage.block_bytes(g)[source]
    carry = p_engine.runner.carry_row(remote.request_id)
    p_engine.release(remote.request_id)
    if broken_at is not None:
        d_engine.kv_failed(request.request_id, min(broken_at, cut))
        return
    d_engine.kv_arrived(request.request_id, cut, carry if ship_carry else None)
