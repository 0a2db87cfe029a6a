"""The measurement behind `baton bench arms`."""

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from cli.acceptance import Acceptance
from cli.bench_prompts import QUESTIONS, read_token_prompts, shuffled_text
from cli.bench_stats import spread
from cli.controls import CutPrompt, NoFallback
from cli.local_cluster import Generation, LocalCluster
from cli.local_config import ClusterConfig
from cli.local_nodes import EngineFactory, decode_node, prefill_node
from common.engine.build import BuiltEngine
from common.engine.model_runner import ModelRunner
from common.errors import ConfigError
from common.request import SamplingParams
from common.tokenizer import Tokenizer

PROMPT_TOKENS = 96  # of the built-in text prompts


@dataclass(frozen=True)
class ArmsRun:
    num_prompts: int
    output_len: int
    concurrency: int
    temperature: float
    seed: int
    prompts: Path | None


@dataclass
class Arm:
    """One way to serve. ``wall_s``: time in which this arm had requests in flight."""

    name: str
    decode: str
    prefill: str | None = None
    handoff: str = "backoff"
    generations: list[Generation] = field(default_factory=list)
    wall_s: float = 0.0

    def summary(self) -> dict[str, Any]:
        done = self.generations
        ms = 1000.0
        acceptance = sum((_acceptance(g) for g in done), Acceptance())
        tokens = sum(len(g.tokens) for g in done)
        several = [g for g in done if len(g.tokens) > 1]
        return {
            "output_tokens": tokens,
            "tokens_per_s": tokens / self.wall_s,
            "ttft_ms": spread([g.ttft_s * ms for g in done]),
            "tpot_ms": spread([(g.chunk_times_s[-1] - g.ttft_s) * ms / (len(g.tokens) - 1) for g in several]),
            "acceptance_length": acceptance.length,
            "acceptance_per_position": list(acceptance.rate_per_pos),
            "num_drafts": acceptance.num_drafts,
            "accepted_per_pos": list(acceptance.accepted_per_pos),
            "verified_per_pos": list(acceptance.verified_per_pos),
        }


def _acceptance(generation: Generation) -> Acceptance:
    f = generation.finished
    return Acceptance(
        f.num_drafts, f.num_draft_tokens, f.num_accepted, f.accepted_per_pos, f.verified_per_pos
    )


async def run_arms(config: ClusterConfig, plan: ArmsRun) -> dict[str, Any]:
    """Raises ConfigError when the model has no modules to compare with."""
    factory = EngineFactory(config)
    names = (
        "aggregated", "prefill", "decode", "prefill-carry", "decode-carry", "prefill-cut", "decode-cut"
    )  # fmt: skip
    engines = {name: factory.make() for name in names}
    engines["plain"] = factory.make(speculation=False)
    built = engines["aggregated"]
    if built.num_modules == 0:
        raise ConfigError(f"model {built.files.name} has no MTP modules; give --modules a folder")
    _drop_fallback(engines["decode-cut"])
    arms = [
        Arm("no speculation", "plain"),
        Arm("MTP, aggregated", "aggregated"),
        Arm("MTP, pair", "decode", "prefill"),
        Arm("MTP, pair, handoff carry", "decode-carry", "prefill-carry", "carry"),
        Arm("MTP, pair, prompt cut on P, no carry", "decode-cut", "prefill-cut"),
    ]
    async with LocalCluster() as cluster:
        address = cluster.control_address
        nodes = {
            name: decode_node(
                config, engines[name], address, name, aggregated=name in ("plain", "aggregated")
            )
            for name in ("plain", "aggregated", "decode", "decode-carry", "decode-cut")
        }
        await cluster.start(
            {
                **nodes,
                **{
                    name: prefill_node(config, engines[name], address, name)
                    for name in ("prefill", "prefill-carry")
                },
                "prefill-cut": prefill_node(
                    config, engines["prefill-cut"], address, "prefill-cut", CutPrompt
                ),
            }
        )
        await _measure(cluster, arms, prompts_of(built.tokenizer, plan), plan)
    return {
        "model": built.files.name,
        "dtype": config.model.dtype,
        "num_modules": built.num_modules,
        "concurrency": plan.concurrency,
        "num_prompts": plan.num_prompts,
        "output_len": plan.output_len,
        "temperature": plan.temperature,
        "arms": {arm.name: arm.summary() for arm in arms},
        "pair_accepts_as_aggregated": all(_accepted(pair) == _accepted(arms[1]) for pair in arms[2:4]),
        "same_tokens": all(_tokens(pair) == _tokens(arms[1]) for pair in arms[2:4]),
    }


