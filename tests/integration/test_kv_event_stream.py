"""The event stream over real sockets: gaps, restarts, overflow, late joiners, idle nodes, lost batches.

Every scenario ends with the same question: does the reader hold what the publisher holds?
"""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import pytest
import zmq
import zmq.asyncio

from common.errors import ConfigError
from common.kv_event_publisher import KVEventPublisher, PublisherLimits
from common.kv_event_reader import KVEventReader, ReaderTimeouts
from common.kv_event_requests import ReplayClient
from common.kv_event_updates import (
    CaughtUp,
    Events,
    Gap,
    Lost,
    Restarted,
    SnapshotLoaded,
    Undecodable,
    Update,
    apply_update,
)
from common.kv_events import (
    END_SEQ,
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    encode_batch,
    encode_seq,
)
from common.kv_snapshot import BlockMirror, BlockRecord

DEADLINE_S = 10.0
FAST = ReaderTimeouts(idle_probe_s=0.1, in_flight_s=0.02, message_s=0.5, reply_s=5.0)
PATIENT = ReaderTimeouts(idle_probe_s=60.0)  # so that no probe repairs what a test is about


def block(block_hash: BlockHash, parent: BlockHash | None = None) -> BlockStored:
    return BlockStored(
        block_hashes=[block_hash],
        parent_block_hash=parent,
        token_ids=[1, 2],
        block_size=2,
        lora_id=None,
        medium="CPU",
        lora_name=None,
        lookahead_token_ids=[[3, 4]],
    )


def removed(block_hash: BlockHash) -> BlockRemoved:
    return BlockRemoved(block_hashes=[block_hash], medium="CPU")


@contextmanager
def publishing(
    endpoint: str = "tcp://127.0.0.1:0",
    replay_endpoint: str = "tcp://127.0.0.1:0",
    limits: PublisherLimits | None = None,
    snapshot_source: Callable[[], list[BlockRecord]] | None = None,
) -> Iterator[KVEventPublisher]:
    publisher = KVEventPublisher(
        endpoint, replay_endpoint, topic="kv@node", limits=limits, snapshot_source=snapshot_source
    )
    publisher.start()
    try:
        yield publisher
    finally:
        publisher.close()
        assert publisher.endpoint  # the address survives for whoever starts the next one there


class Follower:
    """Applies a reader's updates as the router does, and remembers them."""

    def __init__(self, reader: KVEventReader) -> None:
        self.reader = reader
        self.updates: list[Update] = []
        self.held = BlockMirror()

    async def run(self) -> None:
        async for update in self.reader.updates():
            self.updates.append(update)
            apply_update(self.held, update)

    def hashes(self) -> list[BlockHash]:
        return [record.block_hash for record in self.held.blocks()]

    def of_type(self, kind: type[Update]) -> list[Update]:
        return [update for update in self.updates if isinstance(update, kind)]

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"not reached; updates were {self.updates}"
            await asyncio.sleep(0.005)


@asynccontextmanager
async def following(
    publisher: KVEventPublisher,
    timeouts: ReaderTimeouts = FAST,
    endpoint: str | None = None,
    snapshots: bool = True,
) -> AsyncIterator[Follower]:
    reader = KVEventReader(
        endpoint or publisher.endpoint, publisher.replay_endpoint, timeouts=timeouts, snapshots=snapshots
    )
    async with reader:
        follower = Follower(reader)
        task = asyncio.create_task(follower.run())
        try:
            yield follower
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


class LossyRelay:
    """A PUB that passes a publisher's frames on, except those whose number is in ``drop``."""

    def __init__(self, context: zmq.asyncio.Context, upstream: str) -> None:
        self.drop: set[int] = set()
        self.last_seen = -1
        self._sub = context.socket(zmq.SUB)
        self._sub.setsockopt_string(zmq.SUBSCRIBE, "")
        self._sub.connect(upstream)
        self._pub = context.socket(zmq.XPUB)  # so that the test knows when the reader has subscribed
        port = self._pub.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"

    async def subscribed(self) -> None:
        assert await self._pub.poll(int(DEADLINE_S * 1000))
        assert (await self._pub.recv()).startswith(b"\1")

    async def run(self) -> None:
        while True:
            frames = await self._sub.recv_multipart()
            self.last_seen = int.from_bytes(frames[1], "big")
            if self.last_seen not in self.drop:
                await self._pub.send_multipart(frames)

    def close(self) -> None:
        self._sub.close(linger=0)
        self._pub.close(linger=0)


