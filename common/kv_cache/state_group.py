"""The KV group of recurrent layers: a block is their state at one position, not KV of many.

Block i of a request stands for positions i*S .. (i+1)*S-1, S the distance of checkpoints, and holds the state
after the last computed one of them: while the request is inside, its running state; once it is past, a
checkpoint after (i+1)*S positions, found under the hash of the KV block that ends there. So allocation,
hits, hand-over and events treat it as they treat KV. A state cannot be rewound (02-exactness 3): a request
starts at a checkpoint, or where it was handed over with its running state. No torch here.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod

HEADER_NUMBERS = (
    4  # the first holds the position (as int32) that the state stands after; 16 bytes keep alignment
)
_STATE_BYTES = 4  # states are fp32, whatever the model's dtype


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class RecurrentLayer:
    """A trunk layer's state: the last inputs of its convolution, and the matrices of its delta net if it
    is one."""

    layer: int
    conv: tuple[int, int]  # channels, kernel - 1
    delta: tuple[int, int, int] | None = None  # heads, key size, value size

    @property
    def parts(self) -> tuple[tuple[int, ...], ...]:
        return (self.conv,) if self.delta is None else (self.conv, self.delta)


@dataclass(frozen=True)
class StateGroupSpec:
    """All recurrent layers. ``block_size``: tokens from one checkpoint to the next.

    ``extra_retained_tokens`` (N-1): the last blocks wait so long before they are final, and a checkpoint that
    was given back before could not be registered.
    """

    recurrent_layers: tuple[RecurrentLayer, ...]
    block_size: int
    extra_retained_tokens: int = 0

    dtype = "float32"
    block_rows = 1
    keeps_all = False

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(layer.layer for layer in self.recurrent_layers)

    @cached_property
    def slices(self) -> dict[int, tuple[slice, ...]]:
        """Where the parts of each layer lie in a block's numbers."""
        out, at = {}, HEADER_NUMBERS
        for layer in self.recurrent_layers:
            places = []
            for shape in layer.parts:
                places.append(slice(at, at + prod(shape)))
                at += prod(shape)
            out[layer.layer] = tuple(places)
        return out

    @cached_property
    def shapes(self) -> dict[int, tuple[tuple[int, ...], ...]]:
        """Shapes of the parts of each layer."""
        return {layer.layer: layer.parts for layer in self.recurrent_layers}

    @cached_property
    def row_numbers(self) -> int:
        """fp32 numbers of one state, header included, padded to 16 bytes."""
        numbers = HEADER_NUMBERS + sum(
            prod(shape) for layer in self.recurrent_layers for shape in layer.parts
        )
        return cdiv(numbers, 4) * 4

    @property
    def block_bytes(self) -> int:
        return self.row_numbers * _STATE_BYTES

    def skipped(self, num_computed: int) -> int:
        """Positions below this are in blocks that nobody needs any more.

        Kept are the running state, the checkpoints that are not final yet, and the last checkpoint before:
        where a hand-over's row is lost, that is where D begins.
        """
        return max(0, num_computed - 1 - self.extra_retained_tokens - self.block_size)

    def first_needed_block(self, num_computed: int) -> int:
        return self.skipped(num_computed) // self.block_size

    def first_start_block(self, start: int) -> int:
        """The block of the last checkpoint at or below ``start``, the only one a request starts from; 0 also
        where there is none."""
        return max(0, start // self.block_size - 1)

    def max_blocks(self, max_in_flight: int, max_model_len: int) -> int:
        """Most blocks one request can own at a time, ``max_in_flight`` tokens being computed in a step."""
        span = min(1 + self.extra_retained_tokens + self.block_size + max_in_flight, max_model_len)
        return cdiv(span, self.block_size) + 1

    def describe(self) -> str:
        """For the fingerprint: geometry of every layer, and the distance of checkpoints."""
        layers = ",".join(f"{layer.layer}:{layer.parts}" for layer in self.recurrent_layers)
        return f"{layers}@{self.block_size}".replace(" ", "")
