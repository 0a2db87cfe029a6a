"""One history: a few transfers between one or two P and D, faults at random moments, and what must hold.

A seed decides everything: `python -m tests.virtual.history SEED [PROFILE]` tells the story of one again.
"""

import logging
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kv_transfer.config import TransferConfig
from kv_transfer.metrics import TransferMetrics
from tests.virtual.lanes import FakeLane
from tests.virtual.nodes import CARRY_MARK, DecodeNode, Ended, Plan, PrefillNode
from tests.virtual.world import World

PROFILES = ("calm", "deaths", "cuts", "pauses", "lanes", "everything")
CONFIG = TransferConfig(
    chunk_bytes=2 * 96,
    window_chunks=2,
    lease_s=6.0,
    connect_timeout_s=8.0,
    fetch_timeout_s=25.0,
)
# what a fetch may take beyond its deadline to make its blocks quiet: grace, fence, closing of a connection
_FENCE_S = 2.0 + CONFIG.dead_s + 3.0
_SCRIPT_S = 4.0  # transfers begin and faults strike within this time
_STRIKES = (
    *("kill_p", "kill_d", "stop_p", "stop_d", "cut", "lane"),
    *("slow", "duplicate", "damage", "stick", "bug"),
)
_WEIGHTS = {
    "calm": (0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0),
    "deaths": (4, 4, 1, 1, 1, 0, 1, 0, 0, 0, 0),
    "cuts": (1, 1, 0, 0, 8, 1, 1, 0, 0, 0, 0),
    "pauses": (0, 1, 5, 5, 1, 0, 1, 0, 0, 0, 0),
    "lanes": (1, 1, 1, 1, 1, 4, 2, 0, 2, 4, 1),
    "everything": (2, 2, 2, 2, 3, 2, 2, 2, 1, 1, 1),
}


@dataclass
class Seen:
    """What happened over many histories: a test asserts that none of it is rare."""

    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    naks: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)


