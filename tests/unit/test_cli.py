"""The front door: exit codes, one clear line for each error, and a `--help` that is quick."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import cli.main
from cli.local_config import DefaultModelOptions
from cli.main import COMMANDS, main
from cli.options import to_flags
from cli.up_config import Ports, UpConfig, UpOptions, command_lines, threads_per_node
from common.config import EngineOptions, build
from common.errors import ConfigError, IncompatiblePeer, ModelLoadError, NodeFailed
from common.version import __version__

ROOT = Path(__file__).resolve().parents[2]


def baton(*words: str) -> "subprocess.CompletedProcess[str]":
    environ = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
    command = [sys.executable, "-m", "cli.main", *words]
    return subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=60, check=False
    )


def test_version_and_help_are_quick_and_name_every_command() -> None:
    assert baton("--version").stdout.strip() == f"baton {__version__}"
    used_before_s = os.times().children_user
    result = baton("--help")
    used_s = os.times().children_user - used_before_s
    assert result.returncode == 0
    assert all(name.split()[0] in result.stdout for name in COMMANDS)
    assert used_s < 0.5  # a torch import alone takes longer than that


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "required: command"),
        (("fly",), "invalid choice: 'fly'"),
        (("bench",), "required: what"),
        (("model", "prepare", "nobody-knows-this"), "--model nobody-knows-this: not a folder"),
        (("prefill", "--no-such-option"), "unrecognized arguments: --no-such-option"),
        (("prefill", "--dtype", "float16"), "--dtype: 'float16' is not one of float32, bfloat16"),
        (("decode", "--block-size", "0"), "--block-size: 0 is below the minimum of 1"),
        (("router", "--port", "many"), "--port: 'many' is not a valid int"),
        (("up", "--aggregated", "--prefill", "2"), "--aggregated runs no prefill nodes"),
        (("up", "--config", "nowhere.yaml"), "config file nowhere.yaml"),
        (("bench", "load", "--concurrency", "0"), "'0' is not a whole number above 0"),
    ],
)
def test_wrong_input_exits_2_with_what_is_wrong(words: tuple[str, ...], message: str) -> None:
    result = baton(*words)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_port_in_use_exits_2_and_names_the_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = baton("up", "--model", "baton-tiny", "--port", str(port))
    assert result.returncode == 2
    assert result.stderr == (
        f"baton: port {port} on 127.0.0.1 is in use; stop what listens there or choose another with --port\n"
    )


@pytest.mark.parametrize("words", [("generate", "hello"), ("bench", "load")])
def test_no_server_at_the_url_exits_1_and_names_it(words: tuple[str, ...]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        result = baton(*words, "--url", url)
    assert result.returncode == 1
    assert url in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (ConfigError("a flag is wrong"), 2),
        (ModelLoadError("a tensor is missing"), 2),
        (IncompatiblePeer("num_modules differs"), 2),
        (NodeFailed("it died"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_code_of_each_kind_of_error(
    error: BaseException, exit_code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_argv: object) -> None:
        raise error

    monkeypatch.setattr(cli.main, "parse", fail)
    assert main([]) == exit_code
    expected = "" if isinstance(error, KeyboardInterrupt) else f"baton: {error}\n"
    assert capsys.readouterr().err == expected


def test_ctrl_c_ends_a_command_quietly() -> None:
    command = [sys.executable, "-m", "cli.main", "events", "--endpoint", "tcp://127.0.0.1:9"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    time.sleep(1.5)
    process.send_signal(2)
    _, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (130, "")


def test_flags_say_what_the_options_say() -> None:
    options = EngineOptions(block_size=32, prefix_caching=False, hash_seed="-x")
    words = to_flags(options)
    assert words == ["--block-size=32", "--no-prefix-caching", "--hash-seed=-x"]


def test_up_gives_every_process_its_ports_model_and_options() -> None:
    config = UpConfig(
        up=UpOptions(prefill=1, decode=2, host="0.0.0.0"),
        model=DefaultModelOptions(model="baton-tiny", dtype="float32"),
        engine=EngineOptions(kv_cache_mib=64),
    )
    lines = command_lines(config, Ports(http=9000, control=9001, nodes=(9002, 9003, 9004)), num_cores=8)
    assert list(lines) == ["router", "prefill-0", "decode-0", "decode-1"]
    assert {"--host=0.0.0.0", "--port=9000", "--control-port=9001"} < set(lines["router"])
    for name, port in zip(["prefill-0", "decode-0", "decode-1"], (9002, 9003, 9004), strict=True):
        args = cli.main.parse(lines[name])
        assert (args.command, args.port, args.router) == (name[:-2], str(port), "tcp://127.0.0.1:9001")
        assert (args.model, args.dtype, args.kv_cache_mib, args.threads) == (
            "baton-tiny",
            "float32",
            "64",
            "2",
        )


@pytest.mark.parametrize(("cores", "nodes", "threads"), [(1, 2, 1), (2, 2, 1), (16, 3, 5)])
def test_nodes_share_the_cores(cores: int, nodes: int, threads: int) -> None:
    config = UpConfig(up=UpOptions(prefill=1, decode=nodes - 1))
    assert threads_per_node(config, cores) == threads


def test_aggregated_up_has_no_prefill_node() -> None:
    config = build(UpConfig, {"aggregated": True}, environ={})
    lines = command_lines(config, Ports(http=1, control=2, nodes=(3,)), num_cores=4)
    assert list(lines) == ["router", "decode-0"]
    assert cli.main.parse(lines["decode-0"]).aggregated
