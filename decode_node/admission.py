"""Requests at the door of a decode node: served in order of arrival, refused at their deadline.

A request enters when the engine has reserved its blocks (or queued it for local compute). When there is no
room it waits at the head of the queue until something ends, and nobody overtakes it; at its deadline it is
refused, so that the router can try another node. Waiting requests own nothing.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from common.engine.engine import Engine
from common.errors import BatonError, CapacityError, NodeFailed
from common.messages import DecodeRequest
from common.request import Request

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Applicant:
    """``deadline_s`` on the event loop's clock."""

    router_id: str
    message: DecodeRequest
    request: Request
    deadline_s: float


@dataclass(frozen=True)
class Entered:
    """``cached``: tokens found here. ``wanted``: {KV group: {block position: block}} for the transfer."""

    cached: int
    wanted: dict[int, dict[int, int]]


Outcome = Entered | BatonError


def enter_in_order(engine: Engine, applicants: Sequence[Applicant]) -> list[Outcome]:
    """Engine thread: outcomes of as many applicants as could be decided; the first without room ends it."""
    outcomes: list[Outcome] = []
    for applicant in applicants:
        try:
            outcomes.append(_enter(engine, applicant))
        except CapacityError:
            break
        except BatonError as error:
            outcomes.append(error)
        except Exception as error:  # our fault: it is answered, and those behind it are served
            logger.exception("request %s: admission failed", applicant.request.request_id)
            engine.abort(applicant.request.request_id)
            outcomes.append(NodeFailed(f"admission failed: {error!r}"))
    return outcomes


def _enter(engine: Engine, applicant: Applicant) -> Entered:
    request, message = applicant.request, applicant.message
    if message.ticket is None:
        engine.add(request)
        return Entered(engine.scheduler.kv.match(request), {})
    first_missing = engine.reserve(request, message.cut)
    return Entered(first_missing, engine.wanted(request.request_id, message.cut))


class AdmissionQueue:
    """``run`` is the one task that admits. ``decide(applicants)`` carries out `enter_in_order` on the
    engine's thread; ``settled(applicant, outcome)`` hears each decision; ``is_gone`` tells who left."""

    def __init__(
        self,
        decide: Callable[[Sequence[Applicant]], Awaitable[list[Outcome]]],
        settled: Callable[[Applicant, Outcome], None],
        is_gone: Callable[[Applicant], bool],
    ) -> None:
        self._decide = decide
        self._settled = settled
        self._is_gone = is_gone
        self._waiting: deque[Applicant] = deque()
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, applicant: Applicant) -> None:
        self._waiting.append(applicant)
        self._wake.set()

    def look_again(self) -> None:
        """Something ended: there may be room."""
        if self._waiting:
            self._wake.set()

    async def run(self) -> None:
        while True:
            await self._sleep()
            self._sweep()
            batch = list(self._waiting)
            if not batch:
                continue
            try:
                outcomes = await self._decide(batch)
            except (BatonError, TimeoutError) as error:  # the engine stopped or stands still
                outcomes = [NodeFailed(f"the engine does not answer: {error}")] * len(batch)
            for applicant, outcome in zip(batch, outcomes, strict=False):
                self._waiting.popleft()
                self._settled(applicant, outcome)

    async def _sleep(self) -> None:
        """Until somebody came, something ended, or the next deadline is due."""
        now_s = asyncio.get_running_loop().time()
        next_s = min((a.deadline_s for a in self._waiting), default=None)
        try:
            async with asyncio.timeout(None if next_s is None else max(0.0, next_s - now_s)):
                await self._wake.wait()
        except TimeoutError:
            return
        self._wake.clear()

    def _sweep(self) -> None:
        """Refuses who waited too long, drops who left."""
        now_s = asyncio.get_running_loop().time()
        kept: deque[Applicant] = deque()
        for applicant in self._waiting:
            if self._is_gone(applicant) or now_s >= applicant.deadline_s:
                self._settled(applicant, CapacityError("no room for this request came free in time"))
            else:
                kept.append(applicant)
        self._waiting = kept
