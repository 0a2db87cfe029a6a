"""What the prefix cache brings and costs a drafter, by hash mode: conversations with shared beginnings.

    python -m benchmarks.prefix_cache [--model baton-tiny] [--json] [--write docs/exactness.md]

Arms: cache off; plain block hashes, every hit losing its last block (`--disable-lookahead-block-hashes`);
lookahead block hashes (the default); and, as a control, plain hashes that keep the block. All share one
process and one set of weights and take turns request by request, in rotating order, so that a busy machine is
busy for all of them. Greedy, one request at a time. Tokens must be equal, or the run fails; the draft KV of
every conversation's last turn is compared with one uninterrupted pass, outside of the measured time.
"""

import argparse
import dataclasses
import json
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.conversations import PER_TOPIC, conversations, prompt_of
from cli.acceptance import Acceptance
from cli.bench_stats import Timing, summarize
from cli.generate_local import usage_of
from cli.local_config import ClusterConfig
from cli.local_nodes import EngineFactory
from cli.near_ties import NEAR_TIE, token_gap
from cli.number_types import positive_int
from cli.options import add_config, config_from
from common.engine.build import BuiltEngine
from common.engine.draft_kv_oracle import draft_kv_max_diff
from common.errors import BatonError, ConfigError
from common.kv_cache.manager import KVCacheManager
from common.request import Request, RequestState, SamplingParams

OFF, DROPPED, LOOKAHEAD = "prefix cache off", "plain hashes + drop", "lookahead hashes"
KEPT = "plain hashes, no drop (control)"


@dataclass(frozen=True)
class Plan:
    """``output_len``: longest answer; the model may end it earlier."""

    num_topics: int
    num_turns: int
    output_len: int
    seed: int


@dataclass
class KeptBlock(KVCacheManager):
    """Plain hashes without the drop: what a cache that knows nothing of lookahead does. Hits leave ``tail``
    tokens to compute, else the drafter would find no carry and refuse."""

    tail: int = 1

    def match(self, request: Request, at_most: int | None = None) -> int:
        upto = max(0, request.num_tokens - self.tail)
        return super().match(request, upto if at_most is None else min(upto, at_most))


@dataclass
class Arm:
    """One engine. ``clock_s`` runs only while this arm serves; ``timings`` are on it."""

    name: str
    built: BuiltEngine
    timings: list[Timing] = field(default_factory=list)
    clock_s: float = 0.0
    draft_kv_max_diff: float = 0.0

    def serve(self, request: Request, *, check_kv: bool) -> tuple[int, ...]:
        """Runs the request alone, to its end; its output tokens."""
        engine, began_s, chunk_times_s = self.built.engine, time.perf_counter(), []
        engine.add(request)
        while engine.has_work:
            if any(update.new_tokens for update in engine.step().updates):
                chunk_times_s.append(self.clock_s + time.perf_counter() - began_s)
        end_s = self.clock_s + time.perf_counter() - began_s
        if request.state is not RequestState.HELD:
            raise BatonError(f"{self.name}: {request!r} did not come to its end")
        self.timings.append(
            Timing(
                self.clock_s,
                end_s,
                tuple(chunk_times_s),
                request.num_prompt_tokens,
                request.num_cached_tokens,
                request.num_output_tokens,
                Acceptance.from_usage(usage_of(request)),
            )
        )
        self.clock_s = end_s
        if check_kv:
            self.draft_kv_max_diff = max(self.draft_kv_max_diff, self._kv_diff(request))
        engine.release(request.request_id)
        return tuple(request.token_ids[request.num_prompt_tokens :])

    def _kv_diff(self, request: Request) -> float:
        built = self.built
        assert built.modules is not None
        return draft_kv_max_diff(
            built.trunk,
            built.modules,
            built.num_modules,
            built.storage,
            request.token_ids,
            request.num_computed,
            request.tables,
        )

    @property
    def acceptance(self) -> Acceptance:
        return sum((timing.acceptance for timing in self.timings), Acceptance())

    def summary(self) -> dict[str, Any]:
        result = summarize(self.timings)
        return {
            **{key: result[key] for key in ("prompt_tokens", "cached_tokens", "output_tokens")},
            "hit_rate": result["cached_tokens"] / result["prompt_tokens"],
            "tokens_per_s": result["output_tokens_per_s"],
            "ttft_ms": result["ttft_ms"],
            "acceptance": dataclasses.asdict(self.acceptance),
            "acceptance_length": self.acceptance.length,
            "acceptance_per_position": list(self.acceptance.rate_per_pos),
            "draft_kv_max_diff": self.draft_kv_max_diff,
        }


