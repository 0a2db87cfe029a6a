"""Cases that broke other systems, one test each, on a virtual clock with production timeouts.

Each ends with `at_rest`: one outcome a transfer, every block back and empty, nothing in quarantine, no hold.
"""

import asyncio
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest

from kv_transfer.config import TransferConfig
from kv_transfer.protocol import PROTOCOL_VERSION, Abort, Heartbeat, Hello, Message, OpenLane, PullOk
from tests.virtual.lanes import FakeLane
from tests.virtual.nodes import NUM_BLOCKS, PORT, DecodeNode, Ended, Plan, PrefillNode
from tests.virtual.world import World

CONFIG = TransferConfig(chunk_bytes=2 * 64, window_chunks=2)  # all times are the defaults


class Pair:
    """One P, one D, and what a router does."""

    def __init__(self) -> None:
        self.world = World(1)
        self.p = PrefillNode(self.world, "p", "host-p", CONFIG)
        self.d = DecodeNode(self.world, "d", "host-d", CONFIG)
        self.world.pass_time(0.1)

    def offer(self, plan: Plan) -> None:
        self.p.process.spawn(self.p.prefill(plan))

    def ask(self, plan: Plan) -> None:
        self.d.process.spawn(self.d.decode(plan, self.p.ticket(plan.name)))

    def abort(self, plan: Plan) -> None:
        self.d.process.spawn(self.d.abort(plan.name))

    def until(self, condition: Callable[[], bool], limit_s: float = 60.0) -> None:
        assert self.world.run(condition, limit_s), f"not within {limit_s} s:\n" + "\n".join(self.world.story)

    def end_of(self, plan: Plan, limit_s: float = 60.0) -> Ended:
        self.until(lambda: bool(self.d.ended_as(plan.name)), limit_s)
        return self.d.ended_as(plan.name)[-1]

    def transfer(self, number: int, **changes: object) -> Ended:
        plan = plan_of(number, **changes)
        self.offer(plan)
        self.ask(plan)
        return self.end_of(plan)

    def moving(self, plan: Plan) -> None:
        """Until bytes of a transfer are on their way and some chunks arrived."""
        self.offer(plan)
        self.ask(plan)
        self.until(lambda: self.d.receiver.metrics.chunks_received >= 2 and bool(self.world.fabric.moving))

    def restart_p(self) -> None:
        self.world.kill(self.p.process)
        self.world.pass_time(0.01)
        self.p = PrefillNode(self.world, "p'", "host-p", CONFIG)
        self.world.pass_time(0.3)

    def at_rest(self, limit_s: float = 60.0) -> None:
        self.world.calm()
        self.until(lambda: self.p.sender.num_held == 0 and self.d.num_fetching == 0, limit_s)
        assert self.world.problems == []
        assert (self.p.memory.whole(), self.d.memory.whole()) == ([], [])
        assert self.p.released == self.p.offered
        assert not self.d.receiver.quarantined
        assert not self.d.quarantined


@contextmanager
def pair() -> Iterator[Pair]:
    it = Pair()
    try:
        yield it
        it.at_rest()
    finally:
        it.world.end()


def plan_of(number: int, **changes: object) -> Plan:
    plan = Plan(number, 12, 0, frozenset(), 0.0, 0.0, 12, 0.01)
    return Plan(**{**{f: getattr(plan, f) for f in plan.__dataclass_fields__}, **changes})


# --- leases and tickets -------------------------------------------------------------------------------------


def test_stale_ticket_after_the_blocks_were_reused() -> None:
    with pair() as it:
        old = plan_of(1, num_blocks=20)
        it.offer(old)
        it.until(lambda: it.p.released["t1"] == 1)  # nobody asked: the lease ended
        for number in (2, 3):  # blocks are taken from the front: t1's are among these
            it.offer(plan_of(number, num_blocks=20))
        it.world.pass_time(1.0)
        it.ask(old)
        assert it.end_of(old).reason.startswith("expired: the lease ended before the blocks were asked for")
        assert it.p.sender.metrics.bytes_sent == 0


