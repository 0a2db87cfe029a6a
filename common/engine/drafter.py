"""The one interface of everything that drafts; `build` chooses by data, nobody else asks which it is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from common.engine.batch import ScheduledRequest
from common.engine.sampler import DraftDistribution
from common.engine.speculation import Speculation

Choice = Callable[[str, int, int], int]
"""(request id, position, the drafter's own token) -> the draft: lets tests script what is proposed."""


@dataclass
class Verified:
    """A step's outcome for one entry, before drafting: ``tokens`` end with the trunk's own draw."""

    tokens: tuple[int, ...] = ()
    num_accepted: int = 0


@dataclass
class Drafts:
    """What was proposed for one entry, and (sampled requests) what it was drawn from."""

    ids: list[int] = field(default_factory=list)
    log_q: list[Tensor] = field(default_factory=list)


class Drafter(Protocol):
    """One for an engine; state of requests is kept by id until `forget`."""

    speculation: Speculation  # what the scheduler and the hashes must know

    def run(
        self, entries: Sequence[ScheduledRequest], verified: Sequence[Verified], hidden: Sequence[Tensor]
    ) -> list[Drafts]:
        """After a trunk step: brings the drafter's own KV up to date and proposes for entries that sample.

        ``hidden[i]`` [positions of entry i, D] are the trunk's last hidden states. On return every slot
        that reads known tokens only is exact.
        """
        ...

    def forget(self, request_id: str) -> None:
        """The request ended or was preempted."""
        ...

    def carry_rows(self, request_id: str, at_most: int | None = None) -> bytes | None:
        """The last ``at_most`` rows of the carry (None: all) as bytes, for a hand-over; None where there are
        none."""
        ...

    def distribution(self, drafts: Drafts) -> DraftDistribution | None:
        """What a sampled request's drafts were drawn from; None for greedy ones."""
        ...