def _accepted(arm: Arm) -> tuple[int, ...]:
    return sum((_acceptance(g) for g in arm.generations), Acceptance()).accepted_per_pos


def _tokens(arm: Arm) -> list[tuple[int, ...]]:
    return [g.tokens for g in arm.generations]


def _drop_fallback(built: BuiltEngine) -> None:
    runner = built.engine.runner
    assert isinstance(runner, ModelRunner)
    assert built.modules is not None
    runner.speculator = NoFallback(built.modules, built.num_modules, built.storage)


async def _measure(
    cluster: LocalCluster, arms: Sequence[Arm], prompts: Sequence[Sequence[int]], plan: ArmsRun
) -> None:
    """Warms every arm with a short request, then lets them take turns, ``concurrency`` prompts at a time."""
    warm_up = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    for arm in arms:
        await _generate(cluster, arm, "warm-up", prompts[0][:-1], warm_up)
    with tqdm(total=len(prompts) * len(arms), unit="answer", disable=None, file=sys.stderr) as bar:
        for first in range(0, len(prompts), plan.concurrency):
            wave = range(first, min(first + plan.concurrency, len(prompts)))
            for arm in arms:
                start_s = time.monotonic()
                arm.generations += await asyncio.gather(
                    *(_one(cluster, arm, i, prompts[i], plan) for i in wave)
                )
                arm.wall_s += time.monotonic() - start_s
                bar.update(len(wave))


async def _one(cluster: LocalCluster, arm: Arm, i: int, prompt: Sequence[int], plan: ArmsRun) -> Generation:
    sampling = SamplingParams(
        max_tokens=plan.output_len,
        temperature=plan.temperature,
        seed=plan.seed + i if plan.temperature else None,
        ignore_eos=True,
    )
    return await _generate(cluster, arm, f"arm-{i}", prompt, sampling)


async def _generate(
    cluster: LocalCluster, arm: Arm, request_id: str, prompt: Sequence[int], sampling: SamplingParams
) -> Generation:
    return await cluster.generate(
        request_id, prompt, sampling, decode=arm.decode, prefill=arm.prefill, handoff=arm.handoff
    )


def prompts_of(tokenizer: Tokenizer, plan: ArmsRun) -> list[list[int]]:
    """A file's prompts, or built-in ones: questions through the chat template, or text."""
    if plan.prompts is not None:
        prompts = read_token_prompts(plan.prompts, tokenizer)
        return [prompts[i % len(prompts)] for i in range(plan.num_prompts)]
    rng = random.Random(plan.seed)
    if tokenizer.has_chat_template:
        questions = rng.sample(QUESTIONS, len(QUESTIONS))
        texts = [questions[i % len(questions)] for i in range(plan.num_prompts)]
        chats = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts]
        return [tokenizer.encode(chat, add_special_tokens=False) for chat in chats]
    texts = [shuffled_text(rng, 8 * PROMPT_TOKENS) for _ in range(plan.num_prompts)]
    return [tokenizer.encode(text)[:PROMPT_TOKENS] for text in texts]


def describe(result: dict[str, Any]) -> str:
    """The table, in Markdown."""
    n = result["num_modules"]
    lines = [
        f"{result['model']}, {result['dtype']}, N = {n}, concurrency {result['concurrency']}, "
        f"{result['num_prompts']} prompts of {result['output_len']} output tokens, "
        + ("greedy" if result["temperature"] == 0 else f"temperature {result['temperature']}"),
        "",
        "| arm | tokens/s | TTFT ms (p50) | TPOT ms (p50) | acceptance length | per position |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for name, arm in result["arms"].items():
        per_position = " ".join(f"{rate:.3f}" for rate in arm["acceptance_per_position"]) or "-"
        lines.append(
            f"| {name} | {arm['tokens_per_s']:.1f} | {arm['ttft_ms']['p50']:.0f} "
            f"| {arm['tpot_ms']['p50']:.1f} | {arm['acceptance_length']:.3f} | {per_position} |"
        )
    equal = "equal" if result["pair_accepts_as_aggregated"] and result["same_tokens"] else "NOT equal"
    lines += ["", f"Tokens and accepted drafts of the pairs and the aggregated node: {equal}."]
    return "\n".join(lines)
