"""`baton verify` and `baton bench arms` as they are run: exit codes and JSON, with baton-tiny in float32."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.up_process import ROOT

SMALL = ("--model=baton-tiny", "--dtype=float32", "--threads=1", "--kv-cache-mib=24", "--json")
TIMEOUT_S = 180.0
MAX_DIFF = 1e-4


def run(*words: str) -> tuple[int, dict[str, Any]]:
    """Exit code and the JSON on stdout."""
    ended = subprocess.run(
        [sys.executable, "-m", "cli.main", *words, *SMALL],
        cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert "Traceback" not in ended.stderr, ended.stderr
    report: dict[str, Any] = json.loads(ended.stdout)
    return ended.returncode, report


@pytest.mark.parametrize("handoff", ["backoff", "carry"])
def test_pair_and_aggregated_agree(handoff: str) -> None:
    code, report = run("verify", "--prompts=20", f"--handoff={handoff}")
    assert report["ok"] is True
    assert code == 0
    assert report["num_modules"] == 4
    assert report["prompts"] == 20
    assert report["tokens"] == 20 * 24
    # With `backoff` prompts of 1..N-1 tokens leave nothing to hand over.
    assert report["hand_overs"] == (20 - 3 if handoff == "backoff" else 20)
    assert report["transferred_bytes"] > 0
    assert min(report["prefix_hits"].values()) > 0
    assert report["drafts"] > report["tokens"]
    differing = ("tokens_differing", "tokens_differing_without_speculation", "drafts_differing")
    assert [report[name] for name in (*differing, "transfer_failures")] == [0, 0, 0, 0]
    assert set(report["draft_kv_max_diff"]) == {"pair", "aggregated"}
    assert max(report["draft_kv_max_diff"].values()) < MAX_DIFF


@pytest.mark.parametrize(
    ("control", "handoff"), [("carry", "backoff"), ("lookahead", "backoff"), ("carry", "carry")]
)
def test_a_broken_rule_is_found(control: str, handoff: str) -> None:
    words = (f"--negative-control={control}", f"--handoff={handoff}")
    code, report = run("verify", "--prompts=8", "--output-len=12", *words)
    assert code == 1
    assert report["ok"] is False
    assert report["negative_control"] == control
    pair, aggregated = report["draft_kv_max_diff"]["pair"], report["draft_kv_max_diff"]["aggregated"]
    assert aggregated < MAX_DIFF
    assert pair > max(MAX_DIFF, 100 * aggregated)
    assert report["tokens_differing"] == 0  # drafts alone suffer: verification keeps the tokens right


def test_arms_in_one_run() -> None:
    code, result = run("bench", "arms", "--num-prompts=2", "--output-len=24")
    assert code == 0
    assert result["pair_accepts_as_aggregated"] is True
    assert result["same_tokens"] is True
    assert list(result["arms"]) == [
        "no speculation", "MTP, aggregated", "MTP, pair", "MTP, pair, handoff carry",
        "MTP, pair, prompt cut on P, no carry",
    ]  # fmt: skip
    for name, arm in result["arms"].items():
        assert arm["output_tokens"] == 2 * 24
        assert arm["tokens_per_s"] > 0
        assert arm["ttft_ms"]["p50"] > 0
        assert arm["tpot_ms"]["p50"] > 0
        if name == "no speculation":
            assert arm["acceptance_length"] == 1.0
            assert arm["num_drafts"] == 0
        else:
            assert arm["acceptance_length"] > 1.0
            assert arm["verified_per_pos"][0] == arm["num_drafts"] > 0


def test_random_hybrids_and_schedules() -> None:
    """Real nodes over four random hybrids, and schedules on each, half of them through the hand-over."""
    code, told = run("verify", "--random-model", "--prompts=16", "--output-len=10", "--schedules=6")
    assert code == 0
    assert told["ok"] is True
    assert [report["num_modules"] for report in told["models"]] == [1, 2, 4, 8]
    for report in told["models"]:
        assert report["hand_overs"] > 0
        assert report["transfer_failures"] == report["drafts_differing"] == report["tokens_differing"] == 0
        assert report["schedules"]["schedules"] == 6
        assert report["schedules"]["tokens compared"] > 0
        assert report["schedule_problems"] == []


def test_schedules_on_a_shipped_model() -> None:
    code, report = run("verify", "--prompts=4", "--output-len=8", "--schedules=4")
    assert code == 0
    assert report["schedules"]["schedules"] == 4
    assert report["schedule_problems"] == []


def test_schedules_need_float32() -> None:
    command = [sys.executable, "-m", "cli.main", "verify", "--model=baton-tiny", "--schedules=1"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.returncode == 2
    assert "add --dtype float32" in ended.stderr