def make_arms(config: ClusterConfig) -> list[Arm]:
    """Raises ConfigError for a model without modules, or whose modules look past a whole block."""
    factory = EngineFactory(config)
    options = dataclasses.replace(config.engine, prefix_caching=True, disable_lookahead_block_hashes=False)
    off = dataclasses.replace(options, prefix_caching=False)
    plain = dataclasses.replace(options, disable_lookahead_block_hashes=True)
    kept = factory.make(plain)
    if kept.num_modules == 0:
        raise ConfigError(f"model {kept.files.name} has no MTP modules; give --modules a folder")
    scheduler = kept.engine.scheduler
    kv = scheduler.kv
    scheduler.kv = KeptBlock(kv.layout, kv.num_blocks, kv.hasher, tail=scheduler.config.tail)
    engines = [factory.make(off), factory.make(plain), factory.make(options), kept]
    return [Arm(name, built) for name, built in zip((OFF, DROPPED, LOOKAHEAD, KEPT), engines, strict=True)]


def run(config: ClusterConfig, plan: Plan) -> dict[str, Any]:
    """Raises BatonError when an arm's tokens differ where the best two logits are apart."""
    arms = make_arms(config)
    return result_of(config, plan, arms, measure(arms, plan))


def result_of(config: ClusterConfig, plan: Plan, arms: Sequence[Arm], near_ties: int) -> dict[str, Any]:
    """JSON-ready."""
    built = arms[0].built
    return {
        "model": built.files.name,
        "dtype": config.model.dtype,
        "num_modules": built.num_modules,
        "block_size": built.layout.block_size,
        **dataclasses.asdict(plan),
        "requests": len(arms[0].timings),
        "near_ties": near_ties,
        "accepts_as_without_cache": {arm.name: arm.acceptance == arms[0].acceptance for arm in arms[1:]},
        "arms": {arm.name: arm.summary() for arm in arms},
    }


def measure(arms: Sequence[Arm], plan: Plan) -> int:
    """Turn by turn through all conversations; returns the number of near-ties at which arms parted."""
    built = arms[0].built
    tokenizer = built.tokenizer
    sampling = SamplingParams(max_tokens=plan.output_len, temperature=0.0)
    talks = conversations(plan.num_topics, plan.num_turns, plan.seed)
    answers: list[list[str]] = [[] for _ in talks]
    for arm in arms:  # not counted: the first request of a process pays for what is made once
        arm.serve(
            Request("warm-up", tokenizer.encode("A warm-up."), sampling, hold_blocks=True), check_kv=False
        )
        arm.timings.clear()
    near_ties = number = 0
    with tqdm(
        total=len(talks) * plan.num_turns * len(arms), unit="answer", disable=None, file=sys.stderr
    ) as bar:
        for turn in range(plan.num_turns):
            for talk, given in zip(talks, answers, strict=True):
                prompt = prompt_of(tokenizer, talk, given)
                tokens: dict[str, tuple[int, ...]] = {}
                for i in range(len(arms)):
                    arm = arms[(number + i) % len(arms)]
                    request = Request(f"r{number}", list(prompt), sampling, hold_blocks=True)
                    tokens[arm.name] = arm.serve(request, check_kv=turn == plan.num_turns - 1)
                    bar.update()
                near_ties += sum(
                    parted(built, prompt, tokens[arms[0].name], tokens[arm.name], arm.name)
                    for arm in arms[1:]
                )
                given.append(tokenizer.decode(tokens[arms[0].name]))
                number += 1
    return near_ties


