"""The engine: requests in, tokens and final KV blocks out. Both kinds of node run this same one.

    add(request)                     an ordinary request; P sets `stop_at` and `hold_blocks`
    reserve(request, cut)            D: local hits kept, the rest reserved, state RECEIVING_KV
    kv_arrived(id, upto, carry, first)  D: positions below `upto` are in place; token L, if P sampled it
    kv_failed(id, final_upto, ...)   D: the transfer broke; compute the rest here
    kv_quiet(blocks)                 D: nothing can write to these blocks of a broken transfer any more
    release(id)                      the hold is over, blocks return to the pool
    abort(id)                        legal in every state
    step()                           schedule, run, apply
    reset_prefix_cache()             while idle: every cached block is forgotten

One thread calls all of this (see `loop`). No torch here: the runner has it.
"""

from collections.abc import Mapping, Sequence

from common.engine.batch import StepOutput
from common.engine.first_token import FirstToken
from common.engine.model_runner_protocol import Runner
from common.engine.scheduler import Scheduler
from common.errors import CacheInUse
from common.kv_events import KVEvent
from common.request import Request, SpecStats


class Engine:
    """``stats`` counts verified drafts of all requests since start."""

    def __init__(self, scheduler: Scheduler, runner: Runner) -> None:
        self.scheduler = scheduler
        self.runner = runner

    @property
    def stats(self) -> SpecStats:
        return self.scheduler.stats

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def reserve(self, request: Request, cut: int) -> int:
        return self.scheduler.reserve(request, cut)

    def wanted(self, request_id: str, cut: int) -> dict[int, dict[int, int]]:
        return self.scheduler.wanted(request_id, cut)

    def kv_arrived(
        self, request_id: str, upto: int, carry: bytes | None = None, first: FirstToken | None = None
    ) -> None:
        self.scheduler.kv_arrived(request_id, upto, carry, first)

    def kv_failed(
        self, request_id: str, final_upto: int, quarantined: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        self.scheduler.kv_failed(request_id, final_upto, quarantined or {})

    def kv_quiet(self, blocks: Mapping[int, Sequence[int]]) -> None:
        self.scheduler.kv_quiet(blocks)

    def release(self, request_id: str) -> None:
        self.scheduler.release(request_id)

    def abort(self, request_id: str) -> bool:
        return self.scheduler.abort(request_id)

    def step(self) -> StepOutput:
        """One step of everything that runs; empty when nothing could be scheduled."""
        batch = self.scheduler.schedule()
        output = self.runner.run(batch)
        return self.scheduler.apply(batch, output)

    def reset_prefix_cache(self) -> None:
        """Forgets all cached blocks. Raises CacheInUse while there are requests, in whatever state."""
        ids = list(self.scheduler.requests)
        if ids:
            raise CacheInUse(
                f"the prefix cache is not reset: {len(ids)} request(s) here use its blocks, the oldest is "
                f"{ids[0]!r}; drain the node, or wait until it is idle"
            )
        self.scheduler.kv.reset_prefix_cache()

    def take_events(self) -> list[KVEvent]:
        """KV events since the last call, in order."""
        return self.scheduler.kv.events.take()

    def tables(self, request_id: str) -> list[list[int]]:
        """A copy of a request's blocks by KV group and block position; [] for an unknown id."""
        request = self.scheduler.requests.get(request_id)
        return [] if request is None else [list(table) for table in request.tables]

    def check_invariants(self) -> None:
        self.scheduler.check_invariants()