def test_a_renewed_lease_hides_no_expired_one_and_a_wrong_name_renews_nothing() -> None:
    with pair() as it:
        asked, forgotten = plan_of(1, ending="stall"), plan_of(2)
        it.moving(asked)  # its reader renews it
        it.offer(forgotten)
        sessions = list(it.p.sender._sessions)
        start = it.world.now
        for _ in range(25):
            it.world.pass_time(1.0)
            it.p.sender.renew(("t", "t22", ""))
        assert (it.p.released["t1"], it.p.released["t2"], len(sessions)) == (0, 0, 1)
        # nothing else happens: cleaning up needs no new work
        it.until(lambda: it.p.released["t2"] == 1, CONFIG.lease_s + 0.1 - (it.world.now - start))
        assert it.p.released["t1"] == 0
        it.abort(asked)
        assert it.end_of(asked).what == "cancelled"


def test_rejected_before_admission_the_prefill_node_does_not_hold_on() -> None:
    with pair() as it:
        assert it.transfer(1).what == "committed"
        plan = plan_of(2, drop=True)
        it.offer(plan)
        it.world.pass_time(0.05)
        it.ask(plan)
        it.until(lambda: it.p.released["t2"] == 1, 0.1)


def test_a_prompt_larger_than_the_decode_node_can_reserve_is_refused_and_blocks_nobody() -> None:
    with pair() as it:
        first, second = plan_of(1, num_blocks=30, ending="stall"), plan_of(2, num_blocks=NUM_BLOCKS - 20)
        it.ask(first)
        it.ask(second)  # nothing of it is reserved while it waits for the rest: it is refused at once
        assert it.end_of(second, 1.0).what == "refused"
        it.offer(first)
        it.abort(first)
        assert it.end_of(first).what == "cancelled"


def test_the_prefill_node_refuses_after_the_decode_node_reserved() -> None:
    with pair() as it:
        plan = plan_of(1, ending="stall")
        it.ask(plan)
        it.offer(plan)
        it.world.pass_time(0.5)
        it.p.process.spawn(it.p.abort("t1"))
        assert it.end_of(plan, 0.5).reason == "refused: aborted by the router"


# --- aborts -------------------------------------------------------------------------------------------------


def test_aborted_in_mid_transfer_and_its_blocks_are_wanted_at_once() -> None:
    with pair() as it:
        it.world.fabric.slow_s = 0.2
        first = plan_of(1, num_blocks=NUM_BLOCKS)
        it.moving(first)
        it.abort(first)
        assert it.end_of(first).what == "cancelled"
        assert it.transfer(2, num_blocks=NUM_BLOCKS).what == "committed"  # all the same blocks


def test_the_acknowledgement_of_an_abort_is_lost() -> None:
    with pair() as it:
        it.world.fabric.slow_s = 0.2
        plan = plan_of(1, num_blocks=30)
        it.moving(plan)
        it.world.cut("host-p", "host-d")
        it.abort(plan)
        end = it.end_of(plan)
        assert end.what == "cancelled"
        assert it.d.receiver.metrics.fences_forced == 1
        it.world.calm()
        assert it.transfer(2).what == "committed"


def test_two_aborts_for_one_transfer() -> None:
    with pair() as it:
        it.world.network.duplicate = 1.0
        plan = plan_of(1, num_blocks=30)
        it.moving(plan)
        it.abort(plan)
        it.abort(plan)
        assert it.end_of(plan).what == "cancelled"
        it.world.network.duplicate = 0.0
        it.world.pass_time(1.0)
        assert len(it.d.ended) == 1
        assert it.p.sender.metrics.messages_unexpected > 0
        assert it.transfer(2).what == "committed"


def test_the_decode_node_aborts_and_the_prefill_node_crashes() -> None:
    with pair() as it:
        it.world.fabric.slow_s = 0.2
        plan = plan_of(1, num_blocks=30)
        it.moving(plan)
        it.abort(plan)
        it.world.kill(it.p.process, silent=True)
        assert it.end_of(plan, 5.0).what == "cancelled"
        assert it.d.memory.whole() == []
        it.world.host_is_back("host-p")
        it.restart_p()
        assert it.transfer(2).what == "committed"


def test_a_batch_cancelled_at_random_bytes() -> None:
    with pair() as it:
        it.world.fabric.slow_s = 0.1
        plans = [plan_of(n, num_blocks=6, piece=2) for n in range(7)]
        for plan in plans:
            it.offer(plan)
            it.ask(plan)
            it.world.after(it.world.random.uniform(0.0, 0.6), it.abort, plan)
        for plan in plans:
            it.end_of(plan)
        assert {end.what for end in it.d.ended} <= {"cancelled", "committed"}
        assert sum(end.what == "cancelled" for end in it.d.ended) >= 3
    assert it.world.fabric.num_pending() == 0


