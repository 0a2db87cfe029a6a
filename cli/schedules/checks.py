"""What must hold for every request of a schedule, and the count of what schedules came through."""

from collections import Counter
from dataclasses import dataclass, field

from cli.schedules.random_models import Weights
from cli.schedules.uninterrupted import Differences, draft_differences, token_differences
from common.engine.draft_kv_oracle import draft_kv_max_diff
from common.engine.methods import Method
from common.engine.state_oracle import state_max_diff
from common.kv_cache.storage import KVStorage
from common.request import FinishReason, Request

MAX_KV_DIFF = 1e-4  # fp32


@dataclass
class Outcome:
    """``problems``: what was not as in the uninterrupted run, in words; none if all is well."""

    problems: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    max_kv_diff: float = 0.0

    def add(self, other: "Outcome") -> None:
        self.problems += other.problems
        self.counts += other.counts
        self.max_kv_diff = max(self.max_kv_diff, other.max_kv_diff)


class Checks:
    """Of one schedule on one model; what it finds goes into ``outcome``."""

    def __init__(self, weights: Weights, method: Method, outcome: Outcome) -> None:
        self._weights = weights
        self._method = method
        self.outcome = outcome

    def blocks(self, storage: KVStorage, request: Request) -> None:
        """Draft KV and states of a request that owns its blocks and is in no step."""
        weights, num_modules = self._weights, self._method.num_modules
        known, computed, tables = request.token_ids, request.num_computed, request.tables
        diff = state_max_diff(weights.trunk, storage, known, computed, tables)
        if weights.modules is not None and num_modules and tables:
            kv = draft_kv_max_diff(
                weights.trunk, weights.modules, num_modules, storage, known, computed, tables
            )
            diff = max(diff, kv)
        self.outcome.max_kv_diff = max(self.outcome.max_kv_diff, diff)
        if not diff < MAX_KV_DIFF:
            self._problem(request, f"KV differs by {diff:.1e}")

    def drafts(self, request: Request) -> None:
        """Those that the modules themselves proposed in the last step."""
        if not request.sampling.greedy or self._method.num_modules != len(request.drafts):
            return
        found = draft_differences(self._weights, request.token_ids, request.drafts)
        self.outcome.counts["drafts compared"] += len(request.drafts)
        self._count(request, "drafts", found)

    def ended(self, request: Request) -> None:
        """Tokens, and where they end."""
        self.outcome.counts["tokens compared"] += request.num_output_tokens
        self._count(request, "tokens", token_differences(self._weights.trunk, request))

    def end(self, request: Request, reason: FinishReason, longest: int) -> None:
        """A request ends with its first stop token, its last allowed one, or the longest sequence."""
        sampling, outputs = request.sampling, request.token_ids[request.num_prompt_tokens :]
        stops = [i for i, token in enumerate(outputs) if token in sampling.stop_token_ids]
        count = min(sampling.max_tokens, longest - request.num_prompt_tokens)
        expected = FinishReason.LENGTH if not stops else FinishReason.STOP
        if stops:
            count = stops[0] + 1
        if (len(outputs), reason) != (count, expected):
            self._problem(request, f"ended by {reason.value} after {len(outputs)} tokens, not {count}")

    def _count(self, request: Request, what: str, found: Differences) -> None:
        self.outcome.counts["near-ties"] += found.near_ties
        if found.wrong:
            self._problem(request, f"{what} differ at {list(found.wrong)}")

    def _problem(self, request: Request, text: str) -> None:
        self.outcome.problems.append(f"{request!r}: {text}")
