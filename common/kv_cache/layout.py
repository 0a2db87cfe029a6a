"""How KV is laid out: groups of layers, bytes of a block, and what a pair of nodes must agree on.

Layers of one window form a group with its own pool; a block is all layers of one group for B tokens,
contiguous (block-major). MTP modules join the trunk's group of their window, else they are a group of
their own. The rules for windows are those of 02-exactness 3: one place gives the free boundary, the pool's
need and the admission cap, since they dead-lock when they drift apart. No torch here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from common.errors import ConfigError

LAYOUT_VERSION = 1
NULL_BLOCK = 0  # block 0 of every pool: stands for freed window blocks and takes writes that must not land

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class KVGroupSpec:
    """One KV group. ``layers`` are global attention layers: trunk 0..n-1, module m is layer n+m.

    ``extra_retained_tokens`` (X): positions kept longer than the window wants, because re-prefill of MTP
    slots starts up to N-1 positions before the step; 0 without modules or window.
    """

    layers: tuple[int, ...]
    window: int | None
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    extra_retained_tokens: int = 0

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: layers x (K, V) x B x heads x head size."""
        numbers = len(self.layers) * 2 * self.block_size * self.num_kv_heads * self.head_dim
        return numbers * DTYPE_BYTES[self.dtype]

    def skipped(self, num_computed: int) -> int:
        """Positions below this are never read again once ``num_computed`` known tokens are computed."""
        if self.window is None:
            return 0
        return max(0, num_computed - self.window + 1 - self.extra_retained_tokens)

    def first_needed_block(self, num_computed: int) -> int:
        return self.skipped(num_computed) // self.block_size

    def max_blocks(self, max_in_flight: int, max_model_len: int) -> int:
        """Most blocks one request can own at a time, ``max_in_flight`` tokens being computed in a step."""
        if self.window is None:
            return cdiv(max_model_len, self.block_size)
        span = min(self.window - 1 + self.extra_retained_tokens + max_in_flight, max_model_len)
        return cdiv(span, self.block_size) + 1


@dataclass(frozen=True)
class KVLayout:
    """All groups of a model; every group has the same block size in this version."""

    groups: tuple[KVGroupSpec, ...]
    num_layers: int  # of the trunk
    num_modules: int

    @property
    def block_size(self) -> int:
        return self.groups[0].block_size

    @cached_property
    def _locations(self) -> dict[int, tuple[int, int]]:
        return {layer: (g, i) for g, group in enumerate(self.groups) for i, layer in enumerate(group.layers)}

    def locate(self, layer: int) -> tuple[int, int]:
        """(group, index of the layer inside the group's blocks) of a global layer."""
        return self._locations[layer]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block of every group together."""
        return sum(group.block_bytes for group in self.groups)

    def describe(self) -> dict[str, str]:
        """The layout's part of the fingerprint, by name."""
        windows = ";".join(
            f"{'full' if g.window is None else g.window}:{','.join(map(str, g.layers))}" for g in self.groups
        )
        first = self.groups[0]
        return {
            "kv_layout_version": str(LAYOUT_VERSION),
            "kv_dtype": first.dtype,
            "kv_heads": str(first.num_kv_heads),
            "head_dim": str(first.head_dim),
            "kv_groups": windows,
            "block_size": str(first.block_size),
        }


def build_layout(
    layer_windows: Sequence[int | None],
    module_windows: Sequence[int | None],
    *,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
) -> KVLayout:
    """Groups layers by window, in order of their first layer; full attention comes first."""
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"KV dtype {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
    num_layers, num_modules = len(layer_windows), len(module_windows)
    by_window: dict[int | None, list[int]] = {}
    for layer, window in enumerate((*layer_windows, *module_windows)):
        by_window.setdefault(window, []).append(layer)
    groups = []
    for window in sorted(by_window, key=lambda w: (w is not None, w)):
        layers = tuple(by_window[window])
        has_modules = window is not None and layers[-1] >= num_layers
        groups.append(
            KVGroupSpec(
                layers=layers,
                window=window,
                block_size=block_size,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                dtype=dtype,
                extra_retained_tokens=max(0, num_modules - 1) if has_modules else 0,
            )
        )
    return KVLayout(tuple(groups), num_layers, num_modules)
