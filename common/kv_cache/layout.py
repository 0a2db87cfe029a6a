"""How KV is laid out: groups of layers, bytes of a block, and what a pair of nodes must agree on.

Layers of one window form a group with its own pool; a block is all layers of one group for B tokens,
contiguous (block-major). MTP modules join the trunk's group of their window, else they are a group of
their own. The recurrent layers of the trunk are one more group, whose block is their state at one position
(see `state_group`). Block sizes of groups are multiples of the smallest, B, which is what is hashed. The
rules for windows are those of 02-exactness 3: one place gives the free boundary, the pool's need and the
admission cap, since they dead-lock when they drift apart. No torch here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from common.errors import ConfigError
from common.kv_cache.state_group import RecurrentLayer, StateGroupSpec, cdiv

__all__ = [
    "DTYPE_BYTES",
    "LAYOUT_VERSION",
    "NULL_BLOCK",
    "GroupSpec",
    "KVGroupSpec",
    "KVLayout",
    "RecurrentLayer",
    "StateGroupSpec",
    "build_layout",
    "cdiv",
]

LAYOUT_VERSION = 1
NULL_BLOCK = 0  # block 0 of every pool: stands for freed window blocks and takes writes that must not land

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


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
        return self.block_rows * self.row_numbers * DTYPE_BYTES[self.dtype]

    @property
    def block_rows(self) -> int:
        """Rows of one block: layers x (K, V) x tokens."""
        return len(self.layers) * 2 * self.block_size

    @property
    def row_numbers(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def keeps_all(self) -> bool:
        """No block is given back while the request lives."""
        return self.window is None

    def skipped(self, num_computed: int) -> int:
        """Positions below this are never read again once ``num_computed`` known tokens are computed."""
        if self.window is None:
            return 0
        return max(0, num_computed - self.window + 1 - self.extra_retained_tokens)

    def first_needed_block(self, num_computed: int) -> int:
        return self.skipped(num_computed) // self.block_size

    def first_start_block(self, start: int) -> int:
        """First block that must hold KV for a request to start at ``start`` (a hit, a hand-over)."""
        return self.first_needed_block(start)

    def max_blocks(self, max_in_flight: int, max_model_len: int) -> int:
        """Most blocks one request can own at a time, ``max_in_flight`` tokens being computed in a step."""
        if self.window is None:
            return cdiv(max_model_len, self.block_size)
        span = min(self.window - 1 + self.extra_retained_tokens + max_in_flight, max_model_len)
        return cdiv(span, self.block_size) + 1


GroupSpec = KVGroupSpec | StateGroupSpec


@dataclass(frozen=True)
class KVLayout:
    """All groups of a model: those of attention first, then at most one of recurrent state."""

    groups: tuple[GroupSpec, ...]
    num_layers: int  # of the trunk
    num_modules: int

    def __post_init__(self) -> None:
        for group in self.groups:
            if group.block_size % self.block_size:
                raise ConfigError(
                    f"a KV group has blocks of {group.block_size} tokens, which is no multiple of the "
                    f"smallest, {self.block_size}; choose multiples"
                )

    @cached_property
    def block_size(self) -> int:
        """B: tokens of the smallest block, the unit of block hashes."""
        return min(group.block_size for group in self.groups)

    @cached_property
    def hit_unit(self) -> int:
        """Hits are multiples of it: the least common multiple of all block sizes."""
        return math.lcm(*(group.block_size for group in self.groups))

    @cached_property
    def kv_groups(self) -> tuple[KVGroupSpec, ...]:
        """Those of attention; their indices are the same as in ``groups``."""
        return tuple(group for group in self.groups if isinstance(group, KVGroupSpec))

    @cached_property
    def state_group(self) -> StateGroupSpec | None:
        """That of recurrent layers: the last of ``groups``."""
        last = self.groups[-1]
        return last if isinstance(last, StateGroupSpec) else None

    @cached_property
    def _locations(self) -> dict[int, tuple[int, int]]:
        return {
            layer: (g, i) for g, group in enumerate(self.kv_groups) for i, layer in enumerate(group.layers)
        }

    def locate(self, layer: int) -> tuple[int, int]:
        """(group, index of the layer inside the group's blocks) of a global attention layer."""
        return self._locations[layer]

    @cached_property
    def trunk_groups(self) -> tuple[int, ...]:
        """KV groups that the trunk's attention layers are in."""
        return tuple(
            g for g, group in enumerate(self.kv_groups) if any(i < self.num_layers for i in group.layers)
        )

    @property
    def bytes_per_block(self) -> int:
        """Bytes of B tokens in every group together."""
        return sum(cdiv(group.block_bytes * self.block_size, group.block_size) for group in self.groups)

    def describe(self) -> dict[str, str]:
        """The layout's part of the fingerprint, by name. Block sizes of attention are no part of it: a pair
        may differ in them (`kv_transfer/geometry.py`)."""
        windows = ";".join(
            f"{'full' if g.window is None else g.window}:{','.join(map(str, g.layers))}"
            for g in self.kv_groups
        )
        first, state = self.kv_groups[0], self.state_group
        return {
            "kv_layout_version": str(LAYOUT_VERSION),
            "kv_dtype": first.dtype,
            "kv_heads": str(first.num_kv_heads),
            "head_dim": str(first.head_dim),
            "kv_groups": windows,
            "state_group": "none" if state is None else state.describe(),
        }


def build_layout(
    layer_windows: Mapping[int, int | None] | Sequence[int | None],
    module_windows: Sequence[int | None],
    *,
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: str,
    recurrent_layers: Sequence[RecurrentLayer] = (),
    state_block_size: int = 0,
) -> KVLayout:
    """Groups layers by window, in order of their first layer; full attention comes first, state last.

    ``layer_windows`` are those of the trunk's attention layers: of all layers, or by layer where others are
    recurrent. ``state_block_size`` is the distance of state checkpoints, a multiple of ``block_size``; 0
    chooses the smallest at which a checkpoint takes no more memory than the KV of the tokens before it.
    """
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"KV dtype {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
    windows = dict(layer_windows if isinstance(layer_windows, Mapping) else enumerate(layer_windows))
    num_layers, num_modules = len(windows) + len(recurrent_layers), len(module_windows)
    windows.update((num_layers + m, window) for m, window in enumerate(module_windows))
    by_window: dict[int | None, list[int]] = {}
    for layer, window in windows.items():
        by_window.setdefault(window, []).append(layer)
    groups: list[GroupSpec] = []
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
    if not groups:
        raise ConfigError("a model without any attention layer is not supported: it has no KV to lay out")
    if recurrent_layers:
        state = StateGroupSpec(
            tuple(recurrent_layers), state_block_size or block_size, max(0, num_modules - 1)
        )
        if not state_block_size:
            kv_bytes = sum(group.block_bytes for group in groups)
            state = replace(state, block_size=block_size * cdiv(state.block_bytes, kv_bytes))
        groups.append(state)
    return KVLayout(tuple(groups), num_layers, num_modules)
