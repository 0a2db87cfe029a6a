"""`baton generate` and the client example against a scripted server."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cli.main import main
from tests.fakes_openai_server import Script, openai_server

ROOT = Path(__file__).resolve().parents[2]
USAGE = {"prompt_tokens": 4, "completion_tokens": 6, "baton": {"num_drafts": 2, "num_draft_tokens": 4,
         "num_accepted": 3, "accepted_per_pos": [2, 1], "verified_per_pos": [2, 2]}}  # fmt: skip


def test_answer_goes_to_stdout_and_the_figures_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    script = Script(usage=USAGE)
    with openai_server(script) as url:
        assert main(["generate", "Count.", "--url", url, "--max-tokens", "9", "--seed", "5"]) == 0
    out, err = capsys.readouterr()
    assert out == "One two three\n"
    assert "acceptance length 2.50, per position 1.00 / 0.50" in err
    (body,) = script.bodies
    assert body["messages"] == [{"role": "user", "content": "Count."}]
    assert (body["model"], body["max_tokens"], body["seed"], body["temperature"]) == ("scripted", 9, 5, 0)


def test_model_without_chat_template_continues_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    script = Script(usage=USAGE, has_chat_template=False)
    with openai_server(script) as url:
        assert main(["generate", "Count: zero", "--url", url]) == 0
    assert capsys.readouterr().out == "One two three\n"
    assert script.bodies[0]["prompt"] == "Count: zero"


def test_refusal_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    script = Script(
        refusal=(400, {"message": "max_tokens is -1; it must be at least 1", "param": "max_tokens"})
    )
    with openai_server(script) as url:
        assert main(["generate", "Count.", "--url", url]) == 2
    assert capsys.readouterr().err == "baton: max_tokens is -1; it must be at least 1\n"


def test_client_example_streams_the_answer_and_shows_the_usage() -> None:
    script = Script(usage=USAGE)
    command = [sys.executable, str(ROOT / "examples" / "client.py"), "Count."]
    with openai_server(script) as url:
        done = subprocess.run([*command, url], capture_output=True, text=True, check=True, timeout=30)
    text, _, usage = done.stdout.partition("\n")
    assert text == "One two three"
    assert json.loads(usage) == USAGE
