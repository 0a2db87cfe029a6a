"""The seam between engine and model: what a runner must do. Torch-free, so that tests can fake it."""

from typing import Protocol

from common.engine.batch import RunnerOutput, ScheduledBatch


class Runner(Protocol):
    """What the engine needs of a runner; tests have a fake one."""

    def run(self, batch: ScheduledBatch) -> RunnerOutput:
        """Computes the batch; every KV slot it names is written on return."""
        ...

    def carry_rows(self, request_id: str, at_most: int | None = None) -> bytes | None:
        """The hidden rows that a prefill ships with its last block, None if there are none to ship."""
        ...
