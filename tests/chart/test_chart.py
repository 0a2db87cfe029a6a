"""The chart's manifests: linted, valid for Kubernetes, consistent with each other, hardened."""

from typing import Any

import helm_python
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from common.version import __version__
from tests.chart.rendered import CHART, Manifest, Release, example, render

ROLES = ("router", "prefill", "decode")
RICH: dict[str, Any] = {
    "fullnameOverride": "a-name-that-is-much-longer-than-what-fits-into-a-label",
    "imagePullSecrets": [{"name": "registry"}],
    "image": {"repository": "example.org/baton", "tag": "dev"},
    "runAsUser": 1_000_650_000,  # OpenShift hands out ids like this
    "router": {"service": {"type": "NodePort", "annotations": {"a": "b"}}, "podAnnotations": {"a/b": "c"}},
    "prefill": {
        "image": {"tag": "other"},
        "cache": {"type": "existingClaim", "existingClaim": "models"},
        "nodeSelector": {"pool": "prefill"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "resources": {"limits": {"nvidia.com/gpu": 1, "cpu": 8}},
        "podDisruptionBudget": {"enabled": True, "maxUnavailable": "50%"},
        "extraEnv": [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}],
    },
    "decode": {"cache": {"type": "claimTemplate", "size": "20Gi", "storageClassName": "fast"}, "replicas": 3},
}
RELEASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "rich": RICH,
    "no-account": {"serviceAccount": {"create": False, "name": "existing"}},
    **{name: example(name) for name in ("1p1d", "2p4d", "cpu-aggregated")},
}


@pytest.fixture(params=list(RELEASES.values()), ids=list(RELEASES))
def release(request: pytest.FixtureRequest) -> Release:
    return render(request.param)


def test_chart_and_package_have_one_version() -> None:
    metadata = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert metadata["version"] == metadata["appVersion"] == __version__


@pytest.mark.parametrize("values", RELEASES.values(), ids=RELEASES)
def test_lint_finds_nothing(values: dict[str, Any]) -> None:
    report = helm_python.lint(CHART, values, strict=True)
    assert report["errors"] == []
    found = [message["error"] for message in report["messages"] if message["severity"] > 1]
    assert found == []


@pytest.mark.parametrize("kubernetes", ["1.30", "1.37"])
def test_manifests_are_valid_kubernetes(release: Release, kubernetes: str) -> None:
    for manifest in release.objects:
        assert kubernetes_validate.validate(manifest, kubernetes, strict=True) == kubernetes


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [n for child in value.values() for n in numbers(child)]
    if isinstance(value, list):
        return [n for child in value for n in numbers(child)]
    return [value] if isinstance(value, int | float) else []


def test_numbers_are_integers(release: Release) -> None:
    """Helm holds numbers as floats; 1.00065e+09 would be valid YAML and no valid user id."""
    found = [n for manifest in release.objects for n in numbers(manifest)]
    assert found
    assert [n for n in found if isinstance(n, float)] == []


