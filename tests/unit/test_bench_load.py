"""The load generator against a scripted server: what it sends, what it measures, how it reports."""

import json
import math
import random
from pathlib import Path

import pytest

from cli.acceptance import Acceptance
from cli.bench_prompts import read_prompts, shuffled_text
from cli.bench_stats import Timing, quantile, summarize
from cli.main import main
from common.errors import ConfigError
from tests.fakes_openai_server import Script, openai_server

USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 2},
    "baton": {
        "num_drafts": 2,
        "num_draft_tokens": 7,
        "num_accepted": 3,
        "accepted_per_pos": [2, 1, 0, 0],
        "verified_per_pos": [2, 2, 2, 1],
    },
}


def bench(url: str, capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["bench", "load", "--url", url, *words])
    return code, capsys.readouterr().out


def test_figures_come_from_the_stream_and_its_usage(capsys: pytest.CaptureFixture[str]) -> None:
    script = Script(usage=USAGE)
    with openai_server(script) as url:
        code, out = bench(
            url, capsys, "--num-requests", "6", "--concurrency", "3", "--input-len", "9", "--json"
        )
    result = json.loads(out)
    assert (code, result["requests"], result["failed"]) == (0, 6, 0)
    assert (result["prompt_tokens"], result["cached_tokens"], result["output_tokens"]) == (42, 12, 30)
    assert result["acceptance"] == {
        "num_drafts": 12,
        "num_draft_tokens": 42,
        "num_accepted": 18,
        "length": 2.5,
        "per_position": [1.0, 0.5, 0.0, 0.0],
    }
    assert 0 < result["ttft_ms"]["p50"] < result["e2e_ms"]["p50"]
    assert result["itl_ms"]["p50"] >= 5  # the server pauses 10 ms between chunks
    assert result["settings"]["seed"] == 0


def test_requests_are_greedy_seeded_of_exact_length_and_within_the_concurrency(
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = Script(usage=USAGE)
    words = [
        "--num-requests",
        "8",
        "--concurrency",
        "2",
        "--input-len",
        "12",
        "--output-len",
        "5",
        "--seed",
        "3",
    ]
    with openai_server(script) as url:
        bench(url, capsys, *words)
    warmup, *counted = script.bodies
    assert warmup["prompt"] == "This request is not counted."
    assert len(counted) == 8
    assert all(len(body["prompt"]) == 12 for body in counted)  # token ids, cut by the server's tokenizer
    assert sorted(body["seed"] for body in counted) == list(range(3, 11))
    assert all(
        body["max_tokens"] == 5 and body["ignore_eos"] and body["temperature"] == 0 for body in counted
    )
    assert script.most_in_flight == 2


def test_without_a_tokenizer_the_prompt_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    script = Script(usage=USAGE, has_tokenizer=False)
    with openai_server(script) as url:
        code, _ = bench(url, capsys, "--num-requests", "2", "--input-len", "20", "--warmup", "0")
    assert code == 0
    assert all(isinstance(body["prompt"], str) and 60 < len(body["prompt"]) <= 100 for body in script.bodies)


def test_prompts_of_a_file_are_sent_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "first"}\n{"prompt": "second"}\n')
    script = Script(usage=USAGE)
    with openai_server(script) as url:
        bench(url, capsys, "--num-requests", "3", "--warmup", "0", "--prompts", str(file))
    assert [body["prompt"] for body in script.bodies] == ["first", "second", "first"]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (Script(refusal=(400, {"message": "prompt has 9000 tokens"})), "prompt has 9000 tokens"),
        (Script(refusal=(429, {"message": "queue full"})), "HTTP 429: queue full"),
        (Script(error_in_stream="decode node died"), "the server gave up in mid-stream: decode node died"),
        (Script(ends_with_done=False), "the stream ended without [DONE]"),
    ],
)
def test_failed_requests_are_counted_and_quoted_and_the_exit_code_is_1(
    script: Script, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with openai_server(script) as url:
        code, out = bench(url, capsys, "--num-requests", "2", "--warmup", "0")
    assert code == 1
    assert "0 requests (2 failed)" in out
    assert message in out


def test_quantiles_are_linear_between_values() -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert quantile([1.0], 0.99) == 1.0
    assert math.isnan(quantile([], 0.5))


def test_times_are_measured_as_defined() -> None:
    timing = Timing(10.0, 13.0, chunk_times_s=(11.0, 11.5, 12.5), output_tokens=7)
    result = summarize([timing])
    assert result["ttft_ms"]["mean"] == 1000
    assert result["tpot_ms"]["mean"] == 250  # 1.5 s for six tokens after the first
    assert result["itl_ms"]["mean"] == 750
    assert result["e2e_ms"]["mean"] == 3000
    assert result["output_tokens_per_s"] == pytest.approx(7 / 3)


def test_nothing_measured_is_null_not_zero() -> None:
    result = summarize([Timing(0.0, 1.0, error="refused")])
    assert result["ttft_ms"] == {"mean": None, "p50": None, "p90": None, "p99": None}
    assert (result["failed"], result["errors"]) == (1, ["refused"])


def test_acceptance_adds_up_over_requests_of_different_depth() -> None:
    total = Acceptance(2, 4, 3, (2, 1), (2, 2)) + Acceptance(1, 1, 1, (1,), (1,))
    assert total == Acceptance(3, 5, 4, (3, 1), (3, 2))
    assert total.rate_per_pos == (1.0, 0.5)
    assert total.length == pytest.approx(1 + 4 / 3)
    assert Acceptance().describe() == "no drafts were verified"


def test_shuffled_text_depends_on_the_seed_alone() -> None:
    texts = [shuffled_text(random.Random(seed), 500) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert all(500 <= len(text) < 520 for text in texts)


@pytest.mark.parametrize("content", ["", '{"text": "x"}\n', "not json\n", '{"prompt": 3}\n'])
def test_unusable_prompt_file_is_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"--prompts .*p\.jsonl"):
        read_prompts(file)
