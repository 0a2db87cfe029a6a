"""What a method of drafting asks of the scheduler and of the block hashes. Torch-free; chosen by data.

method                             drafts   lookahead k   slots past T
MTP, N modules (module i: draft i)    N          N             0
MTP, one module applied N times       N          1            N-1
n-gram lookup in the known tokens     N          0             0
none                                  0          0             0
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Speculation:
    """``num_drafts``: most drafts a step proposes. ``lookahead``: known tokens that the drafter's KV of a
    position depends on past it (`num_prefill_lookahead`). ``num_slots``: KV slots that drafting writes
    past T; they are provisional and always rewritten."""

    num_drafts: int = 0
    lookahead: int = 0
    num_slots: int = 0

    @property
    def tail(self) -> int:
        """Tokens that a hit, a lost carry row or a fork leaves to compute: they refill the carry."""
        return max(self.lookahead, 1)


NO_SPECULATION = Speculation()


def multi_module(num_modules: int) -> Speculation:
    """N modules, each with KV of its own."""
    return Speculation(num_modules, num_modules)


def recursive_module(num_drafts: int) -> Speculation:
    """One module that reads its own output for all drafts but the first."""
    return Speculation(num_drafts, 1, max(0, num_drafts - 1))


def lookup(num_drafts: int) -> Speculation:
    """Drafts without a model."""
    return Speculation(num_drafts)
