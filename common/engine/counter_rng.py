"""Random numbers as a function of (seed or request, position, purpose): never a stream.

Philox is counter-based: a key and a counter give the number, whatever was drawn before. So a request draws
the same numbers alone, in a batch, after a preemption and on another node.
"""

import enum
import hashlib
import threading

import numpy as np
import torch
from torch import Tensor

TINY = np.finfo(np.float64).tiny


class Purpose(enum.IntEnum):
    SAMPLE = 0  # the trunk's token at a position; seeded drafts share it (Gumbel coupling)
    ACCEPT = 1
    RESIDUAL = 2
    DRAFT = 3


def request_key(request_id: str, seed: int | None) -> int:
    """64-bit key of a request's random numbers."""
    text = f"seed:{seed}" if seed is not None else f"request:{request_id}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


class _Philox(threading.local):
    """One generator a thread, set to a key before every use: making a new one costs five times as much, as
    NumPy seeds it from the system first."""

    def __init__(self) -> None:
        self.bits = np.random.Philox(key=0)
        self.generator = np.random.Generator(self.bits)
        self.fresh = self.bits.state  # counter 0, nothing buffered


_philox = _Philox()


def uniform(key: int, position: int, purpose: Purpose, count: int) -> np.ndarray:
    """``count`` float64 in (0, 1) for one position and purpose."""
    philox = _philox
    philox.fresh["state"]["key"] = np.array(
        [key, (position << 8) | purpose], dtype=np.uint64
    )  # a plain list may pass through floats
    philox.bits.state = philox.fresh
    return np.maximum(philox.generator.random(count), TINY)


def gumbel(key: int, position: int, purpose: Purpose, count: int) -> Tensor:
    """Standard Gumbel noise [count], float32: argmax(log p + noise) is a draw from p."""
    u = uniform(key, position, purpose, count)
    return torch.from_numpy((-np.log(-np.log(u))).astype(np.float32))
