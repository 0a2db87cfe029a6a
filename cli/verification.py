"""The comparison behind `baton verify`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from cli.check_prompts import check_prompts
from cli.controls import FalseLookahead, NoFallback, WrongWaitingSlot
from cli.local_cluster import Generation, LocalCluster
from cli.local_nodes import EngineFactory, decode_node, prefill_node
from cli.near_ties import NEAR_TIE, draft_gap, token_gap
from cli.recording import Inspector
from common.engine.build import BuiltEngine
from common.engine.model_runner import ModelRunner
from common.errors import ConfigError
from common.request import SamplingParams
from prefill_node.node import PrefillNode

MAX_DRAFT_KV_DIFF = 1e-4


@dataclass
class Report:
    """What was compared, and what differed."""

    model: str
    dtype: str
    num_modules: int
    negative_control: str
    handoff: str = "backoff"
    transport: str = ""
    prompts: int = 0
    hand_overs: int = 0
    tokens: int = 0
    tokens_differing: int = 0
    tokens_differing_without_speculation: int = 0
    drafts: int = 0
    drafts_differing: int = 0
    near_ties: int = 0
    draft_kv_max_diff: dict[str, float] = field(default_factory=dict)
    prefix_hits: dict[str, int] = field(default_factory=lambda: {"prefill": 0, "decode": 0})
    transferred_bytes: int = 0
    transfer_failures: int = 0
    schedules: dict[str, int] = field(default_factory=dict)  # what random schedules came through, counted
    schedule_problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        differing = self.tokens_differing + self.tokens_differing_without_speculation + self.drafts_differing
        worst = max(self.draft_kv_max_diff.values(), default=0.0)
        return (
            differing == 0
            and worst < MAX_DRAFT_KV_DIFF
            and self.transfer_failures == 0
            and not self.schedule_problems
        )

    def as_json(self) -> dict[str, Any]:
        return {"ok": self.ok, **vars(self)}

    def describe(self) -> str:
        diffs = ", ".join(f"{name} {value:.2e}" for name, value in self.draft_kv_max_diff.items())
        return "\n".join(
            [
                f"{self.model} ({self.dtype}, N = {self.num_modules}), hand-over {self.handoff}, "
                f"negative control: {self.negative_control}",
                f"{self.prompts} prompts, {self.hand_overs} hand-overs over {self.transport}, "
                f"{self.transferred_bytes} bytes, {self.transfer_failures} failed transfers",
                f"prompts with prefix hits: {self.prefix_hits['prefill']} on P, "
                f"{self.prefix_hits['decode']} on D",
                f"tokens: {self.tokens} compared, {self.tokens_differing} answers differ, "
                f"{self.tokens_differing_without_speculation} from those without speculation",
                f"drafts: {self.drafts} compared, {self.drafts_differing} differ",
                f"near-ties (not counted): {self.near_ties}",
                f"draft KV, largest difference: {diffs} (limit {MAX_DRAFT_KV_DIFF:.0e})",
                *self._describe_schedules(),
                "PASS" if self.ok else "FAIL",
            ]
        )

    def _describe_schedules(self) -> list[str]:
        if not self.schedules:
            return []
        counts = ", ".join(f"{name}: {count}" for name, count in sorted(self.schedules.items()))
        return [f"random schedules: {counts}", *self.schedule_problems]


async def verify(
    factory: EngineFactory,
    num_prompts: int,
    output_len: int,
    seed: int,
    negative_control: str,
    handoff: str = "backoff",
) -> Report:
    """Runs everything. Raises BatonError for a model or configuration that cannot be used."""
    config = factory.config
    engines = {name: factory.make() for name in ("aggregated", "prefill", "decode")}
    engines["plain"] = factory.make(speculation=False)
    oracle = engines["aggregated"]
    if negative_control != "none" and oracle.num_modules < 2:
        raise ConfigError(
            f"--negative-control needs N >= 2 MTP modules, this model runs with {oracle.num_modules}"
        )
    prefill_kind = _break_rule(negative_control, engines)
    inspectors = {name: Inspector(engines[name]) for name in ("aggregated", "prefill", "decode")}
    report = Report(oracle.files.name, config.model.dtype, oracle.num_modules, negative_control, handoff)
    async with LocalCluster() as cluster:
        address = cluster.control_address
        await cluster.start(
            {
                "prefill": prefill_node(config, engines["prefill"], address, "prefill", prefill_kind),
                "decode": decode_node(config, engines["decode"], address, "decode"),
                "aggregated": decode_node(
                    config, engines["aggregated"], address, "aggregated", aggregated=True
                ),
                "plain": decode_node(config, engines["plain"], address, "plain", aggregated=True),
            }
        )
        comparison = _Comparison(cluster, engines, inspectors, report, output_len)
        room = min(engine.max_model_len for engine in engines.values()) - output_len
        prompts = check_prompts(
            oracle.tokenizer, num_prompts, oracle.num_modules, config.engine.block_size, room, seed
        )
        for i, prompt in enumerate(tqdm(prompts, unit="prompt", disable=None, file=sys.stderr)):
            before = () if prompt.follows is None else comparison.texts[prompt.follows]
            await comparison.run(f"verify-{i}", (*before, *prompt.token_ids))
        transport = sorted(cluster.transports_of("decode"))
        report.transport = ", ".join(transport) or "none"
    for name, label in (("decode", "pair"), ("aggregated", "aggregated")):
        report.draft_kv_max_diff[label] = max(inspectors[name].max_diff.values(), default=0.0)
    return report


def _break_rule(negative_control: str, engines: dict[str, BuiltEngine]) -> type[PrefillNode]:
    """Puts a control's wrong parts into the engines; returns the kind of prefill node to run."""
    if negative_control == "carry":
        for name, kind in (("prefill", WrongWaitingSlot), ("decode", NoFallback)):
            built = engines[name]
            assert isinstance(built.engine.runner, ModelRunner)
            assert built.modules is not None
            built.engine.runner.speculator = kind(built.modules, built.num_modules, built.storage)
    return FalseLookahead if negative_control == "lookahead" else PrefillNode


