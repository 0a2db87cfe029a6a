"""Keeps the prefix index in step with the nodes' KV events: one task a live node.

The reader fetches what was missed by replay or snapshot; here its updates are applied. From a gap until
the reader has caught up the node's entries are not trusted. A node that leaves, or comes back as another
process, takes its entries along. Heartbeats tell the reader where the publisher stands, so that a loss
shows even when the node is idle.
"""

import asyncio
import contextlib
import logging
from dataclasses import dataclass

import zmq.asyncio

from common.kv_event_reader import KVEventReader
from common.kv_event_updates import (
    CaughtUp,
    Events,
    Gap,
    Lost,
    Restarted,
    SnapshotLoaded,
    Undecodable,
    Update,
)
from common.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from common.metrics import Metrics
from router.prefix_index import PrefixIndex
from router.registry import Node

logger = logging.getLogger(__name__)


@dataclass
class _Followed:
    reader: KVEventReader
    task: asyncio.Task[None]
    num_gaps: int = 0
    num_undecodable: int = 0


class EventFollower:
    """``join``, ``leave`` and ``heartbeat`` are the hub's callbacks."""

    def __init__(self, index: PrefixIndex, metrics: Metrics) -> None:
        self._index = index
        self._metrics = metrics
        self._followed: dict[str, _Followed] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._context = zmq.asyncio.Context()

    def join(self, node: Node) -> None:
        self._index.add_node(node.node_id)
        if not node.register.events_endpoint:
            return
        reader = KVEventReader(
            node.register.events_endpoint, node.register.replay_endpoint or None, context=self._context
        )
        task = asyncio.create_task(self._follow(node.node_id, reader), name=f"events-{node.node_id}")
        self._followed[node.node_id] = _Followed(reader, task)

    def leave(self, node: Node) -> None:
        followed = self._followed.pop(node.node_id, None)
        if followed is not None:
            followed.task.cancel()
            self._ending.add(followed.task)
            followed.task.add_done_callback(self._ending.discard)
        self._index.remove_node(node.node_id)
        with contextlib.suppress(KeyError):
            self._metrics.gauge("router_index_blocks").remove(node.node_id)

    def heartbeat(self, node: Node) -> None:
        followed = self._followed.get(node.node_id)
        if followed is not None:
            followed.reader.note_head(node.register.epoch, node.last_event_seq)
        blocks = self._index.num_blocks(node.node_id)
        self._metrics.gauge("router_index_blocks").labels(node.node_id).set(blocks)

    def state(self, node_id: str) -> dict[str, int | bool]:
        """For /v1/cluster: how well this node is followed."""
        followed = self._followed.get(node_id)
        return {
            "followed": followed is not None,
            "trusted": self._index.is_trusted(node_id),
            "next_seq": followed.reader.next_seq if followed else 0,
            "gaps": followed.num_gaps if followed else 0,
            "undecodable": followed.num_undecodable if followed else 0,
            "blocks": self._index.num_blocks(node_id),
        }

    async def close(self) -> None:
        tasks = [f.task for f in self._followed.values()] + list(self._ending)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _follow(self, node_id: str, reader: KVEventReader) -> None:
        try:
            async with reader:
                async for update in reader.updates():
                    self._apply(node_id, update)
        except Exception:
            logger.exception(
                "following the KV events of node %s failed; its cache is not considered", node_id
            )
            self._index.clear(node_id)
            self._index.set_trusted(node_id, False)

    def _apply(self, node_id: str, update: Update) -> None:
        index, followed = self._index, self._followed[node_id]
        match update:
            case Events():
                for event in update.batch.events:
                    self._apply_event(node_id, event)
            case Gap():
                followed.num_gaps += 1
                index.set_trusted(node_id, False)
                logger.warning(
                    "node %s: KV events %d to %d missed", node_id, update.first_seq, update.last_seq
                )
            case CaughtUp():
                index.set_trusted(node_id, True)
            case Lost():
                # What follows is applied to nothing: too little, never too much.
                index.clear(node_id)
                index.set_trusted(node_id, True)
            case Restarted():
                index.clear(node_id)
                index.set_trusted(node_id, False)
            case SnapshotLoaded():
                index.clear(node_id)
                for block in update.blocks:
                    index.store(node_id, [block.block_hash], block.group_idx, block.medium)
            case Undecodable():
                followed.num_undecodable += 1
                logger.error("node %s: KV event batch %s lost: %s", node_id, update.seq, update.reason)

    def _apply_event(self, node_id: str, event: KVEvent) -> None:
        match event:
            case BlockStored():
                self._index.store(node_id, event.block_hashes, event.group_idx, event.medium)
            case BlockRemoved():
                self._index.remove(node_id, event.block_hashes, event.group_idx, event.medium)
            case AllBlocksCleared():
                self._index.clear(node_id)