def test_given_up_before_the_offer_and_wanted_again() -> None:
    with pair() as it:
        plan = plan_of(1)
        it.ask(plan)
        it.world.pass_time(0.5)
        it.abort(plan)
        assert it.end_of(plan).what == "cancelled"
        it.ask(plan)
        it.world.pass_time(0.5)
        it.offer(plan)
        it.until(lambda: len(it.d.ended) == 2)
        assert it.d.ended[1].what == "committed", it.d.ended[1]


# --- what fits and what is there already --------------------------------------------------------------------


def test_a_full_hit_fetches_nothing_and_frees_the_prefill_node() -> None:
    with pair() as it:
        assert it.transfer(1, want_nothing=True).what == "committed"
        assert it.d.receiver.metrics.bytes_received == 0
        it.until(lambda: it.p.released["t1"] == 1, 0.1)


@pytest.mark.parametrize("short", [0, 15, 16, 31])
def test_one_token_more_or_less_at_a_block_edge(short: int) -> None:
    with pair() as it:
        end = it.transfer(1, num_blocks=4, short_tokens=short)
        assert end.what == "committed", end


# --- messages -----------------------------------------------------------------------------------------------


def test_an_answer_for_a_transfer_that_nobody_registered_is_counted() -> None:
    with pair() as it:
        assert it.transfer(1).what == "committed"
        (session,) = it.p.sender._sessions
        it.p.process.loop.deliver(
            session.connection.send, PullOk(transfer_id="t9", attempt=9, num_chunks=1, plan_digest=b"")
        )
        (mine,) = [opening.task.result() for opening in it.d.receiver._sessions.values()]
        it.d.process.loop.deliver(
            mine.send, Abort(transfer_id="t9", attempt=9, generation=0, credits=3, reason="never asked")
        )
        it.world.pass_time(0.1)
        assert it.d.receiver.metrics.messages_unexpected == 1
        assert it.transfer(2).what == "committed"


@pytest.mark.parametrize("slow", ["control", "data"])
def test_bytes_and_their_announcement_in_either_order(slow: str) -> None:
    with pair() as it:
        if slow == "control":
            it.world.network.slow_s = 0.5
        else:
            it.world.fabric.slow_s = 0.5
        assert it.transfer(1).what == "committed"


def test_one_of_many_sends_fails_to_post() -> None:
    with pair() as it:
        other = plan_of(2, num_blocks=4, ending="stall")
        it.offer(other)
        it.ask(other)
        it.world.pass_time(0.5)
        plan = plan_of(1, num_blocks=30, piece=10, piece_s=0.5)
        it.offer(plan)
        it.ask(plan)
        it.until(lambda: it.d.receiver.metrics.chunks_received >= 4)
        it.world.pass_time(0.2)
        it.world.fabric.bug = "send"  # at the next extend(), inside the node's own step
        end = it.end_of(plan, 5.0)
        assert end.what == "failed"
        assert "a bug in post_send" in end.reason
        assert not it.d.ended_as("t2")  # the other one goes on
        it.abort(other)
        assert it.end_of(other).what == "cancelled"


class _Stranger(asyncio.Protocol):
    def __init__(self, what: bytes) -> None:
        self._what = what

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._what)


def _frame(version: int, body: bytes) -> bytes:
    return struct.pack("!I", len(body) + 1) + bytes((version,)) + body


IMPOSSIBLE_GEOMETRY = {
    "type": "hello",
    "engine_id": "x",
    "incarnation": "x",
    "fingerprint": "fp",
    "geometry": [{"block_size": 0, "block_bytes": 64}],
    "transports": [],
    "addresses": {},
}


def _packed(message: Message) -> bytes:
    return msgspec.msgpack.encode(message)


