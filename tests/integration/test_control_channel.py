"""The control channel between a node's client and the router's hub, over real sockets."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import zmq

from common.control_client import ControlClient
from common.errors import ConfigError, DeadlineExceeded, NodeFailed
from common.messages import (
    Abort,
    Accepted,
    DecodeRequest,
    Finished,
    Heartbeat,
    HeartbeatReply,
    NodeLoad,
    RouterMessage,
    TokenChunk,
    encoder,
)
from common.metrics import ROUTER_METRICS, Metrics
from common.request import SamplingParams
from common.zmq_pump import ZmqPump
from router.node_hub import NodeHub
from router.registry import Node
from tests.fakes_node import make_register


class Ends:
    """A hub, and what happened at it."""

    def __init__(self, router_id: str = "r", port: int = 0) -> None:
        self.events: list[str] = []
        self.hub = NodeHub(
            router_id=router_id,
            heartbeat_timeout_s=0.3,
            refusal=lambda register: "not you" if register.node_id == "unwanted" else None,
            metrics=Metrics(ROUTER_METRICS, model_name="m"),
            on_join=lambda node: self.events.append(f"join {node.node_id}"),
            on_leave=lambda node: self.events.append(f"leave {node.node_id}"),
            on_heartbeat=lambda node: None,
        )
        self.port = self.hub.start("127.0.0.1", port)
        self.address = f"tcp://127.0.0.1:{self.port}"

    async def node(self, name: str) -> Node:
        await eventually(lambda: name in self.hub.nodes)
        return self.hub.nodes[name]


class NodeEnd:
    """A client that keeps what it gets."""

    def __init__(self, name: str, addresses: str, router_timeout_s: float = 0.3) -> None:
        self.received: list[tuple[str, RouterMessage]] = []
        self.lost: list[str] = []
        self.load = NodeLoad()
        self.register = make_register(name)
        self.client = ControlClient(
            addresses,
            register=self.register,
            heartbeat=lambda: Heartbeat(name, self.register.epoch, -1, self.load),
            handler=self._handle,
            on_router_lost=self.lost.append,
            heartbeat_s=0.03,
            router_timeout_s=router_timeout_s,
        )
        self.client.start()

    async def _handle(self, router_id: str, message: RouterMessage) -> None:
        self.received.append((router_id, message))


async def eventually(condition: Callable[[], bool], timeout_s: float = 3.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def run(story: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(15):
            await story()

    asyncio.run(main())


def request(request_id: str, n: int = 1) -> DecodeRequest:
    return DecodeRequest(request_id, [1, 2, 3], SamplingParams(), n=n)


def test_thousands_of_messages_arrive_in_order() -> None:
    async def story() -> None:
        ends = Ends()
        node_end = NodeEnd("d", ends.address)
        node = await ends.node("d")
        leg = ends.hub.open(node, request("a"))
        await eventually(lambda: len(node_end.received) == 1)
        router_id, _ = node_end.received[0]
        for i in range(5000):
            node_end.client.send(router_id, TokenChunk("a", (i,)))
        node_end.client.send(router_id, Finished("a", "stop"))
        for i in range(5000):
            answer = await leg.answer(1.0, "a token")
            assert isinstance(answer, TokenChunk)
            assert answer.token_ids == (i,)
        assert isinstance(await leg.answer(1.0, "the end"), Finished)
        for i in range(5000):
            ends.hub.send(node, Abort(str(i)))
        await eventually(lambda: len(node_end.received) == 5001)
        assert [m.request_id for _, m in node_end.received[1:] if isinstance(m, Abort)] == [
            str(i) for i in range(5000)
        ]
        await node_end.client.close()
        await ends.hub.close()

    run(story)


def test_leaving_a_leg_early_aborts_and_a_finished_one_does_not() -> None:
    async def story() -> None:
        ends = Ends()
        node_end = NodeEnd("d", ends.address)
        node = await ends.node("d")
        with ends.hub.open(node, request("cut short", n=2)) as leg:
            await eventually(lambda: len(node_end.received) == 1)
            node_end.client.send("r", Accepted("cut short"))
            node_end.client.send("r", Finished("cut short", "stop", 0))
            await leg.answer(1.0, "x")
            await leg.answer(1.0, "x")
            assert not leg.ended
            with pytest.raises(DeadlineExceeded, match=r"node d did not deliver an answer within 0\.05 s"):
                await leg.answer(0.05, "an answer")
        assert node.num_requests == 0
        with ends.hub.open(node, request("whole")) as leg:
            await eventually(lambda: len(node_end.received) == 3)
            node_end.client.send("r", Finished("whole", "stop"))
            await leg.answer(1.0, "x")
        await asyncio.sleep(0.05)
        assert [m.request_id for _, m in node_end.received if isinstance(m, Abort)] == ["cut short"]
        await node_end.client.close()
        await ends.hub.close()

    run(story)


def test_a_goodbye_and_a_silence_both_fail_what_waits() -> None:
    async def story() -> None:
        ends = Ends()
        for goodbye, words in ((True, "left"), (False, "was not heard")):
            node_end = NodeEnd("d", ends.address)
            leg = ends.hub.open(await ends.node("d"), request("a"))
            waiting = asyncio.create_task(leg.answer(5.0, "its acceptance"))
            await asyncio.sleep(0.02)
            await node_end.client.close(goodbye=goodbye)
            with pytest.raises(NodeFailed, match=f"{words}.*its acceptance"):
                await waiting
            assert not ends.hub.nodes
        assert ends.events == ["join d", "leave d"] * 2
        await ends.hub.close()

    run(story)


def test_a_restarted_node_replaces_its_predecessor() -> None:
    async def story() -> None:
        ends = Ends()
        first = NodeEnd("d", ends.address)
        leg = ends.hub.open(await ends.node("d"), request("a"))
        second = NodeEnd("d", ends.address)  # its epoch is random: another process
        with pytest.raises(NodeFailed, match="restarted"):
            await leg.answer(2.0, "an answer")
        assert ends.hub.nodes["d"].register.epoch == second.register.epoch
        await first.client.close()
        await second.client.close()
        await ends.hub.close()

    run(story)


def test_a_router_that_restarts_on_its_port_gets_its_nodes_back() -> None:
    async def story() -> None:
        ends = Ends("first")
        node_end = NodeEnd("d", ends.address, router_timeout_s=5.0)
        await ends.node("d")
        await ends.hub.close()
        again = Ends("second", ends.port)
        node = await again.node("d")
        await eventually(lambda: node_end.client.router_ids == ["second"])
        assert node_end.lost == ["first"]
        assert not node_end.client.send("first", Accepted("a"))
        assert node_end.client.num_dropped == 1
        again.hub.open(node, request("b"))
        await eventually(lambda: len(node_end.received) == 1)
        assert node_end.received[0][0] == "second"
        await node_end.client.close()
        await again.hub.close()

    run(story)


def test_a_silent_router_is_lost_and_two_routers_are_served_apart() -> None:
    async def story() -> None:
        one, two = Ends("one"), Ends("two")
        node_end = NodeEnd("d", f"{one.address}, {two.address}")
        node_one, node_two = await one.node("d"), await two.node("d")
        assert await node_end.client.wait_registered(1.0)
        one.hub.open(node_one, request("a"))
        leg = two.hub.open(node_two, request("a"))
        await eventually(lambda: len(node_end.received) == 2)
        assert sorted(router_id for router_id, _ in node_end.received) == ["one", "two"]
        node_end.client.send("two", Accepted("a"))
        assert isinstance(await leg.answer(1.0, "x"), Accepted)
        # each router counts what it started itself and what the other one shows up as
        node_end.load = NodeLoad(num_running=2)
        await eventually(lambda: node_one.num_requests == node_two.num_requests == 2)
        await one.hub.close()
        await eventually(lambda: node_end.lost == ["one"])
        assert node_end.client.router_ids == ["two"]
        await node_end.client.close()
        await two.hub.close()

    run(story)


def test_a_refused_node_learns_why() -> None:
    async def story() -> None:
        ends = Ends()
        node_end = NodeEnd("unwanted", ends.address)
        assert await asyncio.wait_for(node_end.client.wait_refused(), 2) == "not you"
        assert not await node_end.client.wait_registered(0.05)
        await node_end.client.close()
        await ends.hub.close()

    run(story)


def test_bad_addresses_are_named() -> None:
    async def story() -> None:
        with pytest.raises(ConfigError, match="no control address"):
            NodeEnd("d", " , ")
        with pytest.raises(ConfigError, match="'nonsense'"):
            NodeEnd("d", "nonsense")

    run(story)


def test_a_heartbeat_that_fails_does_not_end_the_link(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        ends = Ends()
        node_end = NodeEnd("d", ends.address)
        await ends.node("d")
        del node_end.load  # its figures cannot be had
        await eventually(lambda: "figures failed" in caplog.text)
        await eventually(lambda: "leave d" in ends.events)
        node_end.load = NodeLoad(num_running=7)
        await ends.node("d")
        await eventually(lambda: ends.hub.nodes["d"].load.num_running == 7)
        await node_end.client.close()
        await ends.hub.close()

    run(story)


def test_a_leg_that_the_node_has_ended_is_no_load_any_more() -> None:
    async def story() -> None:
        ends = Ends()
        node_end = NodeEnd("p", ends.address)
        node = await ends.node("p")
        with ends.hub.open(node, request("a")) as leg:  # as of a prefill: open until the answer is complete
            await eventually(lambda: len(node_end.received) == 1)
            assert node.num_requests == 1
            node_end.client.send("r", Finished("a", "cut"))
            await eventually(lambda: leg.ended)
            assert node.num_requests == 0
            assert isinstance(await leg.answer(1.0, "x"), Finished)
        await node_end.client.close()
        await ends.hub.close()

    run(story)


def test_what_a_router_sent_before_it_was_lost_is_not_begun_after() -> None:
    async def story() -> None:
        ends = Ends()
        node_end = NodeEnd("d", ends.address)
        await ends.node("d")
        await eventually(lambda: node_end.client.router_ids == ["r"])
        link = node_end.client._links[0]
        # The node stood still: it reads the request and the news that it was dropped at once.
        node_end.client._arrived(link, [encoder.encode(request("a"))])
        node_end.client._arrived(link, [encoder.encode(HeartbeatReply("r", known=False))])
        assert node_end.lost == ["r"]
        await eventually(lambda: node_end.client.router_ids == ["r"])
        await asyncio.sleep(0.05)
        assert node_end.received == []
        assert node_end.client.num_dropped == 1
        await node_end.client.close()
        await ends.hub.close()

    run(story)


def test_a_node_that_gave_its_router_up_fails_what_the_router_waits_for() -> None:
    async def story() -> None:
        ends = Ends()
        node_end = NodeEnd("d", ends.address)
        node = await ends.node("d")
        await eventually(lambda: node.beats)
        leg = ends.hub.open(node, request("a"))
        await eventually(lambda: len(node_end.received) == 1)
        # 1. The router stands still for longer than the node waits.
        (link,) = node_end.client._links
        node_end.client._lose(link)
        assert node_end.lost == ["r"]
        # 2. It goes on, and is told by the node's registering again, under the same epoch.
        with pytest.raises(NodeFailed, match="lost touch with this router while waiting for an answer"):
            await leg.answer(2.0, "an answer")
        assert leg.ended
        # 3. What is sent from then on arrives; registering twice in a row harms nothing.
        later = ends.hub.open(node, request("b"))
        link.pump.send([encoder.encode(node_end.register)])
        await eventually(lambda: len(node_end.received) == 2)
        node_end.client.send("r", Accepted("b"))
        assert isinstance(await later.answer(1.0, "x"), Accepted)
        assert ends.events == ["join d"]
        await node_end.client.close()
        await ends.hub.close()

    run(story)


def test_a_router_that_leaves_no_room_is_given_up() -> None:
    async def story() -> None:
        ends = Ends()
        node_end = NodeEnd("d", ends.address)
        await ends.node("d")
        await eventually(lambda: node_end.client.router_ids == ["r"])
        link = node_end.client._links[0]
        link.pump.close()  # takes nothing any more, as a full queue
        assert not node_end.client.send("r", TokenChunk("a", (1,)))
        assert node_end.lost == ["r"]
        assert node_end.client.router_ids == []
        await node_end.client.close()
        await ends.hub.close()

    run(story)


def test_a_message_that_cannot_be_handled_does_not_hold_up_the_next(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        there, here = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        there.bind("inproc://pump")
        here.connect("inproc://pump")
        got: list[int] = []
        pump = ZmqPump(here, lambda frames: got.append(10 // int(frames[0])))
        for number in (b"0", b"1", b"0", b"5"):
            there.send(number)
        await eventually(lambda: got == [10, 2])
        assert caplog.text.count("handling a message of 1 frames failed") == 2
        pump.close()
        there.close()
        context.term()

    run(story)