def test_kubernetes_schemas_do_refuse() -> None:
    broken = {**render().workload("decode"), "spec": {"replicas": "two"}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.37", strict=True)


def test_names_are_unique_and_fit(release: Release) -> None:
    names = [(m["kind"], m["metadata"]["name"]) for m in release.objects]
    assert len(names) == len(set(names))
    for workload in release.all("StatefulSet"):
        # pod name and revision label are DNS labels of at most 63 characters
        assert len(workload["metadata"]["name"]) + len("-0123456789") <= 63


def test_services_reach_one_workload_by_named_ports(release: Release) -> None:
    pods = {role: release.workload(role)["spec"]["template"] for role in ROLES}
    for service in release.all("Service"):
        selector = service["spec"]["selector"].items()
        (role,) = [r for r in ROLES if selector <= pods[r]["metadata"]["labels"].items()]
        ports = {port["name"]: port["containerPort"] for port in release.container(role)["ports"]}
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in ports
            if service["spec"].get("clusterIP") == "None":  # no translation there: the pod's own port
                assert port["port"] == ports[port["targetPort"]]


def test_each_workload_selects_its_pods_and_has_its_headless_service(release: Release) -> None:
    for role in ROLES:
        spec = release.workload(role)["spec"]
        assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
        assert release.one("Service", spec["serviceName"])["spec"]["clusterIP"] == "None"


def test_clients_reach_http_only(release: Release) -> None:
    (public,) = [s for s in release.all("Service") if s["spec"].get("clusterIP") != "None"]
    assert [port["name"] for port in public["spec"]["ports"]] == ["http"]


@pytest.mark.parametrize("role", ROLES)
def test_probes(release: Release, role: str) -> None:
    container = release.container(role)
    paths = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert paths == {
        "startup": {"path": "/health", "port": "http"},
        "liveness": {"path": "/health", "port": "http"},
        "readiness": {"path": "/ready", "port": "http"},
    }
    patience = container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"]
    assert patience >= (120 if role == "router" else 1200)


@pytest.mark.parametrize("role", ROLES)
def test_pods_are_locked_down(release: Release, role: str) -> None:
    pod, container = release.pod(role), release.container(role)
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    writable = {m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")}
    environ = {e["name"]: e.get("value") for e in container["env"]}
    assert {environ["BATON_CACHE"], environ["HOME"]} == writable == {"/var/cache/baton", "/tmp"}


@pytest.mark.parametrize("role", ROLES)
def test_every_mount_has_its_volume(release: Release, role: str) -> None:
    claims = release.workload(role)["spec"].get("volumeClaimTemplates", [])
    volumes = [v["name"] for v in release.pod(role)["volumes"]] + [c["metadata"]["name"] for c in claims]
    assert sorted(volumes) == sorted(m["name"] for m in release.container(role)["volumeMounts"])


def checksum(release: Release, role: str) -> str:
    text = release.workload(role)["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
    assert isinstance(text, str)
    return text


def test_a_changed_file_rolls_its_pods_and_no_others() -> None:
    before, after = render(), render({"decode": {"config": {"engine": {"max_num_seqs": 8}}}})
    assert {role for role in ROLES if checksum(before, role) != checksum(after, role)} == {"decode"}
    for role in ROLES:
        assert (before.file(role) != after.file(role)) == (role == "decode")


def pod_parts(release: Release, role: str) -> Manifest:
    return {**release.pod(role), **release.container(role)}


def test_pod_values_arrive() -> None:
    release = render(RICH)
    router, prefill, decode = (pod_parts(release, role) for role in ROLES)
    assert [p["image"] for p in (router, prefill, decode)] == [
        "example.org/baton:dev",
        "example.org/baton:other",
        "example.org/baton:dev",
    ]
    assert prefill["nodeSelector"] == {"pool": "prefill"}
    assert prefill["tolerations"] == RICH["prefill"]["tolerations"]
    assert prefill["resources"]["limits"] == {"cpu": 8, "memory": "4Gi", "nvidia.com/gpu": 1}
    assert RICH["prefill"]["extraEnv"][0] in prefill["env"]
    assert {"name": "cache", "persistentVolumeClaim": {"claimName": "models"}} in prefill["volumes"]
    assert release.pod("prefill")["securityContext"]["runAsUser"] == 1_000_650_000
    (claim,) = release.workload("decode")["spec"]["volumeClaimTemplates"]
    assert claim["spec"]["storageClassName"] == "fast"
    assert claim["spec"]["resources"]["requests"]["storage"] == "20Gi"
    annotations = release.workload("router")["spec"]["template"]["metadata"]["annotations"]
    assert annotations["a/b"] == "c"
    (budget,) = release.all("PodDisruptionBudget")
    assert budget["spec"]["maxUnavailable"] == "50%"
    assert budget["spec"]["selector"] == release.workload("prefill")["spec"]["selector"]
    assert [p["imagePullSecrets"] for p in (router, prefill, decode)] == [[{"name": "registry"}]] * 3


def test_account() -> None:
    (created,) = render().all("ServiceAccount")
    assert created["automountServiceAccountToken"] is False
    assert render().pod("router")["serviceAccountName"] == created["metadata"]["name"]
    existing = render(RELEASES["no-account"])
    assert existing.all("ServiceAccount") == []
    assert existing.pod("router")["serviceAccountName"] == "existing"
