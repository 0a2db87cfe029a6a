"""Every rendered container starts: its words pass the real CLI parser, its file the real config dataclass."""

from pathlib import Path
from typing import Any

import pytest

import cli.main
from common.config import build, option_names
from decode_node.config import DecodeConfig
from prefill_node.config import PrefillConfig
from router.config import RouterConfig
from tests.chart.rendered import MACHINE_CPUS, POD_IP, Release, example, render, start

CONFIGS: dict[str, type] = {"router": RouterConfig, "prefill": PrefillConfig, "decode": DecodeConfig}
EXAMPLES = ("1p1d", "2p4d", "cpu-aggregated")
RELEASES: dict[str, dict[str, Any]] = {"defaults": {}, **{name: example(name) for name in EXAMPLES}}


def configuration(release: Release, role: str, folder: Path) -> Any:
    """The configuration that the process of ``role`` would have."""
    container = start(release, role, folder)
    program, *words = container.words
    assert program == "baton"
    args = cli.main.parse(words)
    assert args.command == role
    return build(CONFIGS[role], vars(args), file=args.config, environ=container.environ)


@pytest.mark.parametrize("role", CONFIGS)
@pytest.mark.parametrize("values", RELEASES.values(), ids=RELEASES)
def test_process_listens_where_the_pod_says(values: dict[str, Any], role: str, tmp_path: Path) -> None:
    release = render(values)
    config = configuration(release, role, tmp_path)
    ports = {port["name"]: port["containerPort"] for port in release.container(role)["ports"]}
    if role == "router":
        assert config.listen.host == "0.0.0.0"
        assert ports == {"http": config.listen.port, "control": config.listen.control_port}
    else:
        assert config.node.host == POD_IP
        assert config.node.node_id == f"demo-baton-{role}-0"
        assert ports == {
            "http": config.node.port,
            "events": config.node.events_port,
            "replay": config.node.replay_port,
            "transfer": config.node.transfer_port,
        }
    assert 0 not in ports.values()


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("values", RELEASES.values(), ids=RELEASES)
def test_nodes_know_every_router_by_a_name_that_exists(
    values: dict[str, Any], role: str, tmp_path: Path
) -> None:
    release = render(values)
    router = release.workload("router")["spec"]
    headless = release.one("Service", router["serviceName"])
    control = next(port["port"] for port in headless["spec"]["ports"] if port["name"] == "control")
    expected = [
        f"tcp://demo-baton-router-{i}.{headless['metadata']['name']}.serving.svc:{control}"
        for i in range(router["replicas"])
    ]
    assert configuration(release, role, tmp_path).node.router.split(",") == expected
    # A router is ready only once a node reached it: its name must resolve before.
    assert headless["spec"]["publishNotReadyAddresses"] is True
    assert headless["spec"]["clusterIP"] == "None"
    assert router["podManagementPolicy"] == "Parallel"


@pytest.mark.parametrize("role", CONFIGS)
def test_grace_period_outlasts_the_drain(role: str, tmp_path: Path) -> None:
    section = "listen" if role == "router" else "node"
    release = render({role: {"config": {section: {"drain_timeout_s": 90.5}}}})
    config = configuration(release, role, tmp_path)
    drain = getattr(config, section).drain_timeout_s
    assert drain == 90.5
    assert release.pod(role)["terminationGracePeriodSeconds"] == 101


@pytest.mark.parametrize("role", CONFIGS)
def test_no_variable_is_mistaken_for_an_option(role: str, tmp_path: Path) -> None:
    options = {
        "BATON_" + name.removeprefix("--").replace("-", "_").upper() for name in option_names(CONFIGS[role])
    }
    environ = start(render(), role, tmp_path).environ
    set_options = {name for name in environ if name in options}
    assert set_options == (set() if role == "router" else {"BATON_THREADS"})
    assert {name for name in environ if name.startswith("BATON_")} - set_options == {"BATON_CACHE"}
    # Kubernetes would inject BATON_PORT=tcp://... for a Service called "baton".
    assert render().pod(role)["enableServiceLinks"] is False


def test_threads_follow_the_cpu_limit_unless_given(tmp_path: Path) -> None:
    limited = render({"decode": {"resources": {"limits": {"cpu": "6"}}}})
    assert configuration(limited, "decode", tmp_path / "a").engine.threads == 6
    unlimited = render({"decode": {"resources": {"limits": {"cpu": None}}}})
    assert configuration(unlimited, "decode", tmp_path / "b").engine.threads == MACHINE_CPUS
    given = render({"decode": {"config": {"engine": {"threads": 3}}}})
    assert configuration(given, "decode", tmp_path / "c").engine.threads == 3


def test_component_values_win_over_shared_ones_even_when_false_or_empty(tmp_path: Path) -> None:
    release = render(
        {
            "shared": {
                "config": {
                    "engine": {"prefix_caching": True, "kv_cache_mib": 99, "hash_seed": "7"},
                    "transfer": {"checksum": True},
                }
            },
            "prefill": {
                "config": {
                    "engine": {"prefix_caching": False, "hash_seed": ""},
                    "transfer": {"checksum": False},
                }
            },
        }
    )
    prefill = configuration(release, "prefill", tmp_path / "p")
    decode = configuration(release, "decode", tmp_path / "d")
    assert (prefill.engine.prefix_caching, prefill.engine.hash_seed, prefill.transfer.checksum) == (
        False,
        "",
        False,
    )
    assert (decode.engine.prefix_caching, decode.engine.hash_seed, decode.transfer.checksum) == (
        True,
        "7",
        True,
    )
    assert prefill.engine.kv_cache_mib == decode.engine.kv_cache_mib == 99
    assert release.file("router").keys() == {"listen", "log", "model"}


def test_large_numbers_and_numeric_strings_arrive_unchanged(tmp_path: Path) -> None:
    release = render(
        {
            "shared": {
                "config": {"model": {"served_model_name": "1e3"}, "engine": {"max_model_len": 123_456_789}}
            },
            "router": {"config": {"limits": {"max_body_bytes": 1 << 40}}},
        }
    )
    assert configuration(release, "router", tmp_path / "r").limits.max_body_bytes == 1 << 40
    decode = configuration(release, "decode", tmp_path / "d")
    assert (decode.engine.max_model_len, decode.model.served_model_name) == (123_456_789, "1e3")


def test_given_router_addresses_are_kept(tmp_path: Path) -> None:
    release = render({"decode": {"config": {"node": {"router": "tcp://elsewhere:8001"}}}})
    assert configuration(release, "decode", tmp_path).node.router == "tcp://elsewhere:8001"
    assert "demo-baton-router-0" in release.file("prefill")["node"]["router"]