class _Comparison:
    """One prompt after another; ``texts[i]`` are prompt i's tokens and its answer's."""

    def __init__(
        self,
        cluster: LocalCluster,
        engines: dict[str, BuiltEngine],
        inspectors: dict[str, Inspector],
        report: Report,
        output_len: int,
    ) -> None:
        self._cluster = cluster
        self._engines = engines
        self._inspectors = inspectors
        self._report = report
        self._sampling = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
        self.texts: list[tuple[int, ...]] = []

    async def run(self, request_id: str, token_ids: Sequence[int]) -> None:
        report, generate, sampling = self._report, self._cluster.generate, self._sampling
        oracle = await generate(request_id, token_ids, sampling, decode="aggregated")
        self._choose_wrong_token(oracle)
        pair = await generate(
            request_id, token_ids, sampling, decode="decode", prefill="prefill", handoff=report.handoff
        )
        plain = await generate(request_id, token_ids, sampling, decode="plain")
        self.texts.append((*token_ids, *oracle.tokens))
        report.prompts += 1
        report.tokens += len(oracle.tokens)
        report.tokens_differing += self._differs(token_ids, oracle.tokens, pair.tokens)
        report.tokens_differing_without_speculation += self._differs(token_ids, oracle.tokens, plain.tokens)
        if pair.prefill is not None:
            report.hand_overs += 1
            report.transfer_failures += pair.prefill.reason != "cut"
            report.prefix_hits["prefill"] += pair.prefill.cached_tokens > 0
        report.prefix_hits["decode"] += pair.finished.cached_tokens > 0
        report.transferred_bytes += pair.finished.transferred_bytes
        self._compare_drafts(request_id, token_ids, oracle.tokens, pair.tokens)

    def _choose_wrong_token(self, oracle: Generation) -> None:
        """The control writes the waiting slot from a token that cannot be the right one."""
        runner = self._engines["prefill"].engine.runner
        if isinstance(runner, ModelRunner) and isinstance(runner.speculator, WrongWaitingSlot):
            vocab_size = self._engines["prefill"].trunk.config.vocab_size
            runner.speculator.wrong_token = (oracle.tokens[0] + 1) % vocab_size

    def _differs(self, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> int:
        """1 if the answers part at a place that is no near-tie."""
        at = _first_difference(ours, theirs)
        if at is None:
            return 0
        if token_gap(self._engines["aggregated"], [*prompt, *ours[:at]]) < NEAR_TIE:
            self._report.near_ties += 1
            return 0
        return 1

    def _compare_drafts(
        self, request_id: str, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]
    ) -> None:
        """Drafts proposed at the same T, as long as the known tokens are the same."""
        report = self._report
        at = _first_difference(ours, theirs)
        same = len(prompt) + (min(len(ours), len(theirs)) if at is None else at)
        known = [*prompt, *ours]
        oracle_drafts = self._inspectors["aggregated"].drafts.get(request_id, {})
        pair_drafts = {  # P drafts once, where it samples token L
            **self._inspectors["prefill"].drafts.get(request_id, {}),
            **self._inspectors["decode"].drafts.get(request_id, {}),
        }
        for last, drafts in pair_drafts.items():
            expected = oracle_drafts.get(last)
            if expected is None or last >= same:
                continue
            report.drafts += len(drafts)
            m = _first_difference(expected, drafts)
            if m is None:
                continue
            gap = draft_gap(self._engines["aggregated"], known[: last + 1], expected, m)
            if gap < NEAR_TIE:
                report.near_ties += 1
            else:
                report.drafts_differing += 1


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))
