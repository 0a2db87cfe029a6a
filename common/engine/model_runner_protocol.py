"""The seam between engine and model: what a runner must do. Torch-free, so that tests can fake it."""

from typing import Protocol

from common.engine.batch import RunnerOutput, ScheduledBatch


class Runner(Protocol):
    """What the engine needs of a runner; tests have a fake one."""

    def run(self, batch: ScheduledBatch) -> RunnerOutput:
        """Computes the batch; every KV slot it names is written on return."""
        ...

    def carry_row(self, request_id: str) -> bytes | None:
        """The hidden row that a prefill ships with its last block, None if there is none to ship."""
        ...
