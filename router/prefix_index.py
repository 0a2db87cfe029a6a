"""Which node holds which KV blocks, by content: what the router knows of the nodes' prefix caches.

The key is the integer that KV events publish for a block's hash. That hash chains over tokens, extra keys
and lookahead, so equal tokens with another lookahead are another block, and a prompt's own hashes (made
with the parameters that the nodes registered) find exactly the blocks that the node's cache would hit.
Nodes are bits of a mask, so one walk over a prompt's hashes serves all of them.
"""

from collections.abc import Iterable, Sequence

from common.kv_events import BlockHash


class PrefixIndex:
    """Not thread-safe. Memory is one entry a block and node, freed when the node drops it or leaves.

    A block may be held in several *places* of a node, its KV groups and media; it counts while any has it.
    """

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}  # block -> mask of nodes
        self._places: dict[str, dict[int, set[tuple[int | None, str | None]]]] = {}  # node -> block -> places
        self._bits: dict[str, int] = {}
        self._untrusted = 0  # mask of nodes whose entries may be wrong at the moment

    def num_blocks(self, node_id: str) -> int:
        return len(self._places.get(node_id, ()))

    @property
    def num_entries(self) -> int:
        return len(self._holders)

    def add_node(self, node_id: str) -> None:
        """Starts empty and untrusted; a node that was there is forgotten first."""
        self.remove_node(node_id)
        used = sum(self._bits.values())
        self._bits[node_id] = ~used & (used + 1)  # the lowest bit that is free
        self._places[node_id] = {}
        self.set_trusted(node_id, False)

    def remove_node(self, node_id: str) -> None:
        if node_id in self._bits:
            self.clear(node_id)
            self._untrusted &= ~self._bits.pop(node_id)
            del self._places[node_id]

    def set_trusted(self, node_id: str, trusted: bool) -> None:
        """Untrusted nodes hold nothing as far as ``matches`` goes."""
        bit = self._bits[node_id]
        self._untrusted = self._untrusted & ~bit if trusted else self._untrusted | bit

    def is_trusted(self, node_id: str) -> bool:
        return node_id in self._bits and not self._untrusted & self._bits[node_id]

    def store(
        self, node_id: str, hashes: Iterable[BlockHash], group: int | None = None, medium: str | None = None
    ) -> None:
        bit, places, holders = self._bits[node_id], self._places[node_id], self._holders
        for key in map(block_key, hashes):
            places.setdefault(key, set()).add((group, medium))
            holders[key] = holders.get(key, 0) | bit

    def remove(
        self, node_id: str, hashes: Iterable[BlockHash], group: int | None = None, medium: str | None = None
    ) -> None:
        """Blocks that were never stored are passed over; the rest is removed all the same."""
        places = self._places[node_id]
        for key in map(block_key, hashes):
            held = places.get(key)
            if held is None:
                continue
            held.discard((group, medium))
            if not held:
                del places[key]
                self._forget(key, self._bits[node_id])

    def clear(self, node_id: str) -> None:
        bit = self._bits[node_id]
        for key in self._places[node_id]:
            self._forget(key, bit)
        self._places[node_id] = {}

    def matches(self, keys: Sequence[int]) -> dict[str, int]:
        """For each trusted node, how many leading blocks of the prompt it holds (nodes with none are absent).

        ``keys`` are the prompt's block keys in order; O(matched blocks + nodes).
        """
        depths: dict[int, int] = {}  # depth -> nodes that hold exactly so many
        holding = ~self._untrusted
        for depth, key in enumerate(keys):
            still = holding & self._holders.get(key, 0)
            if depth and still != holding:
                depths[depth] = holding & ~still
            holding = still
            if not holding:
                break
        if keys and holding:
            depths[len(keys)] = holding
        return {
            node_id: depth
            for node_id, bit in self._bits.items()
            for depth, mask in depths.items()
            if mask & bit
        }

    def _forget(self, key: int, bit: int) -> None:
        left = self._holders[key] & ~bit
        if left:
            self._holders[key] = left
        else:
            del self._holders[key]


def block_key(block_hash: BlockHash) -> int:
    """Events carry a hash as a 64-bit integer, or as the digest whose last 8 bytes it is."""
    return block_hash if isinstance(block_hash, int) else int.from_bytes(block_hash[-8:], "big")