@asynccontextmanager
async def relaying(publisher: KVEventPublisher) -> AsyncIterator[LossyRelay]:
    context = zmq.asyncio.Context()
    relay = LossyRelay(context, publisher.endpoint)
    task = asyncio.create_task(relay.run())
    try:
        yield relay
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        relay.close()
        context.destroy(linger=0)


async def connected(publisher: KVEventPublisher, follower: Follower) -> None:
    """Publish until a batch arrives live: then nothing is lost to a slow connection any more."""
    probe = 1_000_000
    while not any(isinstance(u, Events) and not u.replayed for u in follower.updates):
        publisher.publish([block(probe), removed(probe)])
        await asyncio.sleep(0.02)
    await follower.until(lambda: follower.reader.next_seq == publisher.last_seq + 1)


async def ask_snapshot(publisher: KVEventPublisher) -> bool:
    """Whether a snapshot request was answered."""
    context = zmq.asyncio.Context()
    try:
        endpoint = publisher.replay_endpoint
        client = ReplayClient(context, endpoint, message_timeout_s=5, reply_timeout_s=5)
        return await client.snapshot() is not None
    finally:
        context.destroy(linger=0)


def test_first_batch_is_all_blocks_cleared_and_an_idle_node_still_flushes() -> None:
    """1. A reader joins: seq 0 clears.  2. One event, then silence: it arrives without another step."""

    async def scenario() -> None:
        with publishing() as publisher:
            async with following(publisher, PATIENT) as follower:
                await connected(publisher, follower)
                first = follower.updates[0]
                assert isinstance(first, Events)
                assert (first.seq, first.batch.events) == (0, [AllBlocksCleared()])
                started = time.monotonic()
                publisher.publish([block(b"\0" * 24 + b"\0\0\0\0\0\0\0\5")])
                await follower.until(lambda: follower.hashes() == [5])
                assert time.monotonic() - started < 1.0
                record = follower.held.blocks()[0]
                assert (record.token_ids, record.lookahead_token_ids) == ([1, 2], [3, 4])
            assert follower.of_type(Gap) == []

    asyncio.run(scenario())


def test_dropped_frames_are_replayed_once_each_and_in_order() -> None:
    """1. All is live.  2. Two batches vanish on the way.  3. The next one shows the gap.  4. Replay
    brings them; nothing is applied twice."""

    async def scenario() -> None:
        with publishing() as publisher:
            async with (
                relaying(publisher) as relay,
                following(publisher, PATIENT, endpoint=relay.endpoint) as follower,
            ):
                await relay.subscribed()
                await connected(publisher, follower)
                start = publisher.last_seq + 1
                relay.drop = {start + 1, start + 2}
                publisher.publish([block(1)])
                publisher.publish([block(2, 1)])
                publisher.publish([removed(1)])
                publisher.publish([block(3, 2)])
                publisher.publish([block(4, 3)])
                await follower.until(lambda: follower.hashes() == [2, 3, 4])
            assert follower.of_type(Gap)[-1] == Gap(start + 1, start + 2)
            seqs = [update.seq for update in follower.updates if isinstance(update, Events)]
            assert seqs == list(range(start + 5))
            assert follower.of_type(Lost) == []

    asyncio.run(scenario())


def test_silent_loss_is_found_by_probe_and_by_heartbeat() -> None:
    """The last batch vanishes and the node falls idle: no later number shows the gap."""

    async def scenario(timeouts: ReaderTimeouts, heartbeat: bool) -> None:
        with publishing() as publisher:
            async with (
                relaying(publisher) as relay,
                following(publisher, timeouts, endpoint=relay.endpoint) as follower,
            ):
                await relay.subscribed()
                await connected(publisher, follower)
                last = publisher.last_seq + 1
                relay.drop = {last}
                publisher.publish([block(1)])
                await follower.until(lambda: relay.last_seen == last)
                if heartbeat:
                    follower.reader.note_head(publisher.epoch, publisher.last_seq)
                await follower.until(lambda: follower.hashes() == [1])
            assert Gap(last, last) in follower.updates

    asyncio.run(scenario(FAST, heartbeat=False))
    asyncio.run(scenario(PATIENT, heartbeat=True))


