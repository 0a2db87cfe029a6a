"""KV events as lines for a person: sequence, gaps, recoveries, blocks with their lookahead."""

from collections.abc import Iterator, Sequence
from typing import Any

from common.extra_keys import WITHHELD
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
from common.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    describe_hash,
    stored_token_ids,
)

_TOKENS_SHOWN = 6


def format_update(update: Update) -> Iterator[str]:
    """One line for each block or other event of the update, without line ends."""
    match update:
        case Events(seq=seq, batch=batch, replayed=replayed):
            prefix = f"{seq:>8}{'r' if replayed else ' '} rank {batch.data_parallel_rank or 0}"
            for event in batch.events:
                for line in format_event(event):
                    yield f"{prefix}  {line}"
            if batch.num_unknown_events or batch.num_unknown_fields:
                yield (
                    f"{prefix}  skipped {batch.num_unknown_events} unknown events "
                    f"and {batch.num_unknown_fields} unknown fields"
                )
        case Gap(first_seq=first, last_seq=last):
            yield f"-- gap: {first}..{last} missed, asking for them"
        case CaughtUp(seq=seq, by=by):
            yield f"-- caught up to {seq} by {by}"
        case Lost(first_seq=first, last_seq=last):
            yield f"-- lost: {first}..{last} cannot be had; earlier blocks are no longer certain"
        case Restarted(epoch=epoch):
            yield f"-- publisher restarted (epoch {epoch or 'not told'}); its earlier blocks are gone"
        case SnapshotLoaded(epoch=epoch, seq=seq, blocks=blocks):
            yield f"-- snapshot of {len(blocks)} blocks at {seq}, epoch {epoch}"
            for block in blocks:
                position = "?" if block.position is None else str(block.position)
                yield (
                    f"{seq:>8}s stored {describe_hash(block.block_hash)} at {position} "
                    f"after {describe_hash(block.parent_block_hash)} "
                    f"{_format_content(block.token_ids, block.lookahead_token_ids, block.extra_keys)}"
                )
        case Undecodable(seq=seq, reason=reason):
            yield f"-- batch {'?' if seq is None else seq} cannot be read: {reason}"


def format_event(event: KVEvent) -> Iterator[str]:
    match event:
        case BlockStored():
            parent = event.parent_block_hash
            for index, block_hash in enumerate(event.block_hashes):
                lookahead = None if event.lookahead_token_ids is None else event.lookahead_token_ids[index]
                keys = None if event.extra_keys is None else event.extra_keys[index]
                yield (
                    f"stored {describe_hash(block_hash)} after {describe_hash(parent)} "
                    f"{_format_content(stored_token_ids(event, index), lookahead, keys)}"
                    f" on {event.medium or '?'}"
                )
                parent = block_hash
        case BlockRemoved():
            for block_hash in event.block_hashes:
                yield f"removed {describe_hash(block_hash)} on {event.medium or '?'}"
        case AllBlocksCleared():
            yield "all blocks cleared"


def _format_content(
    token_ids: Sequence[int], lookahead: Sequence[int] | None, keys: Sequence[Any] | None
) -> str:
    """First tokens of the block, then the lookahead behind a plus sign: ``[5 6 7 .. (16)] + [9 10]``."""
    if keys is not None and tuple(keys) == WITHHELD:
        return "[withheld: salted]"
    shown = " ".join(str(token) for token in token_ids[:_TOKENS_SHOWN])
    more = f" .. ({len(token_ids)})" if len(token_ids) > _TOKENS_SHOWN else ""
    ahead = "" if lookahead is None else f" + [{' '.join(str(token) for token in lookahead)}]"
    return f"[{shown}{more}]{ahead}{'' if keys is None else f' keys {keys}'}"
