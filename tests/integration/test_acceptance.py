"""The shipped modules accept what the project says they accept: measured through the engine, greedy, fp32.

Held-out prompts (`tests/data`), 64 new tokens each. Rates are those of speculative decoding: a step that
verified at least one draft is one draft; the cumulative rate at position i is accepted[i] / drafts.
"""

import json
from typing import Any

import pytest

from common.config import EngineOptions, ModelOptions
from common.engine.build import build_engine
from common.errors import ModelLoadError
from common.request import SpecStats
from tests.builders import REPOSITORY, make_request

OUTPUT_TOKENS = 64
TINY_GOAL = (0.75, 0.58, 0.45, 0.36)  # cumulative, by position
SMOLLM2_GOAL, SMOLLM2_GOAL_LENGTH = 0.55, 1.9


def measure(model: str, prompts: list[list[int]], output_tokens: int = OUTPUT_TOKENS) -> SpecStats:
    """Speculation counters of all prompts, one after the other."""
    try:
        built = build_engine(ModelOptions(model=model, dtype="float32"), EngineOptions(kv_cache_mib=128))
    except ModelLoadError as error:
        if model == "baton-tiny":
            raise
        pytest.skip(f"{model} cannot be had here: {error.message}")
    for prompt in prompts:
        built.engine.add(make_request(prompt, output_tokens, ignore_eos=True))
        while built.engine.has_work:
            built.engine.step()
    return built.engine.stats


def prompts_of(name: str, count: int | None) -> list[list[int]]:
    data: dict[str, Any] = json.loads((REPOSITORY / "tests" / "data" / name).read_text(encoding="utf-8"))
    prompts: list[list[int]] = data["prompts"]
    return prompts[:count]


def cumulative(stats: SpecStats) -> list[float]:
    """Share of verified drafts accepted up to each position."""
    return [a / v for a, v in zip(stats.accepted_per_pos, stats.verified_per_pos, strict=True)]


def test_baton_tiny_on_documentation() -> None:
    rates = cumulative(measure("baton-tiny", prompts_of("acceptance_docs.json", 8)))
    assert all(r >= goal for r, goal in zip(rates, TINY_GOAL, strict=True)), rates


def test_smollm2_on_chat_prompts() -> None:
    stats = measure("smollm2-135m-instruct", prompts_of("acceptance_chat.json", 6), output_tokens=48)
    assert cumulative(stats)[0] >= SMOLLM2_GOAL, stats
    assert stats.acceptance_length >= SMOLLM2_GOAL_LENGTH, stats


@pytest.mark.slow
def test_baton_tiny_on_all_held_out_documentation() -> None:
    rates = cumulative(measure("baton-tiny", prompts_of("acceptance_docs.json", None)))
    assert all(r >= goal for r, goal in zip(rates, TINY_GOAL, strict=True)), rates


@pytest.mark.slow
def test_smollm2_reaches_its_goal_on_all_held_out_chat_prompts() -> None:
    stats = measure("smollm2-135m-instruct", prompts_of("acceptance_chat.json", None))
    assert cumulative(stats)[0] >= SMOLLM2_GOAL, stats
    assert stats.acceptance_length >= SMOLLM2_GOAL_LENGTH, stats