def test_restart_on_the_same_port_is_seen_and_old_blocks_are_forgotten() -> None:
    """1. Blocks 1, 2 from the first process.  2. It ends; another starts on its ports and stores 3.
    3. The number is lower: everything is forgotten, the new process's stream is read from 0."""

    async def scenario(snapshots: bool) -> None:
        with publishing() as first:
            async with following(first, FAST, snapshots=snapshots) as follower:
                await connected(first, follower)
                first.publish([block(1), block(2, 1)])
                await follower.until(lambda: follower.hashes() == [1, 2])
                old_epoch, old_next = follower.reader.epoch, follower.reader.next_seq
                first.close()
                with publishing(first.endpoint, first.replay_endpoint) as second:
                    second.publish([block(3)])
                    await asyncio.sleep(0.3)  # SUB connects again
                    second.publish([block(4, 3)])
                    await follower.until(lambda: follower.hashes() == [3, 4])
                    kinds = [type(update) for update in follower.updates]
                    assert CaughtUp in kinds[kinds.index(Restarted) :]
                    assert follower.reader.next_seq < old_next
                    if snapshots:
                        await follower.until(lambda: follower.reader.epoch == second.epoch)
                        assert old_epoch == first.epoch != second.epoch

    asyncio.run(scenario(snapshots=True))
    asyncio.run(scenario(snapshots=False))


def test_restart_seen_from_its_first_batch_on() -> None:
    """The stream goes on with number 0 of a new process: nothing is missing, and that is said."""

    async def scenario() -> None:
        context = zmq.asyncio.Context()
        pub = context.socket(zmq.XPUB)
        endpoint = f"tcp://127.0.0.1:{pub.bind_to_random_port('tcp://127.0.0.1')}"
        updates: list[Update] = []

        async def follow() -> None:
            async with KVEventReader(endpoint, timeouts=FAST) as reader:
                async for update in reader.updates():
                    updates.append(update)
                    if isinstance(update, CaughtUp):
                        return

        try:
            task = asyncio.create_task(follow())
            assert (await pub.recv()).startswith(b"\1")
            for seq, number in ((0, 1), (1, 2), (0, 3)):
                payload = encode_batch(KVEventBatch(1.0, [block(number)]))
                await pub.send_multipart([b"", encode_seq(seq), payload])
            await asyncio.wait_for(task, DEADLINE_S)
        finally:
            pub.close(linger=0)
            context.destroy(linger=0)
        assert [type(update) for update in updates] == [Events, Events, Restarted, Events, CaughtUp]

    asyncio.run(scenario())


def test_restart_of_an_idle_node_is_seen_by_heartbeat() -> None:
    async def scenario() -> None:
        with publishing() as first:
            async with following(first, PATIENT) as follower:
                await connected(first, follower)
                first.publish([block(1)])
                await follower.until(lambda: follower.hashes() == [1])
                first.close()
                with publishing(first.endpoint, first.replay_endpoint) as second:
                    follower.reader.note_head(second.epoch, second.last_seq)
                    await follower.until(lambda: follower.hashes() == [])
                    await follower.until(lambda: follower.reader.epoch == second.epoch)
                assert Restarted(second.epoch) in follower.updates

    asyncio.run(scenario())


def test_a_ring_too_short_is_made_good_by_a_snapshot() -> None:
    """1. The ring keeps 4 batches.  2. 20 vanish.  3. Replay cannot bring them all: the snapshot does,
    with parent and position of every block, and the stream goes on after it."""

    async def scenario() -> None:
        limits = PublisherLimits(ring_batches=4)
        with publishing(limits=limits) as publisher:
            async with (
                relaying(publisher) as relay,
                following(publisher, PATIENT, endpoint=relay.endpoint) as follower,
            ):
                await relay.subscribed()
                await connected(publisher, follower)
                start = publisher.last_seq + 1
                relay.drop = set(range(start, start + 20))
                for number in range(1, 21):
                    publisher.publish([block(number, number - 1 or None)])
                publisher.publish([removed(5)])
                await follower.until(lambda: len(follower.hashes()) == 19)
                publisher.publish([block(21, 20)])
                await follower.until(lambda: len(follower.hashes()) == 20)
                positions = {record.block_hash: record.position for record in follower.held.blocks()}
                assert positions == {n: 2 * (n - 1) for n in range(1, 22) if n != 5}
            (snapshot,) = [u for u in follower.updates if isinstance(u, SnapshotLoaded) and u.seq >= start]
            assert snapshot.epoch == publisher.epoch
            assert CaughtUp(snapshot.seq, "snapshot") in follower.updates
            assert follower.of_type(Lost) == []

    asyncio.run(scenario())


