"""What of an engine takes part in transfers: the bytes of its KV pools, and the fingerprint to compare."""

import msgspec

from common.engine.build import BuiltEngine
from common.kv_cache.layout import DTYPE_BYTES, GroupSpec, KVGroupSpec
from kv_transfer.geometry import HeadShare
from kv_transfer.plan import GroupPool, KvPools


def pools_of(built: BuiltEngine) -> KvPools:
    """The engine's own memory, one pool a KV group: a transfer reads and writes it in place."""
    return KvPools(
        tuple(
            GroupPool(built.storage.block_bytes(g), spec.block_size, _inside(spec))
            for g, spec in enumerate(built.layout.groups)
        )
    )


def _inside(spec: GroupSpec) -> HeadShare | None:
    """Attention's blocks can be taken apart; recurrent state goes as it is."""
    if not isinstance(spec, KVGroupSpec):
        return None
    return HeadShare(2 * len(spec.layers), spec.num_kv_heads, spec.head_dim * DTYPE_BYTES[spec.dtype])


def fingerprint_of(built: BuiltEngine) -> str:
    """The engine's fingerprint as one string: names and values, in order of the names."""
    return msgspec.json.encode(built.fingerprint, order="sorted").decode()
