"""The example value files say what their names promise: the objects they make and what matters in them."""

import pytest

from tests.chart.rendered import CHART, example, render

BASE = {
    "ConfigMap": ["demo-baton-decode", "demo-baton-prefill", "demo-baton-router"],
    "Service": [
        "demo-baton-decode-headless",
        "demo-baton-prefill-headless",
        "demo-baton-router",
        "demo-baton-router-headless",
    ],
    "ServiceAccount": ["demo-baton"],
    "StatefulSet": ["demo-baton-decode", "demo-baton-prefill", "demo-baton-router"],
}
BUDGETS = {"PodDisruptionBudget": ["demo-baton-decode", "demo-baton-prefill", "demo-baton-router"]}
REPLICAS = {  # example: router, prefill, decode
    "1p1d": (1, 1, 1),
    "2p4d": (2, 2, 4),
    "cpu-aggregated": (1, 0, 2),
}
MODELS = {"1p1d": "baton-tiny", "2p4d": "smollm2-135m-instruct", "cpu-aggregated": "baton-tiny"}
# Seconds a pod of router, prefill, decode gets to stop.
GRACE = {"1p1d": (30, 30, 30), "2p4d": (70, 30, 70), "cpu-aggregated": (30, 30, 30)}
OBJECTS = {"1p1d": BASE, "2p4d": BASE | BUDGETS, "cpu-aggregated": BASE}
ROLES = ("router", "prefill", "decode")


def test_every_example_is_described_here() -> None:
    assert {file.stem for file in (CHART / "examples").glob("*.yaml")} == REPLICAS.keys()


@pytest.mark.parametrize("name", REPLICAS)
def test_example(name: str) -> None:
    release = render(example(name))
    assert release.names() == OBJECTS[name]
    assert tuple(release.workload(role)["spec"]["replicas"] for role in ROLES) == REPLICAS[name]
    assert {release.file(role)["model"]["model"] for role in ROLES} == {MODELS[name]}
    assert tuple(release.pod(role)["terminationGracePeriodSeconds"] for role in ROLES) == GRACE[name]
    for node in ("prefill", "decode"):
        assert len(release.file(node)["node"]["router"].split(",")) == REPLICAS[name][0]


def test_1p1d_nodes_differ_in_nothing_but_their_role() -> None:
    release = render(example("1p1d"))
    assert release.file("prefill") == release.file("decode")
    assert release.file("decode")["engine"] == {"kv_cache_mib": 512}


def test_2p4d_spreads_its_nodes_and_keeps_their_models() -> None:
    release = render(example("2p4d"))
    for role in ("prefill", "decode"):
        (term,) = release.pod(role)["affinity"]["podAntiAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]
        labels = release.workload(role)["spec"]["template"]["metadata"]["labels"]
        assert term["labelSelector"]["matchLabels"].items() <= labels.items()
        (claim,) = release.workload(role)["spec"]["volumeClaimTemplates"]
        assert claim["spec"]["resources"]["requests"]["storage"] == "4Gi"
    assert release.file("decode")["engine"] == release.file("prefill")["engine"] | {"max_num_seqs": 32}
    assert release.one("Service", "demo-baton-router")["spec"]["type"] == "LoadBalancer"


def test_cpu_aggregated_says_that_nothing_is_handed_over() -> None:
    assert "computes its prompts itself" in render(example("cpu-aggregated")).notes
    assert "computes its prompts itself" not in render(example("1p1d")).notes
