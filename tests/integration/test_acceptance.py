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
CI_PROMPTS = 8


def measure(model: str, prompts: list[list[int]]) -> SpecStats:
    """Speculation counters of all prompts, one after the other."""
    try:
        built = build_engine(ModelOptions(model=model, dtype="float32"), EngineOptions(kv_cache_mib=128))
    except ModelLoadError as error:
        if model == "baton-tiny":
            raise
        pytest.skip(f"{model} cannot be had here: {error.message}")
    for prompt in prompts:
        built.engine.add(make_request(prompt, OUTPUT_TOKENS, ignore_eos=True))
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


def check_tiny(count: int | None, slack: float) -> None:
    rates = cumulative(measure("baton-tiny", prompts_of("acceptance_docs.json", count)))
    for rate, bar in zip(rates, (0.75, 0.58, 0.45, 0.36), strict=True):
        assert rate >= bar - slack, f"cumulative acceptance {rates}"


def check_smollm2(count: int | None, slack: float) -> None:
    stats = measure("smollm2-135m-instruct", prompts_of("acceptance_chat.json", count))
    assert cumulative(stats)[0] >= 0.55 - slack, f"cumulative acceptance {cumulative(stats)}"
    assert stats.acceptance_length >= 1.9 - 2 * slack, f"acceptance length {stats.acceptance_length}"


def test_baton_tiny_on_documentation() -> None:
    check_tiny(CI_PROMPTS, slack=0.03)  # a third of the prompts: wider by their sampling error


def test_smollm2_on_chat_prompts() -> None:
    check_smollm2(CI_PROMPTS, slack=0.03)


@pytest.mark.slow
def test_baton_tiny_on_all_held_out_documentation() -> None:
    check_tiny(None, slack=0.0)


@pytest.mark.slow
def test_smollm2_on_all_held_out_chat_prompts() -> None:
    check_smollm2(None, slack=0.0)
