"""The decode node's door: order, deadlines, leaving, and an engine that does not answer."""

import asyncio
import logging
from collections.abc import Sequence

import pytest

from common.errors import BatonError, CapacityError, InvalidRequest, NodeFailed
from common.kv_ticket import KVTicket
from common.messages import DecodeRequest
from common.request import SamplingParams
from decode_node.admission import AdmissionQueue, Applicant, Entered, Outcome, enter_in_order
from tests.builders import make_request
from tests.fakes import fake_request, is_whole, make_fake_engine

WAIT_S = 5.0


class Door:
    """An engine with ``room`` seats, and what became of the applicants."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.gone: set[str] = set()
        self.settled: list[tuple[str, Outcome]] = []
        self.changed = asyncio.Event()
        self.failure: BatonError | None = None
        self.queue = AdmissionQueue(self._decide, self._settled, lambda a: a.message.request_id in self.gone)

    async def _decide(self, applicants: Sequence[Applicant]) -> list[Outcome]:
        if self.failure is not None:
            raise self.failure
        outcomes: list[Outcome] = []
        for applicant in applicants:
            if applicant.message.request_id == "bad":
                outcomes.append(InvalidRequest("bad"))
            elif self.room > 0:
                self.room -= 1
                outcomes.append(Entered(0, {}))
            else:
                break
        return outcomes

    def _settled(self, applicant: Applicant, outcome: Outcome) -> None:
        self.settled.append((applicant.message.request_id, outcome))
        self.changed.set()

    def arrive(self, request_id: str, timeout_s: float = WAIT_S) -> None:
        message = DecodeRequest(request_id=request_id, token_ids=[1], sampling=SamplingParams())
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        self.queue.add(Applicant("router", message, make_request([1]), deadline_s))

    async def until_settled(self, count: int) -> list[tuple[str, Outcome]]:
        async with asyncio.timeout(WAIT_S):
            while len(self.settled) < count:
                self.changed.clear()
                await self.changed.wait()
        return self.settled


def test_entered_in_order_as_room_comes_free() -> None:
    async def story() -> None:
        door = Door(room=2)
        task = asyncio.create_task(door.queue.run())
        for name in ("a", "b", "c", "d"):
            door.arrive(name)
        assert [name for name, _ in await door.until_settled(2)] == ["a", "b"]
        assert len(door.queue) == 2
        door.arrive("e")  # nobody overtakes c
        door.room = 1
        door.queue.look_again()
        assert [name for name, _ in await door.until_settled(3)] == ["a", "b", "c"]
        door.room = 2
        door.queue.look_again()
        assert [name for name, _ in await door.until_settled(5)] == ["a", "b", "c", "d", "e"]
        task.cancel()

    asyncio.run(story())


def test_refused_at_the_deadline_and_not_before() -> None:
    async def story() -> None:
        door = Door(room=0)
        task = asyncio.create_task(door.queue.run())
        start_s = asyncio.get_running_loop().time()
        door.arrive("late", timeout_s=0.05)
        ((name, outcome),) = await door.until_settled(1)
        assert name == "late"
        assert isinstance(outcome, CapacityError)
        assert asyncio.get_running_loop().time() - start_s >= 0.05
        assert len(door.queue) == 0
        task.cancel()

    asyncio.run(story())


def test_bad_requests_do_not_wait_behind_the_queue_they_head() -> None:
    async def story() -> None:
        door = Door(room=1)
        task = asyncio.create_task(door.queue.run())
        door.arrive("bad")
        door.arrive("good")
        settled = await door.until_settled(2)
        assert isinstance(settled[0][1], InvalidRequest)
        assert isinstance(settled[1][1], Entered)
        task.cancel()

    asyncio.run(story())


def test_who_left_while_waiting_takes_no_room() -> None:
    async def story() -> None:
        door = Door(room=0)
        task = asyncio.create_task(door.queue.run())
        door.arrive("left")
        door.arrive("stays")
        await asyncio.sleep(0)
        door.gone.add("left")
        door.room = 1
        door.queue.look_again()
        settled = dict(await door.until_settled(2))
        assert isinstance(settled["left"], CapacityError)
        assert isinstance(settled["stays"], Entered)
        task.cancel()

    asyncio.run(story())


def test_an_engine_that_does_not_answer_is_said_to_everybody() -> None:
    async def story() -> None:
        door = Door(room=1)
        door.failure = BatonError("the engine has stopped")
        task = asyncio.create_task(door.queue.run())
        door.arrive("a")
        door.arrive("b")
        assert all(isinstance(outcome, NodeFailed) for _, outcome in await door.until_settled(2))
        task.cancel()

    asyncio.run(story())


def test_an_unexpected_error_is_answered_and_leaves_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    engine, _ = make_fake_engine(2)
    ticket = KVTicket(transfer_id="t", engine_id="p", host="h", port=1)
    applicants = [
        Applicant(
            "router",
            DecodeRequest(name, list(range(12)), SamplingParams(), 1, ticket, cut),
            fake_request(range(12), request_id=name),
            0.0,
        )
        for name, cut in (("nonsense", 4000), ("good", 10))
    ]
    with caplog.at_level(logging.ERROR):
        nonsense, good = enter_in_order(engine, applicants)
    assert isinstance(nonsense, NodeFailed)
    assert isinstance(good, Entered)
    assert "nonsense: admission failed" in caplog.text
    assert set(engine.scheduler.requests) == {"good"}
    engine.abort("good")
    engine.check_invariants()
    assert is_whole(engine)
