"""The transfer's state machines, plan and digests: tables and pure functions, no I/O."""

import numpy as np
import pytest

from common.errors import ConfigError, ProtocolViolation
from kv_transfer import ucx_environment
from kv_transfer.config import TransferConfig
from kv_transfer.geometry import GroupGeometry
from kv_transfer.plan import GroupPool, RootDigest, gather, plan_chunks, plan_digest, scatter, view_of
from kv_transfer.protocol import (
    RECEIVER_TRANSITIONS,
    SENDER_TRANSITIONS,
    Machine,
    ReceiverEvent,
    ReceiverState,
    SenderEvent,
    SenderState,
    receiver_machine,
    sender_machine,
    tag_base,
)


@pytest.mark.parametrize("state", SenderState)
@pytest.mark.parametrize("event", SenderEvent)
def test_sender_event_moves_or_raises_and_leaves_the_state(state: SenderState, event: SenderEvent) -> None:
    machine = Machine("m", state, SENDER_TRANSITIONS)
    after = SENDER_TRANSITIONS[state].get(event)
    if after is None:
        assert not machine.allows(event)
        with pytest.raises(ProtocolViolation, match=f"{event.name} is illegal in state {state.name}"):
            machine.handle(event)
        assert machine.state is state
    else:
        assert machine.handle(event) is after
        assert machine.state is after


@pytest.mark.parametrize("state", ReceiverState)
@pytest.mark.parametrize("event", ReceiverEvent)
def test_receiver_event_moves_or_raises_and_leaves_the_state(
    state: ReceiverState, event: ReceiverEvent
) -> None:
    machine = Machine("m", state, RECEIVER_TRANSITIONS)
    after = RECEIVER_TRANSITIONS[state].get(event)
    if after is None:
        with pytest.raises(ProtocolViolation):
            machine.handle(event)
        assert machine.state is state
    else:
        assert machine.handle(event) is after


def test_blocks_are_released_only_when_quiet() -> None:
    into_released = [
        (s, e) for s, row in SENDER_TRANSITIONS.items() for e, t in row.items() if t is SenderState.RELEASED
    ]
    assert into_released == [(SenderState.DRAINING, SenderEvent.QUIET)]
    assert not SENDER_TRANSITIONS[SenderState.RELEASED]


def test_a_fetch_that_has_posted_receives_fails_only_through_the_fence() -> None:
    into_failed = {s for s, row in RECEIVER_TRANSITIONS.items() if ReceiverState.FAILED in row.values()}
    assert into_failed == {ReceiverState.FENCING, ReceiverState.QUARANTINED}
    for state in (ReceiverState.ASKING, ReceiverState.RECEIVING, ReceiverState.CLOSING):
        assert RECEIVER_TRANSITIONS[state][ReceiverEvent.STOP] is ReceiverState.FENCING


def test_good_walks() -> None:
    sender = sender_machine("t")
    for event in (SenderEvent.PULL, SenderEvent.FINISH_SENT, SenderEvent.COMMIT, SenderEvent.QUIET):
        sender.handle(event)
    assert sender.state is SenderState.RELEASED
    receiver = receiver_machine("t")
    walk = (
        ReceiverEvent.CONNECTED,
        ReceiverEvent.RETRY,
        ReceiverEvent.PULL_OK,
        ReceiverEvent.CHUNK,
        ReceiverEvent.FINISH,
        ReceiverEvent.CHUNK,
        ReceiverEvent.COMPLETE,
    )
    for step in walk:
        receiver.handle(step)
    assert receiver.state is ReceiverState.COMMITTED


def test_tags_of_attempts_never_meet() -> None:
    bases = {tag_base(attempt) for attempt in (0, 1, 2, 255, 2**40 - 1)}
    assert len(bases) == 5
    assert all(base % (1 << 24) == 0 and base < 1 << 64 for base in bases)


def test_plan_covers_every_wanted_block_once_in_order_of_finality() -> None:
    geometry = (GroupGeometry(16, 1000), GroupGeometry(8, 10))
    want = {0: [0, 1, 2, 5, 6], 1: list(range(70))}
    chunks = plan_chunks(want, geometry, 2000)
    assert [c.seq for c in chunks] == list(range(len(chunks)))
    for group, positions in want.items():
        assert [p for c in chunks if c.group == group for p in c.positions] == positions
    ends = [(c.positions[-1] + 1) * geometry[c.group].block_size for c in chunks]
    assert ends == sorted(ends)
    assert all(len(c.positions) <= 2 for c in chunks if c.group == 0)
    assert max(len(c.positions) for c in chunks if c.group == 1) == 256 // 8  # the span limit, not the bytes
    assert plan_chunks({0: [], 1: []}, geometry, 2000) == ()
    assert plan_digest(chunks) != plan_digest(chunks[:-1])
    assert plan_chunks({0: [3]}, geometry, 1) == plan_chunks({0: [3]}, geometry, 10**9)


def test_gather_and_scatter_are_inverse_and_in_place_when_consecutive() -> None:
    pool = GroupPool(np.arange(60, dtype=np.uint8).reshape(10, 6), 4)
    view, copied = gather(pool, [3, 4, 5])
    assert not copied
    pool.array_NB[4] = 0
    assert bytes(view[6:12]) == bytes(6)  # it is the pool itself
    view, copied = gather(pool, [7, 2, 9])
    assert copied
    target = GroupPool(np.zeros((10, 6), np.uint8), 4)
    scatter(target, [0, 5, 1], view)
    assert (target.array_NB[[0, 5, 1]] == pool.array_NB[[7, 2, 9]]).all()
    assert view_of(target.array_NB).nbytes == 60
    with pytest.raises(ValueError, match="contiguous"):
        _ = GroupPool(np.zeros((4, 8), np.uint8)[:, ::2], 4).array_NB


def test_root_is_bound_to_transfer_attempt_and_positions() -> None:
    def root(transfer_id: str, attempt: int, positions: list[int], carry: bytes = b"c") -> bytes:
        digest = RootDigest(transfer_id, attempt)
        for chunk in plan_chunks({0: positions}, (GroupGeometry(16, 8),), 8):
            digest.add(chunk, b"same bytes")
        return digest.finish(carry, b"")

    base = root("a", 1, [1, 2])
    assert base == root("a", 1, [1, 2])
    others = [root("b", 1, [1, 2]), root("a", 2, [1, 2]), root("a", 1, [1, 3]), root("a", 1, [1, 2], b"d")]
    assert len({base, *others}) == 5


def test_config_refuses_nonsense_by_name() -> None:
    with pytest.raises(ConfigError, match="transport is 'rdma'"):
        TransferConfig(transport="rdma")
    with pytest.raises(ConfigError, match="chunk_bytes is 0"):
        TransferConfig(chunk_bytes=0)
    with pytest.raises(ConfigError, match="heartbeat_s 5"):
        TransferConfig(heartbeat_s=5.0)


def test_ucx_environment_respects_the_operator() -> None:
    environ = {"UCX_TLS": "tcp"}
    in_force = ucx_environment.apply(environ)
    assert in_force["UCX_TLS"] == environ["UCX_TLS"] == "tcp"
    assert environ["UCX_POSIX_ERROR_HANDLING"] == "y"
    assert environ["UCX_RNDV_THRESH"] != "inf"
    assert "UCX_LOG_FILE" in environ
