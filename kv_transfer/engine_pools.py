"""What of an engine takes part in transfers: the bytes of its KV pools, and the fingerprint to compare."""

import msgspec

from common.engine.build import BuiltEngine
from kv_transfer.plan import GroupPool, KvPools


def pools_of(built: BuiltEngine) -> KvPools:
    """The engine's own memory, one pool a KV group: a transfer reads and writes it in place."""
    groups = enumerate(built.layout.groups)
    return KvPools(tuple(GroupPool(built.storage.block_bytes(g), spec.block_size) for g, spec in groups))


def fingerprint_of(built: BuiltEngine) -> str:
    """The engine's fingerprint as one string: names and values, in order of the names."""
    return msgspec.json.encode(built.fingerprint, order="sorted").decode()