@pytest.mark.parametrize(
    "what",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("!I", 0xFFFFFFF0) + b"x",
        struct.pack("!I", 0),
        _frame(PROTOCOL_VERSION - 1, b"\x80"),
        _frame(PROTOCOL_VERSION, b"\xc1\xc1"),
        _frame(PROTOCOL_VERSION, _packed(Heartbeat(renew=("t1",)))),
        _frame(
            PROTOCOL_VERSION,
            _packed(
                Hello(
                    engine_id="x",
                    incarnation="x",
                    fingerprint="other",
                    geometry=(),
                    transports=(),
                    addresses={},
                )
            ),
        ),
        _frame(PROTOCOL_VERSION, msgspec.msgpack.encode(IMPOSSIBLE_GEOMETRY)),
    ],
    ids=[
        "http",
        "oversize",
        "empty",
        "older version",
        "garbage",
        "no hello",
        "other fingerprint",
        "impossible geometry",
    ],
)
def test_a_peer_that_speaks_garbage_is_shut_out_and_harms_nobody(what: bytes) -> None:
    with pair() as it:
        plan = plan_of(1, ending="stall")
        it.ask(plan)
        it.offer(plan)
        it.world.pass_time(0.5)
        stranger = it.world.start("stranger", "host-x")
        stranger.spawn(it.world.network.connect(stranger, lambda: _Stranger(what), "host-p", PORT))
        it.world.pass_time(1.0)
        assert not [socket for socket in it.world.network.sockets if socket.process is stranger]
        it.p.sender.finish("t1", b"carry of 1/1", b"extra")
        assert it.end_of(plan).what == "committed"


def test_a_repeated_request_for_a_lane_leaves_the_lane_alone() -> None:
    with pair() as it:
        assert it.transfer(1).what == "committed"
        (mine,) = [opening.task.result() for opening in it.d.receiver._sessions.values()]
        assert isinstance(mine.lane, FakeLane)
        again = OpenLane(transport="fake", token=mine.lane.token, probe_tag=1 << 24)
        it.d.process.loop.deliver(mine.send, again)
        it.world.pass_time(2.0)
        assert it.p.sender.metrics.messages_unexpected == 1
        assert it.transfer(2).what == "committed"


def test_a_receive_that_fails_to_post_fails_its_transfer_at_once() -> None:
    with pair() as it:
        plan = plan_of(1, num_blocks=30)
        it.moving(plan)
        it.world.fabric.bug = (
            "recv"  # when the next window is posted, in the callback of a receive that ended
        )
        end = it.end_of(plan, 3.0)
        assert end.reason.startswith("internal: RuntimeError('a bug in post_recv')")
        assert it.transfer(2).what == "committed"


def test_a_drop_finds_a_lane_that_fails_to_post_and_is_only_not_delivered() -> None:
    with pair() as it:
        it.world.fabric.bug = "recv"
        plan = plan_of(1, drop=True)
        it.ask(plan)
        assert it.end_of(plan).what == "dropped"


# --- liveness -----------------------------------------------------------------------------------------------


def test_a_silent_prefill_node_is_suspect_after_3_s_and_dead_after_10() -> None:
    with pair() as it:
        plan = plan_of(1, ending="stall")
        it.moving(plan)
        it.world.kill(it.p.process, silent=True)
        died = it.world.now
        it.until(lambda: it.d.receiver.metrics.peers_suspected == 1, 5.0)
        assert 3.0 <= it.world.now - died <= 4.5
        assert it.end_of(plan, 12.0).reason.startswith("peer_lost: host-p:7000 was silent for")
        assert 10.0 <= it.world.now - died <= 12.5
        it.world.host_is_back("host-p")
        it.restart_p()


def test_a_stopped_decode_node_gives_the_blocks_back_before_the_lease_does() -> None:
    with pair() as it:
        it.world.fabric.slow_s = 0.2
        plan = plan_of(1, num_blocks=30)
        it.moving(plan)
        it.world.stop(it.d.process)
        sent = it.p.sender.metrics.bytes_sent
        it.world.pass_time(9.0)
        assert it.p.released["t1"] == 0
        assert it.p.sender.metrics.bytes_sent <= sent + 128, "a completion though the receiver stands still"
        it.until(lambda: it.p.released["t1"] == 1, 12.0)
        it.world.resume(it.d.process)
        assert it.end_of(plan).what == "failed"
        assert it.transfer(2).what == "committed"


def test_first_transfer_after_an_hour_of_idling() -> None:
    with pair() as it:
        assert it.transfer(1).what == "committed"
        it.world.pass_time(3600.0)
        assert it.transfer(2).what == "committed"
        assert it.d.receiver.metrics.peers_lost == 0


