"""Block tables of requests over all KV groups: allocate, hit, register, free, fork.

A request owns one reference on every non-null block of its tables. Groups share the block hashes; a hit is
the longest length on which all groups agree, found by iterating to a fixed point (02-exactness 3). A group
with larger blocks than B uses the hash of the last B tokens of each: hashes are chained. Only *final* blocks
are registered, at the end of the step that made them final. No torch here.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from common.block_hash import BlockHasher
from common.errors import CapacityError
from common.kv_cache.block_pool import BlockPool
from common.kv_cache.events import CacheEvents
from common.kv_cache.layout import NULL_BLOCK, GroupSpec, KVLayout, cdiv
from common.request import Request


@dataclass(frozen=True)
class BlockCopy:
    """Copy a whole block before the next step runs; both blocks are owned until `copies_done`."""

    group: int
    source: int
    destination: int


@dataclass
class CacheStats:
    """Prefix-cache counters, in tokens; cumulative since start."""

    queries: int = 0
    hits: int = 0

    def record(self, num_tokens: int, num_hit: int) -> None:
        self.queries += num_tokens
        self.hits += num_hit


@dataclass
class KVCacheManager:
    """``num_blocks[g]`` blocks of group g, null block included."""

    layout: KVLayout
    num_blocks: Sequence[int]
    hasher: BlockHasher
    prefix_caching: bool = True
    drop_last_block: bool = False  # plain hashes: the last block of a hit may hold another reader's draft KV
    tell_salted_tokens: bool = False  # KV events of salted requests carry token ids, salt and keys too
    num_unhashed: int = 0  # plain hashes: tokens after a block that its draft KV depends on all the same
    stats: CacheStats = field(default_factory=CacheStats)

    def __post_init__(self) -> None:
        self.pools = [BlockPool(n) for n in self.num_blocks]
        self.events = CacheEvents(self.hasher, len(self.pools), self.tell_salted_tokens)
        self._pending_copies: list[BlockCopy] = []
        # Plain hashes, per group: what followed each registered block where it was computed.
        self._followed_by: list[dict[int, object]] = [{} for _ in self.pools]

    @property
    def block_size(self) -> int:
        return self.layout.block_size

    @property
    def groups(self) -> tuple[GroupSpec, ...]:
        return self.layout.groups

    def _ratio(self, group: GroupSpec) -> int:
        """Hashes of B tokens to a block of this group."""
        return group.block_size // self.block_size

    # ---- sizes ------------------------------------------------------------------------------------------

    def max_request_tokens(self, max_in_flight: int, max_model_len: int) -> int:
        """Longest sequence that can be alone in the pools."""
        longest = max_model_len
        for pool, group in zip(self.pools, self.groups, strict=True):
            usable = pool.num_usable
            if group.keeps_all or usable < group.max_blocks(max_in_flight, longest):
                longest = min(longest, usable * group.block_size)
        return longest

    @property
    def max_pinned_tokens(self) -> int:
        """Longest prefill that can own all its blocks at once, quarantined ones left out."""
        return min(
            pool.num_usable * group.block_size for pool, group in zip(self.pools, self.groups, strict=True)
        )

    def free_share(self) -> float:
        """Smallest free share over groups, 0..1."""
        return min(pool.num_free / (pool.num_blocks - 1) for pool in self.pools)

    def blocks_missing(self, request: Request, upto: int) -> list[int]:
        """Blocks each group must still give so that positions below ``upto`` have a place."""
        missing = []
        for g, group in enumerate(self.groups):
            have = len(request.tables[g]) if request.tables else 0
            start = max(have, group.first_needed_block(request.num_computed))
            missing.append(max(0, cdiv(upto, group.block_size) - start))
        return missing

    def fits(self, request: Request, upto: int, headroom: int, max_in_flight: int) -> bool:
        """Whether the whole of ``upto`` positions could be owned now, ``headroom`` blocks left free.

        A window group never owns more than its cap at a time.
        """
        for pool, group, need in zip(
            self.pools, self.groups, self.blocks_missing(request, upto), strict=True
        ):
            if min(need, group.max_blocks(max_in_flight, upto)) + headroom > pool.num_free:
                return False
        return True

    # ---- tables -----------------------------------------------------------------------------------------

    def allocate(self, request: Request, upto: int) -> bool:
        """Extends every table to cover positions below ``upto``; all groups or none. False: no room."""
        if not request.tables:
            request.tables = [[] for _ in self.groups]
            request.num_registered = [0] * len(self.groups)
        elif all(
            upto <= group.block_size * len(table)
            for group, table in zip(self.groups, request.tables, strict=True)
        ):
            return True  # most steps of a decode
        missing = self.blocks_missing(request, upto)
        if any(need > pool.num_free for need, pool in zip(missing, self.pools, strict=True)):
            return False
        for g, need in enumerate(missing):
            table = request.tables[g]
            if need:
                blocks = self._take(g, need)
                holes = cdiv(upto, self.groups[g].block_size) - len(table) - need
                table.extend([NULL_BLOCK] * holes + blocks)
        return True

    def _take(self, g: int, count: int) -> list[int]:
        blocks, evicted = self.pools[g].allocate(count)
        if evicted:
            self.events.removed(g, evicted)
        return blocks

    def allocate_span(self, request: Request, computed: int, upto: int) -> bool:
        """Hand-over: blocks for positions that ``computed`` received tokens leave in use, below ``upto``.

        Window groups get null blocks up to the first one that is needed once ``computed`` tokens are
        there, state groups up to the last checkpoint below; full groups get all. Tables may already start
        with a hit.
        """
        needs = []
        for g, group in enumerate(self.groups):
            have = len(request.tables[g])
            start = max(have, group.first_start_block(computed))
            needs.append((start - have, max(0, cdiv(upto, group.block_size) - start)))
        if any(need > pool.num_free for (_, need), pool in zip(needs, self.pools, strict=True)):
            return False
        for g, (holes, need) in enumerate(needs):
            if holes:  # all of the hit lies before the window: nobody reads it once the rest is there
                self._drop_blocks(g, request.tables[g], len(request.tables[g]))
            request.tables[g].extend([NULL_BLOCK] * holes + self._take(g, need))
        return True

    def free_skipped(self, request: Request) -> None:
        """Gives back window and state blocks that no later step reads (late free)."""
        for g, group in enumerate(self.groups):
            if group.keeps_all:
                continue
            table = request.tables[g]
            self._drop_blocks(g, table, min(group.first_needed_block(request.num_computed), len(table)))

    def _drop_blocks(self, g: int, table: list[int], end: int) -> None:
        """Ends the ownership of the blocks before index ``end``, last first; earlier ones went already."""
        for i in range(end - 1, -1, -1):
            if table[i] == NULL_BLOCK:
                break
            self.pools[g].free((table[i],))
            table[i] = NULL_BLOCK

    def free(self, request: Request) -> None:
        """Ends the request's ownership of all its blocks; the tail goes first, so it is evicted first."""
        self._cancel_copies(request)
        for pool, table in zip(self.pools, request.tables, strict=False):
            pool.free(reversed(table))
        request.tables = []
        request.num_registered = []

    def quarantine(self, request: Request, blocks: Mapping[int, Sequence[int]]) -> None:
        """Takes blocks that a broken transfer may still write to out of the request and out of use."""
        for g, ids in blocks.items():
            for block in ids:
                self.pools[g].quarantine(block)
                table = request.tables[g]
                table[table.index(block)] = NULL_BLOCK

    def release_quarantine(self, blocks: Mapping[int, Sequence[int]]) -> None:
        for g, ids in blocks.items():
            self.pools[g].release_quarantine(ids)

    def wanted(self, request: Request, cut: int) -> dict[int, dict[int, int]]:
        """{KV group: {block position: block}} of a reserved request that a hand-over must fill."""
        wanted = {}
        for g, group in enumerate(self.groups):
            first, end = request.num_computed // group.block_size, cdiv(cut, group.block_size)
            table = request.tables[g]
            wanted[g] = {i: table[i] for i in range(first, end) if table[i] != NULL_BLOCK}
        return wanted

    def restart_point(self, request: Request, upto: int) -> int | None:
        """Where a request can start that received its KV below ``upto`` but no running state of there.

        Without recurrent layers that is ``upto``, else the last state checkpoint, if the request owns it
        and everything that a window sees from there. None: only from the beginning (or from a hit).
        """
        state = self.layout.state_group
        if state is None:
            return upto
        point = upto // state.block_size * state.block_size
        for group, table in zip(self.groups, request.tables, strict=True):
            if NULL_BLOCK in table[group.first_start_block(point) : point // group.block_size]:
                return None
        return point or None

    # ---- prefix cache -----------------------------------------------------------------------------------

    def hash_known(self, request: Request) -> None:
        """Brings the request's block hashes up to its known tokens."""
        self.hasher.extend(request.block_hashes, request.token_ids, request.extra_keys)

    def match(self, request: Request, at_most: int | None = None) -> int:
        """Tokens of the longest hit, ``at_most`` so many, that leaves at least max(k, 1) tokens to compute;
        owns nothing yet."""
        if not self.prefix_caching:
            return 0
        self.hash_known(request)
        leave = max(self.hasher.num_lookahead, 1)
        limit = min(len(request.block_hashes), max(0, request.num_tokens - leave) // self.block_size)
        if request.stop_at is not None:
            limit = min(limit, (request.stop_at - 1) // self.block_size)  # something is left to compute
        if at_most is not None:
            limit = min(limit, at_most // self.block_size)
        hit = self._longest_hit(request, limit * self.block_size, checked=False)
        if self.drop_last_block:
            hit = self._longest_hit(
                request, max(0, hit - self.layout.hit_unit), checked=self.num_unhashed > 0
            )
        return hit

    def _longest_hit(self, request: Request, limit: int, *, checked: bool) -> int:
        """Tokens. Each group rounds down to its own blocks, so the fixed point is a multiple of them all.

        ``checked``: a block counts only if the same tokens followed where it was computed. Plain hashes do
        not say so, and the drop covers the last block only: one in the middle may be another
        continuation's.
        """
        length = limit
        while True:
            before = length
            for g, group in enumerate(self.groups):
                find = _full_hit if group.keeps_all else _window_hit
                is_cached = self._cached_blocks(request, g, checked)
                length = find(is_cached, length // group.block_size, group) * group.block_size
            if length == before or len(self.groups) == 1:
                return length

    def _cached_blocks(self, request: Request, g: int, checked: bool) -> "IsCached":
        lookup, hashes, ratio = self.pools[g].lookup, request.block_hashes, self._ratio(self.groups[g])
        if not checked:
            return lambda i: lookup(hashes[(i + 1) * ratio - 1]) is not None
        followed_by = self._followed_by[g]

        def is_cached(i: int) -> bool:
            block = lookup(hashes[(i + 1) * ratio - 1])
            return block is not None and followed_by.get(block) == self._following(request, g, i)

        return is_cached

    def _following(self, request: Request, g: int, i: int) -> object:
        """What the draft KV of block ``i`` depends on past its end: tokens, and the keys over them."""
        end = (i + 1) * self.groups[g].block_size
        upto = end + self.num_unhashed
        keys = None if request.extra_keys is None else request.extra_keys.keys_for(end, upto)
        return tuple(request.token_ids[end:upto]), keys

    def adopt(self, request: Request, num_tokens: int) -> None:
        """Puts the blocks of a hit of ``num_tokens`` into the (empty) tables; the request owns them now."""
        request.tables = [[] for _ in self.groups]
        request.num_registered = [num_tokens // group.block_size for group in self.groups]
        for g, (pool, group) in enumerate(zip(self.pools, self.groups, strict=True)):
            first = group.first_start_block(num_tokens)
            table, ratio = request.tables[g], self._ratio(group)
            table.extend([NULL_BLOCK] * first)
            for i in range(first, num_tokens // group.block_size):
                block = pool.lookup(request.block_hashes[(i + 1) * ratio - 1])
                assert block is not None, "a hit lost its block before it was adopted"
                pool.share(block)
                table.append(block)
        request.num_computed = num_tokens

    def register_final(self, request: Request, final: int) -> None:
        """Makes the request's blocks below position ``final`` findable and announces the new ones."""
        if not self.prefix_caching:
            return
        self.hash_known(request)
        hashes = request.block_hashes
        for g, (pool, group) in enumerate(zip(self.pools, self.groups, strict=True)):
            ratio = self._ratio(group)
            upto = min(final // group.block_size, len(hashes) // ratio)
            first, table = request.num_registered[g], request.tables[g]
            if first >= upto:
                continue
            fresh: list[int] = []
            for i in range(first, min(upto, len(table))):
                if table[i] != NULL_BLOCK and pool.register(table[i], hashes[(i + 1) * ratio - 1]):
                    fresh.append(i)
                    if self.num_unhashed:
                        end = (i + 1) * group.block_size + self.num_unhashed
                        assert end <= request.num_tokens, f"block {i} of {request!r} is not final"
                        self._followed_by[g][table[i]] = self._following(request, g, i)
            request.num_registered[g] = upto
            if fresh:
                self.events.stored(g, request, fresh, ratio)

    def reset_prefix_cache(self) -> None:
        """Forgets every cached block. Running requests keep theirs, unregistered."""
        for pool in self.pools:
            pool.clear_hashes()
        self.events.cleared()

    # ---- n sequences from one prompt --------------------------------------------------------------------

    def fork(self, parent: Request, child: Request, shared_upto: int, upto: int) -> bool:
        """Gives ``child`` positions below ``upto`` of ``parent``.

        Blocks wholly below ``shared_upto`` are shared, later ones copied (either may write to those).
        Copies are carried out before the next step; until `copies_done` a source has one owner more.
        False: no room, or recurrent layers, whose state after ``upto`` positions is gone by then.
        """
        if self.layout.state_group is not None:
            return False
        spans = [(shared_upto // g.block_size, cdiv(upto, g.block_size)) for g in self.groups]
        if any(pool.num_free < end - whole for pool, (whole, end) in zip(self.pools, spans, strict=True)):
            return False
        child.tables = []
        for g, (pool, (whole, end)) in enumerate(zip(self.pools, spans, strict=True)):
            table = parent.tables[g][:whole]
            for block in table:
                pool.share(block)
            for source in parent.tables[g][whole:end]:
                if source == NULL_BLOCK:  # left by the window
                    table.append(NULL_BLOCK)
                    continue
                pool.share(source)
                (copy,) = self._take(g, 1)
                self._pending_copies.append(BlockCopy(g, source, copy))
                table.append(copy)
            child.tables.append(table)
        child.num_registered = [
            min(whole, n) for (whole, _), n in zip(spans, parent.num_registered, strict=True)
        ]
        child.num_computed = upto
        return True

    def _cancel_copies(self, request: Request) -> None:
        """A fork that ends before its copies were made: its blocks may be somebody else's by then."""
        kept = []
        for copy in self._pending_copies:
            if copy.group < len(request.tables) and copy.destination in request.tables[copy.group]:
                self.pools[copy.group].free((copy.source,))
            else:
                kept.append(copy)
        self._pending_copies = kept

    def take_copies(self) -> tuple[BlockCopy, ...]:
        copies, self._pending_copies = tuple(self._pending_copies), []
        return copies

    def copies_done(self, copies: Iterable[BlockCopy]) -> None:
        for copy in copies:
            self.pools[copy.group].free((copy.source,))

    # ---- checks -----------------------------------------------------------------------------------------

    def check_invariants(self, requests: Iterable[Request]) -> None:
        """Every owned block is owned by exactly the tables (and pending copies) that name it."""
        owners: list[dict[int, int]] = [{} for _ in self.pools]
        for request in requests:
            for g, table in enumerate(request.tables):
                for block in table:
                    if block != NULL_BLOCK:
                        owners[g][block] = owners[g].get(block, 0) + 1
        for copy in self._pending_copies:
            owners[copy.group][copy.source] = owners[copy.group].get(copy.source, 0) + 1
        for pool, counted in zip(self.pools, owners, strict=True):
            pool.check_invariants()
            for block in range(1, pool.num_blocks):
                assert pool.ref_count(block) == counted.get(block, 0), f"block {block}: owners differ"


IsCached = Callable[[int], bool]
"""Whether the block at an index is there and may be used."""


def _full_hit(is_cached: IsCached, limit: int, group: GroupSpec) -> int:
    for i in range(limit):
        if not is_cached(i):
            return i
    return limit


def _window_hit(is_cached: IsCached, limit: int, group: GroupSpec) -> int:
    """Longest h <= limit such that every block still needed after h blocks is cached (right to left); of
    state that is the last checkpoint alone."""
    h, run = limit, 0
    while h > 0:
        needed = h - group.first_start_block(h * group.block_size)
        if run >= needed:
            return h
        i = h - run - 1
        if not is_cached(i):
            h, run = i, 0
        else:
            run += 1
    return 0


def pool_sizes(layout: KVLayout, kv_cache_bytes: int, num_blocks: int) -> list[int]:
    """Blocks of each group, null block included: ``num_blocks`` each, or what the memory holds, shared so
    that all groups have room for equally many tokens."""
    if num_blocks:
        return [num_blocks + 1] * len(layout.groups)
    count = kv_cache_bytes // layout.bytes_per_block
    if count < 2:
        raise CapacityError(
            f"kv_cache_mib holds {count} KV blocks of {layout.bytes_per_block} bytes; "
            f"at least 2 are needed: raise it to {cdiv(2 * layout.bytes_per_block, 1 << 20)} or more"
        )
    return [max(2, count * layout.block_size // group.block_size) for group in layout.groups]