def test_late_readers_learn_everything() -> None:
    """From the ring while it reaches back to the start, else from a snapshot; from a publisher without
    snapshots what is too old is Lost, by number."""

    async def scenario(ring: int, snapshots: bool) -> list[Update]:
        with publishing(limits=PublisherLimits(ring_batches=ring)) as publisher:
            for number in range(1, 11):
                publisher.publish([block(number)])
            while publisher.last_seq < 10:
                await asyncio.sleep(0.005)
            async with following(publisher, PATIENT, snapshots=snapshots) as follower:
                await follower.until(lambda: follower.reader.next_seq == 11)
                expected = range(1, 11) if snapshots or ring > 10 else range(11 - ring, 11)
                await follower.until(lambda: follower.hashes() == list(expected))
            return follower.updates

    from_ring = asyncio.run(scenario(ring=100, snapshots=True))
    assert [type(update) for update in from_ring] == [Events] * 11 + [CaughtUp]
    assert [type(update) for update in asyncio.run(scenario(3, True))] == [SnapshotLoaded, CaughtUp]
    foreign = asyncio.run(scenario(ring=3, snapshots=False))
    assert foreign[0] == Lost(0, 7)
    assert [type(update) for update in foreign[1:]] == [Events] * 3


def test_what_cannot_be_encoded_takes_no_number_and_is_never_left_believed() -> None:
    """A batch with a value that msgpack lacks is lost: readers forget, then hear what comes later."""

    async def scenario() -> None:
        with publishing() as publisher:
            async with following(publisher, PATIENT) as follower:
                await connected(publisher, follower)
                publisher.publish([block(1)])
                bad = BlockStored(
                    block_hashes=[2],
                    parent_block_hash=1,
                    token_ids=[1],
                    block_size=1,
                    lora_id=None,
                    medium="CPU",
                    lora_name=None,
                    extra_keys=[[object()]],
                )
                publisher.publish([removed(1), bad])
                publisher.publish([block(3)])
                await follower.until(lambda: follower.hashes() == [3])
            seqs = [update.seq for update in follower.updates if isinstance(update, Events)]
            assert seqs == list(range(len(seqs)))
            assert publisher.stats.num_unencodable_batches == 1

    asyncio.run(scenario())


def test_a_full_queue_never_blocks_and_ends_in_the_truth() -> None:
    """1. The queue holds 2 batches and the thread is slow.  2. ``publish`` returns at once, batches are
    dropped.  3. Readers are told to forget and get every registered block again from the node's list."""

    async def scenario() -> None:
        truth = BlockMirror()
        slow = {"snapshot": False}

        def registered() -> list[BlockRecord]:
            slow["snapshot"] = True
            time.sleep(0.3)
            return truth.blocks()

        limits = PublisherLimits(queue_batches=2)
        with publishing(limits=limits, snapshot_source=registered) as publisher:
            async with following(publisher, PATIENT) as follower:
                await connected(publisher, follower)
                client = ReplayClient(
                    follower.reader._context,
                    publisher.replay_endpoint,
                    message_timeout_s=5,
                    reply_timeout_s=5,
                )
                asking = asyncio.create_task(client.snapshot())  # occupies the thread for 0.3 s
                await follower.until(lambda: slow["snapshot"])
                for number in range(1, 101):
                    event = block(number, number - 1 or None)
                    truth.apply(event)
                    started = time.perf_counter()
                    publisher.publish([event])
                    assert time.perf_counter() - started < 0.1
                assert await asking is not None
                await follower.until(
                    lambda: sorted(map(str, follower.hashes())) == sorted(map(str, range(1, 101)))
                )
            assert publisher.stats.num_dropped_batches >= 90
            assert follower.of_type(Gap) == []

    asyncio.run(scenario())