def parted(
    built: BuiltEngine, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int], name: str
) -> bool:
    """Whether the answers part at a near-tie; BatonError where they part elsewhere."""
    if ours == theirs:
        return False
    at = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs))
    )
    gap = token_gap(built, [*prompt, *ours[:at]])
    if gap >= NEAR_TIE:
        raise BatonError(
            f"{name}: another answer than with the cache off, from output token {at} of a prompt of "
            f"{len(prompt)} tokens on, where the best two logits are {gap:.1e} apart (a near-tie is below "
            f"{NEAR_TIE:.0e})"
        )
    return True


def table(result: dict[str, Any]) -> str:
    """For a person, in Markdown."""
    heads = ["arm", "acceptance length", "per position", "tokens/s", "hit rate", "TTFT ms, p50", "p90"]
    lines = [
        "| " + " | ".join([*heads, "draft KV off by"]) + " |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, arm in result["arms"].items():
        per_position = " ".join(f"{rate:.3f}" for rate in arm["acceptance_per_position"]) or "-"
        lines.append(
            f"| {name} | {arm['acceptance_length']:.3f} | {per_position} | {arm['tokens_per_s']:.1f} "
            f"| {arm['hit_rate']:.1%} | {arm['ttft_ms']['p50']:.0f} | {arm['ttft_ms']['p90']:.0f} "
            f"| {arm['draft_kv_max_diff']:.1e} |"
        )
    off = result["arms"][OFF]
    same = result["accepts_as_without_cache"]
    verdicts = "; ".join(f"{name}: {'yes' if equal else 'no'}" for name, equal in same.items())
    footer = (
        f"{result['model']}, {result['dtype']}, N = {result['num_modules']}, B = {result['block_size']}: "
        f"{result['requests']} requests ({result['num_topics']} topics x {PER_TOPIC} conversations x "
        f"{result['num_turns']} turns), {off['prompt_tokens']} prompt and {off['output_tokens']} output "
        f"tokens an arm. Tokens of all arms are equal ({result['near_ties']} near-ties). Accepted drafts "
        f"are, position by position, as many as without the cache - {verdicts}."
    )
    lines += ["", *textwrap.wrap(footer, 116)]
    return "\n".join(lines)


def written(document: str, model: str, text: str) -> str:
    """``document`` with ``text`` between the markers of ``model``; ConfigError where they are not there."""
    begin, end = f"<!-- prefix-cache {model}: begin -->", f"<!-- prefix-cache {model}: end -->"
    before, found, rest = document.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found and found_end):
        raise ConfigError(
            f"--write: no lines {begin!r} and {end!r} in the file; add them where the table belongs"
        )
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add(
        "--num-topics",
        type=positive_int,
        default=4,
        help="each has three conversations (default: %(default)s)",
    )
    add("--num-turns", type=positive_int, default=3, help="turns of a conversation (default: %(default)s)")
    add("--output-len", type=positive_int, default=32, help="longest answer, tokens (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of the conversations (default: %(default)s)")
    add("--json", action="store_true", help="print the result as JSON")
    add("--write", type=Path, metavar="FILE", help="put the table between the model's markers in FILE")
    add_config(parser, ClusterConfig)
    parser.set_defaults(dtype="float32")  # tokens of different hits are equal only here
    args = parser.parse_args(arguments)
    plan = Plan(args.num_topics, args.num_turns, args.output_len, args.seed)
    try:
        result = run(config_from(args, ClusterConfig), plan)
        if args.write is not None:
            document = args.write.read_text(encoding="utf-8")
            args.write.write_text(written(document, result["model"], table(result)), encoding="utf-8")
    except BatonError as error:
        print(f"prefix_cache: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result, indent=2) if args.json else table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
