"""The transfers that docs/kv-transfer.md shows: a good one, the death of P, and an abort."""

from tests.virtual.nodes import Plan
from tests.virtual.recording import Recorder, Recording


def _plan(number: int, num_blocks: int = 12, piece: int = 4) -> Plan:
    return Plan(number, num_blocks, 0, frozenset(), 0.0, 0.0, piece, 0.05)


def good_transfer() -> Recording:
    """From the first connection to the commit; D asks before P has heard of the prompt."""
    it, plan = Recorder("1  A good transfer, from the first connection on"), _plan(1)
    with it.watching():
        it.transfer(plan)
        it.until(lambda: it.p.released["t1"] == 1 and bool(it.d.ended))
        it.world.pass_time(0.05)
    return it.recording


def _open_pair(title: str) -> Recorder:
    """A pair that has a session already; the record begins after it."""
    it, first = Recorder(title), _plan(0)
    it.p.process.spawn(it.p.prefill(first))
    it.d.process.spawn(it.d.decode(first, it.p.ticket(first.name)))
    it.until(lambda: it.p.released["t0"] == 1)
    it.world.pass_time(0.5)
    it.began()
    return it


def prefill_node_dies() -> Recording:
    """Its host goes too, so that nothing tells D but silence."""
    it, plan = _open_pair("2  P dies in mid-transfer, with its host: nothing tells D but silence"), _plan(1)
    metrics = it.d.receiver.metrics
    with it.watching():
        it.transfer(plan, offered=True)
        done = metrics.chunks_received
        it.until(lambda: metrics.chunks_received >= done + 3)
        it.mark("P", "fault", "P dies")
        it.world.kill(it.p.process, silent=True)
        it.until(lambda: metrics.peers_suspected == 1)
        it.mark("D", "call", "P is suspect")
        it.until(lambda: bool(it.d.ended_as("t1")))
    return it.recording


def decode_node_gives_up() -> Recording:
    """Its client left: the fetch is cancelled while chunks are on their way."""
    it, plan = _open_pair("3  D gives up in mid-transfer: every posted receive is ended first"), _plan(1)
    metrics = it.d.receiver.metrics
    with it.watching():
        it.transfer(plan, offered=True)
        done = metrics.chunks_received
        it.until(lambda: metrics.chunks_received >= done + 2)
        it.mark("D", "fault", "cancelled")
        it.d.process.spawn(it.d.abort("t1"))
        it.until(lambda: bool(it.d.ended_as("t1")) and it.p.released["t1"] == 1)
        it.world.pass_time(0.05)
    return it.recording


def recordings() -> list[Recording]:
    return [good_transfer(), prefill_node_dies(), decode_node_gives_up()]