class History:
    def __init__(self, seed: int, profile: str) -> None:
        self.random = random.Random(f"{profile}/{seed}")
        self._script_end = 0.0  # nothing begins after it
        self.profile = profile
        self.world = World(self.random.getrandbits(32))
        self.seen = Seen()
        self.prefills: list[PrefillNode] = []
        self.decodes: list[DecodeNode] = []
        self.all_prefills: list[PrefillNode] = []  # dead ones too
        self.all_decodes: list[DecodeNode] = []
        for i in range(self.random.choice((1, 1, 2))):
            self._start_prefill(i, f"p{i}")
        for i in range(self.random.choice((1, 1, 2))):
            self._start_decode(i, f"d{i}")
        self.world.fabric.on_send = self._check_send  # type: ignore[method-assign]
        self.world.fabric.reads_stopped = self.random.random() < 0.5
        self.world.fabric.slow_s = self.random.choice((0.002, 0.02, 0.1, 0.4))

    # --- nodes ---

    def _start_prefill(self, index: int, name: str) -> None:
        node = PrefillNode(self.world, name, f"host-p{index}", CONFIG)
        self.prefills[index : index + 1] = [node]
        self.all_prefills.append(node)

    def _start_decode(self, index: int, name: str) -> None:
        node = DecodeNode(self.world, name, f"host-d{index}", CONFIG)
        self.decodes[index : index + 1] = [node]
        self.all_decodes.append(node)

    def _check_send(self, lane: FakeLane, view: memoryview) -> None:
        for node in self.prefills:
            if node.process is lane.process:
                node.check_send(view)

    # --- the script ---

    def make_plan(self, number: int) -> Plan:
        rng = self.random
        num_blocks = rng.randint(1, 14)
        ask_at = rng.uniform(0, _SCRIPT_S)
        aborts = tuple(rng.uniform(0, 1.0) for _ in range(rng.choice((0, 0, 0, 1, 1, 2))))
        return Plan(
            number=number,
            num_blocks=num_blocks,
            short_tokens=rng.randint(0, 15),
            skip=frozenset(p for p in range(num_blocks) if rng.random() < 0.2)
            if rng.random() < 0.5
            else frozenset(range(rng.randint(0, num_blocks))),
            ask_at=ask_at,
            offer_at=max(0.0, ask_at + rng.choice((rng.uniform(-0.5, 0.1), rng.uniform(0, 0.4), 1.5, 11.0))),
            piece=rng.randint(1, 6),
            piece_s=rng.choice((0.001, 0.02, 0.2, 0.8)),
            ending=rng.choice(("finish",) * 9 + ("cancel", "stall", "lose")),
            want_nothing=rng.random() < 0.1,
            drop=rng.random() < 0.05,
            aborts=aborts,
            cancel_at=ask_at + rng.uniform(0, 1.5) if rng.random() < 0.1 else None,
            again=rng.random() < 0.5,
        )

    def run(self) -> None:
        world, rng = self.world, self.random
        plans = [self.make_plan(i) for i in range(rng.randint(2, 6))]
        for plan in plans:
            self._schedule(plan)
        if self.profile != "calm":
            for _ in range(rng.randint(1, 4)):
                self._strike()
        # soon, or when every fault has lasted as long as it was to
        world.pass_time(_SCRIPT_S + rng.choice((2.0, CONFIG.dead_s + 2.0)))
        self._calm_down()
        world.pass_time(max(0.0, self._script_end - world.now))
        self._wait_for_outcomes()
        self._probe(len(plans))
        self._check_rest()
        self._close()
        self._count()

    def _schedule(self, plan: Plan) -> None:
        """The router's part: D first, P about the same time, aborts to both."""
        rng = self.random
        p, d = rng.randrange(len(self.prefills)), rng.randrange(len(self.decodes))

        def after(at: float, act: Callable[[], None]) -> None:
            self._script_end = max(self._script_end, at + 0.1)
            self.world.after(at, act)

        def ask() -> None:
            prefill, decode = self.prefills[p], self.decodes[d]
            decode.process.spawn(decode.decode(plan, prefill.ticket(plan.name)))

        def abort() -> None:
            self.decodes[d].process.spawn(self.decodes[d].abort(plan.name))

        def offer() -> None:
            if not plan.drop or rng.random() < 0.5:
                self.prefills[p].process.spawn(self.prefills[p].prefill(plan))

        after(plan.ask_at, ask)
        after(plan.offer_at, offer)
        for delay_s in plan.aborts:
            after(plan.ask_at + delay_s, abort)
        if plan.cancel_at is not None:
            after(plan.cancel_at, lambda: self.prefills[p].process.spawn(self.prefills[p].abort(plan.name)))
        if plan.again:  # under the same id, which no router of ours does; late messages must not cross over
            later = plan.ask_at + max(plan.aborts, default=0.2) + rng.uniform(0, 0.2)
            after(later, offer)
            after(later + rng.uniform(0, 0.1), ask)

    def _strike(self) -> None:
        """One fault: behind some step of the protocol mostly, else at some time."""
        rng, world = self.random, self.world
        what = rng.choices(_STRIKES, _WEIGHTS[self.profile])[0]
        self.seen.events[what] += 1
        p, d = rng.randrange(len(self.prefills)), rng.randrange(len(self.decodes))
        # the last: longer than the lease, and shorter than what makes a peer dead
        spans = ((0.0, 0.3), (0.0, 4.0), (2.0, 15.0), (CONFIG.lease_s, CONFIG.dead_s))
        lasting_s = rng.uniform(*rng.choice(spans))
        ends = f"host-p{p}", f"host-d{d}"
        cuts = rng.choice(((ends,), (ends[::-1],), (ends, ends[::-1])))
        silent, chance = rng.random() < 0.3, rng.random()

        def strike() -> None:
            if world.now > _SCRIPT_S + 2.0:
                return
            match what:
                case "kill_p":
                    self._kill(self.prefills, p, self._start_prefill, silent)
                case "kill_d":
                    self._kill(self.decodes, d, self._start_decode, silent)
                case "stop_p" | "stop_d":
                    process = (self.prefills[p] if what == "stop_p" else self.decodes[d]).process
                    world.stop(process)
                    world.after(lasting_s, world.resume, process)
                case "cut":
                    for source, target in cuts:
                        world.cut(source, target)
                        world.after(lasting_s, world.heal, source, target)
                case "lane":
                    self._break_lanes()
                case "slow":
                    world.network.slow_s = 0.05 if chance < 0.5 else 0.5
                case "duplicate":
                    world.network.duplicate = 0.1
                case "damage":
                    self._damage(chance < 0.5)
                case "stick":
                    world.fabric.stuck = True
                case "bug":
                    world.fabric.bug = "send" if chance < 0.5 else "recv"

        if rng.random() < 0.3:
            world.after(rng.uniform(0.0, _SCRIPT_S), strike)
        else:
            world.at_step(rng.randint(1, 500), strike)

    def _kill(
        self,
        nodes: "list[PrefillNode] | list[DecodeNode]",
        index: int,
        start: Callable[[int, str], None],
        silent: bool,
    ) -> None:
        """A death, and a restart on the same address some time later: at once, or when others gave up."""
        old = nodes[index].process
        self.world.kill(old, silent=silent)
        delay_s = self.random.choice((0.001, 0.1, 1.0, 5.0))

        def restart() -> None:
            if nodes[index].process is old:
                self.world.host_is_back(old.host)
                start(index, old.name + "'")

        self._script_end = max(self._script_end, self.world.now + delay_s + 0.1)
        self.world.after(delay_s, restart)

    def _break_lanes(self) -> None:
        """Say a firewall forgot them, while control still flows."""
        for lane in [*self.world.fabric.receivers.values(), *self.world.fabric.senders.values()]:
            if lane.process.alive and self.random.random() < 0.5:
                lane.process.loop.deliver(lane.fail, "the lane broke")

    def _damage(self, control: bool) -> None:
        if control:
            self.world.network.damage = CARRY_MARK
        else:
            self.world.fabric.damage_next = True

    # --- the end ---

    def _calm_down(self) -> None:
        network, fabric = self.world.network, self.world.fabric
        self.world.calm()
        self.seen.events["frames duplicated"] += network.num_duplicated
        self.seen.events["damaged"] += network.num_damaged + fabric.num_damaged
        network.slow_s = network.duplicate = 0.0
        network.damage, fabric.damage_next, fabric.bug = None, False, None
        self.world.tell("no fault from now on")

    def _wait_for_outcomes(self) -> None:
        """I6: every fetch ends by its own deadlines. I7: so does every hold."""
        world = self.world
        limit_s = CONFIG.fetch_timeout_s + _FENCE_S + 5.0
        if not world.run(lambda: not any(d.num_fetching for d in self.decodes), limit_s):
            world.problem(f"fetches do not end: {[d.num_fetching for d in self.decodes]}")
        if world.fabric.stuck:
            self._check_quarantine()
            world.fabric.unstick()
        if not world.run(lambda: not any(p.sender.num_held for p in self.prefills if p.ready), 30.0):
            world.problem(f"holds do not end: {[p.sender.num_held for p in self.prefills]}")

    def _check_quarantine(self) -> None:
        """What would not become quiet is out of use, and counted."""
        for node in self.decodes:
            counted = {(g, b) for g, blocks in node.receiver.quarantined.items() for b in blocks}
            if counted != set(node.quarantined):
                self.world.problem(f"quarantine: {counted} counted, {set(node.quarantined)} told")
            self.seen.events["quarantined"] += len(counted)

    def _probe(self, number: int) -> None:
        """The pairs recover: a transfer between every two of them commits, and soon."""
        world = self.world
        world.pass_time(CONFIG.heartbeat_s + 0.1)  # nobody is suspect any more
        for p, prefill in enumerate(self.prefills):
            for d, decode in enumerate(self.decodes):
                end = self._transfer_one(prefill, decode, 100 + number + 10 * p + d)
                if end is not None and end.what == "failed" and self.seen.events["lane"]:
                    # a lane that broke while it was idle is found by its next transfer, and costs that one
                    end = self._transfer_one(prefill, decode, 200 + number + 10 * p + d)
                if end is None or end.what != "committed":
                    world.problem(f"{decode.process} does not reach {prefill.process} any more: {end}")
        world.run(lambda: not any(p.sender.num_held for p in self.prefills), 10.0)

    def _transfer_one(self, prefill: PrefillNode, decode: DecodeNode, number: int) -> Ended | None:
        plan = Plan(number, 3, 3, frozenset(), 0.0, 0.0, 1, 0.01)
        prefill.process.spawn(prefill.prefill(plan))
        decode.process.spawn(decode.decode(plan, prefill.ticket(plan.name)))
        self.world.run(lambda: bool(decode.ended_as(plan.name)), 15.0)
        ends = decode.ended_as(plan.name)
        return ends[-1] if ends else None

    def _check_rest(self) -> None:
        """I5, I8 and the pools, while everybody is up and idle."""
        world = self.world
        for decode in self.decodes:
            if Counter(end.name for end in decode.ended) != decode.asked:
                world.problem(f"{decode.process}: outcomes {decode.ended} of {decode.asked}")
            if decode.receiver.quarantined or decode.quarantined:
                world.problem(f"{decode.process}: still in quarantine {decode.receiver.quarantined}")
        for prefill in self.prefills:
            if prefill.released != prefill.offered:
                world.problem(f"{prefill.process}: {prefill.offered} offered, {prefill.released} released")
        nodes: list[PrefillNode | DecodeNode] = [*self.decodes, *self.prefills]
        for node in nodes:
            for wrong in node.memory.whole():
                world.problem(f"{node.process}: {wrong}")
        self._check_deadlines()

    def _check_deadlines(self) -> None:
        for decode in self.decodes:
            for end in decode.ended:
                if end.seconds > CONFIG.fetch_timeout_s + _FENCE_S and "stop_d" not in self.seen.events:
                    world = self.world
                    world.problem(f"{end.name} took {end.seconds:.1f} s")
                reason = end.reason.split(":")[0]
                if reason == "internal" and not self.seen.events["bug"]:
                    self.world.problem(f"{end.name} failed by a bug: {end.reason}")
                if reason == "checksum" and not self.seen.events["damage"]:
                    self.world.problem(f"{end.name} was damaged by nobody: {end.reason}")
                if reason == "protocol" and not self.seen.events["duplicate"]:
                    self.world.problem(f"{end.name} heard nonsense from nobody: {end.reason}")

    def _close(self) -> None:
        """Both ends close in any order; nothing of them is left."""
        world = self.world
        nodes: list[PrefillNode | DecodeNode] = [*self.decodes, *self.prefills]
        self.random.shuffle(nodes)
        for node in nodes:
            node.process.spawn(node.close())
        processes = [node.process for node in nodes]
        for _ in range(200):
            world.pass_time(0.1)
            if not any(process.loop.tasks() for process in processes):
                break
        for process in processes:
            left = [str(task) for task in process.loop.tasks()]
            if left or process.loop.num_timers():
                world.problem(f"{process}: {left} and {process.loop.num_timers()} timers are left")
        if world.fabric.num_pending():
            world.problem(f"{world.fabric.num_pending()} requests are left")
        if any(socket.process.alive for socket in world.network.sockets):
            world.problem(f"{len(world.network.sockets)} connections are left")

    def _count(self) -> None:
        seen = self.seen
        for decode in self.all_decodes:
            for end in decode.ended:
                seen.outcomes[end.what] += 1
                if end.what == "failed":
                    seen.reasons[end.reason.split(":")[0]] += 1
        for metrics in self._metrics():
            seen.naks.update({k: n for k, n in metrics.failures.items() if k.startswith("nak_")})
            seen.events["unexpected messages"] += metrics.messages_unexpected
            seen.events["fences by force"] += metrics.fences_forced
            seen.events["leases expired"] += metrics.leases_expired
            seen.events["peers suspected"] += metrics.peers_suspected
            seen.events["peers lost"] += metrics.peers_lost
        seen.events["late pieces"] += self.world.fabric.num_late_pieces

    def _metrics(self) -> list[TransferMetrics]:
        return [p.sender.metrics for p in self.all_prefills if p.ready] + [
            d.receiver.metrics for d in self.all_decodes if d.ready
        ]


def run_history(seed: int, profile: str) -> History:
    """Runs it; ``world.problems`` tells what broke."""
    logger = logging.getLogger("kv_transfer")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)  # thousands of failures are the point here
    try:
        history = History(seed, profile)
        try:
            history.run()
        finally:
            history.world.end()
    finally:
        logger.setLevel(level)
    return history


if __name__ == "__main__":
    told = run_history(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "everything")
    print("\n".join(told.world.story))
    sys.exit(bool(told.world.problems))
