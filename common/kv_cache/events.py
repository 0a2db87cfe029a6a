"""What the prefix cache has to tell the outside: collected during a step, taken once at its end."""

from collections.abc import Sequence
from typing import Any

from common.block_hash import BlockHasher, event_hash
from common.extra_keys import WITHHELD, to_event_form
from common.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from common.request import Request

MEDIUM = "GPU"  # the field's name for the engine's own memory, whichever device that is


class CacheEvents:
    """Events in the order in which the cache changed. ``group_idx`` is written where groups are several.

    Of a request with a cache salt only hashes and structure are told, unless ``tell_salted``: tokens are
    zeros, lookahead is left out, keys are WITHHELD. Whoever knows salt and tokens finds the blocks all the
    same; who follows the events learns neither (docs/kv-events.md).
    """

    def __init__(self, hasher: BlockHasher, num_groups: int, tell_salted: bool = False) -> None:
        self._hasher = hasher
        self._tell_salted = tell_salted
        self._several = num_groups > 1
        self._events: list[KVEvent] = []

    def take(self) -> list[KVEvent]:
        events, self._events = self._events, []
        return events

    def removed(self, group: int, digests: Sequence[bytes]) -> None:
        self._events.append(
            BlockRemoved(
                block_hashes=[event_hash(d) for d in digests],
                medium=MEDIUM,
                group_idx=group if self._several else None,
            )
        )

    def cleared(self) -> None:
        self._events.append(AllBlocksCleared())

    def stored(self, group: int, request: Request, positions: Sequence[int], ratio: int = 1) -> None:
        """Announces the request's blocks at ``positions`` (ascending), one event per unbroken run.

        A block of the group is ``ratio`` hashed blocks, and goes by the hash of the last.
        """
        run: list[int] = []
        for i in positions:
            if run and i != run[-1] + 1:
                self._stored_run(group, request, run, ratio)
                run = []
            run.append(i)
        self._stored_run(group, request, run, ratio)

    def _stored_run(self, group: int, request: Request, run: Sequence[int], ratio: int) -> None:
        size, k = self._hasher.block_size * ratio, self._hasher.num_lookahead
        start, end = run[0] * size, (run[-1] + 1) * size
        hashes, ids, extra = request.block_hashes, request.token_ids, request.extra_keys
        withheld = extra is not None and bool(extra.cache_salt) and not self._tell_salted
        keys: list[Sequence[Any] | None] | None = None
        if withheld:
            keys = [WITHHELD for _ in run]
        elif extra is not None:
            keys = [to_event_form(extra.keys_for(i * size, (i + 1) * size + k)) for i in run]
        lookahead = None
        if k and not withheld:
            lookahead = [ids[(i + 1) * size : (i + 1) * size + k] for i in run]
        self._events.append(
            BlockStored(
                block_hashes=[event_hash(hashes[(i + 1) * ratio - 1]) for i in run],
                parent_block_hash=event_hash(hashes[run[0] * ratio - 1]) if run[0] else None,
                token_ids=[0] * (end - start) if withheld else ids[start:end],
                block_size=size,
                lora_id=None,
                medium=MEDIUM,
                lora_name=request.lora_name,
                extra_keys=keys if keys and any(keys) else None,
                group_idx=group if self._several else None,
                lookahead_token_ids=lookahead,
            )
        )