def test_replays_without_a_topic_frame_are_read() -> None:
    """Other engines answer ``seq | payload``, and keep no head and no snapshot."""

    async def scenario() -> None:
        context = zmq.asyncio.Context()
        pub, router = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        events = f"tcp://127.0.0.1:{pub.bind_to_random_port('tcp://127.0.0.1')}"
        replay = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"

        async def serve() -> None:
            while True:
                identity, empty, request = await router.recv_multipart()
                assert empty == b""
                for seq in range(int.from_bytes(request, "big"), 3):
                    payload = b"\xc1" if seq == 1 else encode_batch(KVEventBatch(1.0, [block(seq)]))
                    await router.send_multipart([identity, b"", encode_seq(seq), payload])
                await router.send_multipart([identity, b"", encode_seq(END_SEQ), b""])

        server = asyncio.create_task(serve())
        try:
            async with KVEventReader(events, replay, snapshots=False, timeouts=FAST) as reader:
                updates: list[Update] = []
                async for update in reader.updates():
                    updates.append(update)
                    if isinstance(update, CaughtUp):
                        break
            assert [type(update) for update in updates] == [Events, Undecodable, Events, CaughtUp]
            assert isinstance(updates[1], Undecodable)
            assert updates[1].seq == 1
        finally:
            server.cancel()
            with suppress(asyncio.CancelledError):
                await server
            pub.close(linger=0)
            router.close(linger=0)
            context.destroy(linger=0)

    asyncio.run(scenario())


def test_without_any_publisher_the_reader_waits_and_later_catches_up() -> None:
    async def scenario() -> None:
        with socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", 0))
            two.bind(("127.0.0.1", 0))
            ports = one.getsockname()[1], two.getsockname()[1]
        publisher = KVEventPublisher(*(f"tcp://127.0.0.1:{port}" for port in ports))
        async with following(publisher, FAST) as follower:
            await asyncio.sleep(0.2)
            publisher.start()
            try:
                publisher.publish([block(1)])
                await follower.until(lambda: follower.hashes() == [1])
            finally:
                publisher.close()

    asyncio.run(scenario())


def test_malformed_requests_get_no_answer_and_do_no_harm() -> None:
    with publishing() as publisher:
        context = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        try:
            dealer.connect(publisher.replay_endpoint)
            for request in ([b"", b"12345"], [b"x" * 8], [b"", b"head", b"more"]):
                dealer.send_multipart(request)
            dealer.send_multipart([b"", encode_seq(0)])
            assert dealer.poll(int(DEADLINE_S * 1000))
            assert dealer.recv_multipart()[2] == encode_seq(0)
            assert dealer.poll(int(DEADLINE_S * 1000))
            assert dealer.recv_multipart() == [b"", b"", b"\xff" * 8, b""]
            assert not dealer.poll(50)
            assert publisher.stats.replies.num_ignored_requests == 3
        finally:
            context.destroy(linger=0)


def test_a_reader_that_stops_reading_holds_nobody_up() -> None:
    """1. 50 MB are in the ring.  2. Somebody asks for all of it and reads none.  3. Live events and other
    readers' requests still pass; the stuck reply is given up at its deadline."""

    async def scenario() -> None:
        limits = PublisherLimits(reply_timeout_s=2.0)
        with publishing(limits=limits) as publisher:
            big = BlockStored(
                block_hashes=[7],
                parent_block_hash=None,
                token_ids=[1],
                block_size=1,
                lora_id=None,
                medium="CPU",
                lora_name=None,
                extra_keys=[["x" * 250_000]],
            )
            for _ in range(200):
                publisher.publish([big])
            context = zmq.Context()
            stuck = context.socket(zmq.DEALER)
            try:
                stuck.setsockopt(zmq.RCVHWM, 1)
                stuck.setsockopt(zmq.RCVBUF, 1 << 16)
                stuck.connect(publisher.replay_endpoint)
                while publisher.last_seq < 200:
                    await asyncio.sleep(0.01)
                stuck.send_multipart([b"", encode_seq(0)])
                while publisher.stats.num_replays == 0:
                    await asyncio.sleep(0.01)
                async with following(publisher, PATIENT) as follower:
                    publisher.publish([block(1)])
                    await follower.until(lambda: 1 in follower.hashes())
                    assert publisher.stats.replies.num_abandoned_replies == 0
                    await follower.until(lambda: publisher.stats.replies.num_abandoned_replies == 1)
            finally:
                context.destroy(linger=0)

    asyncio.run(scenario())


def test_a_taken_port_is_an_error_that_says_so() -> None:
    with publishing() as publisher:
        other = KVEventPublisher(publisher.endpoint)
        with pytest.raises(
            ConfigError, match=r"cannot listen on tcp://127\.0\.0\.1:\d+ .*choose another port"
        ):
            other.start()
        other.close()
