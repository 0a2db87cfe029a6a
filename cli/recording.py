"""Looks into an engine while it serves: which drafts were proposed when, and the draft KV at the end."""

from common.engine.batch import RunnerOutput, ScheduledBatch
from common.engine.build import BuiltEngine
from common.engine.draft_kv_oracle import draft_kv_max_diff
from common.engine.model_runner_protocol import Runner
from common.request import Request


class RecordingRunner:
    """A Runner around another: keeps {request id: {T: drafts proposed when T was the last known token}}."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.drafts: dict[str, dict[int, tuple[int, ...]]] = {}

    def run(self, batch: ScheduledBatch) -> RunnerOutput:
        output = self._runner.run(batch)
        for entry, result in zip(batch.entries, output.outputs, strict=True):
            if entry.samples:
                last = len(entry.known) - 1 + len(result.tokens)
                self.drafts.setdefault(entry.request_id, {})[last] = result.next_drafts
        return output

    def carry_rows(self, request_id: str, at_most: int | None = None) -> bytes | None:
        return self._runner.carry_rows(request_id, at_most)


class Inspector:
    """Attached to an engine: records drafts, and each request's draft-KV difference just before it ends."""

    def __init__(self, built: BuiltEngine, *, check_kv: bool = True) -> None:
        self._built = built
        self._recorder = RecordingRunner(built.engine.runner)
        self.max_diff: dict[str, float] = {}
        built.engine.runner = self._recorder
        if check_kv and built.modules is not None and built.num_modules:
            built.engine.scheduler.on_finish = self._finished

    @property
    def drafts(self) -> dict[str, dict[int, tuple[int, ...]]]:
        return self._recorder.drafts

    def _finished(self, request: Request) -> None:
        """Engine thread. Prefills are not compared: what they ship is, where the decode node ends."""
        built = self._built
        if request.stop_at is not None or built.modules is None:
            return
        self.max_diff[request.request_id] = draft_kv_max_diff(
            built.trunk,
            built.modules,
            built.num_modules,
            built.storage,
            request.token_ids,
            request.num_computed,
            request.tables,
        )