def test_a_cut_network_stalls_one_request_for_3_s_and_the_next_ones_not_at_all() -> None:
    with pair() as it:
        it.world.cut("host-d", "host-p")
        first, second = plan_of(1), plan_of(2)
        it.ask(first)
        end = it.end_of(first)
        assert end.reason.startswith("connect: host-p:7000 has not taken a connection within suspect_s")
        assert end.seconds == pytest.approx(CONFIG.suspect_s)
        it.ask(second)
        assert it.end_of(second).seconds < 0.01
        it.world.pass_time(2.0)
        it.world.heal("host-d", "host-p")  # the attempt went on meanwhile
        it.world.pass_time(0.1)
        assert it.d.receiver.metrics.sessions_open == 1
        assert it.transfer(3).what == "committed"


def test_a_peer_known_to_be_silent_is_not_waited_for() -> None:
    with pair() as it:
        assert it.transfer(1).what == "committed"
        it.world.stop(it.p.process)
        it.world.pass_time(5.0)
        plan = plan_of(2)
        it.ask(plan)
        end = it.end_of(plan)
        assert end.reason.startswith("suspect: host-p:7000 has been silent")
        assert end.seconds < 0.01
        it.world.resume(it.p.process)
        it.offer(plan)  # its drop was on the way: the hold ends at once
        it.until(lambda: it.p.released["t2"] == 1, 0.5)
        it.world.pass_time(CONFIG.heartbeat_s)
        assert it.transfer(3).what == "committed"


def test_a_stopped_prefill_node_takes_connections_and_is_given_up_all_the_same() -> None:
    with pair() as it:
        it.world.stop(it.p.process)
        plan = plan_of(1)
        it.ask(plan)
        end = it.end_of(plan)
        assert end.reason.startswith("connect: prefill node host-p:7000 did not answer within")
        assert end.seconds == pytest.approx(CONFIG.connect_timeout_s, abs=1.5)


# --- restarts -----------------------------------------------------------------------------------------------


def test_another_engine_on_the_same_address_is_refused() -> None:
    with pair() as it:
        assert it.transfer(1).what == "committed"
        plan = plan_of(2)
        ticket = it.p.ticket("t2")
        it.restart_p()
        it.d.process.spawn(it.d.decode(plan, ticket))
        end = it.end_of(plan)
        assert end.reason.startswith("incarnation: host-p:7000 restarted: it is p', the ticket is of p")
        assert it.transfer(3).what == "committed"  # whoever names the new one is served


def test_a_restarted_decode_node_is_a_new_reader() -> None:
    with pair() as it:
        it.moving(plan_of(1, num_blocks=30))
        it.world.kill(it.d.process)
        it.d = DecodeNode(it.world, "d'", "host-d", CONFIG)
        assert it.transfer(2).what == "committed"
        it.until(lambda: it.p.released["t1"] == 1, 15.0)


# --- what is late -------------------------------------------------------------------------------------------


def test_blocks_in_quarantine_come_back_when_their_receives_have_ended() -> None:
    with pair() as it:
        it.world.fabric.slow_s = 0.5
        plan = plan_of(1, num_blocks=30)
        it.moving(plan)
        it.world.fabric.stuck = True
        it.world.stop(it.p.process)  # it does not fill the receives
        it.abort(plan)
        assert it.end_of(plan).reason.startswith("cancelled")
        stuck = len(it.d.quarantined)
        metrics = it.d.receiver.metrics
        assert stuck == metrics.blocks_quarantined == metrics.blocks_in_quarantine > 0
        assert it.d.memory.owners.keys() == it.d.quarantined.keys()
        it.world.pass_time(100.0)
        assert len(it.d.quarantined) == stuck, "freed by a timer"
        it.world.resume(it.p.process)
        it.world.fabric.unstick()
        it.until(lambda: not it.d.quarantined, 5.0)
        assert metrics.blocks_in_quarantine == 0
        assert it.transfer(2, num_blocks=NUM_BLOCKS).what == "committed"


def test_what_comes_late_for_one_fetch_does_not_reach_the_next_of_the_same_transfer() -> None:
    with pair() as it:
        it.world.fabric.slow_s = 0.05
        plan = plan_of(1, num_blocks=30)
        it.moving(plan)
        it.world.network.slow_s = 2.0  # what the first one is told is on its way for seconds
        it.abort(plan)
        it.until(lambda: bool(it.d.ended) and it.p.released["t1"] == 1)
        it.offer(plan)
        it.ask(plan)
        it.world.network.slow_s = 0.0
        it.until(lambda: len(it.d.ended) == 2)
        assert it.d.receiver.metrics.messages_unexpected >= 1
        assert it.d.ended[1].what == "committed", it.d.ended[1]
