"""Renders the chart with Helm's own engine and reads the result as Kubernetes would.

A `Container` is what the kubelet starts: words with $(NAME) expanded, the environment with downward-API
values filled in, and the mounted ConfigMap files written below a folder.
"""

import functools
import json
import re
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helm_python
import yaml

CHART = Path(__file__).resolve().parents[2] / "helm"
POD_IP = "10.1.2.3"
MACHINE_CPUS = 96  # what limits.cpu resolves to where a container has no limit

Manifest = dict[str, Any]


class _UniqueKeyLoader(yaml.SafeLoader):
    """A repeated key is an error here; plain PyYAML keeps the last one in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        repeated = {key for key in keys if keys.count(key) > 1}
        if repeated:
            raise yaml.constructor.ConstructorError(None, None, f"repeated keys {repeated}", node.start_mark)
        return super().construct_mapping(node, deep)


@dataclass(frozen=True)
class Release:
    """The manifests of one rendering."""

    objects: tuple[Manifest, ...]
    notes: str

    def all(self, kind: str) -> list[Manifest]:
        return [manifest for manifest in self.objects if manifest["kind"] == kind]

    def one(self, kind: str, name: str) -> Manifest:
        (found,) = [m for m in self.all(kind) if m["metadata"]["name"] == name]
        return found

    def names(self) -> dict[str, list[str]]:
        """Kind -> sorted names."""
        kinds = sorted({manifest["kind"] for manifest in self.objects})
        return {kind: sorted(m["metadata"]["name"] for m in self.all(kind)) for kind in kinds}

    def workload(self, role: str) -> Manifest:
        (found,) = [
            m
            for m in self.all("StatefulSet")
            if m["metadata"]["labels"]["app.kubernetes.io/component"] == role
        ]
        return found

    def pod(self, role: str) -> Manifest:
        spec: Manifest = self.workload(role)["spec"]["template"]["spec"]
        return spec

    def container(self, role: str) -> Manifest:
        (found,) = self.pod(role)["containers"]
        assert isinstance(found, dict)
        return found

    def file(self, role: str) -> Manifest:
        """The role's configuration file, parsed."""
        parsed: Manifest = yaml.safe_load(self.one("ConfigMap", f"demo-baton-{role}")["data"][f"{role}.yaml"])
        return parsed


@functools.cache
def loaded_chart() -> helm_python.Chart:
    """The chart as it is on disk, loaded once (immutable)."""
    return helm_python.Chart.load(CHART)


def render(values: Manifest | None = None, *, name: str = "demo", namespace: str = "serving") -> Release:
    """The chart rendered with ``values``. Raises HelmError where the schema or a template refuses."""
    return _render(json.dumps(values or {}), name, namespace)


@functools.cache
def _render(values: str, name: str, namespace: str) -> Release:
    chart = loaded_chart()
    chart.validate_schema(json.loads(values))
    files = chart.render(json.loads(values), name=name, namespace=namespace)
    objects: list[Manifest] = []
    for file, text in files.items():
        if file.endswith(".yaml"):
            objects += [m for m in yaml.load_all(text, Loader=_UniqueKeyLoader) if m]
    (notes,) = [text for file, text in files.items() if file.endswith("NOTES.txt")]
    return Release(tuple(objects), notes)


def example(name: str) -> Manifest:
    values: Manifest = yaml.safe_load((CHART / "examples" / f"{name}.yaml").read_text(encoding="utf-8"))
    return values


@dataclass(frozen=True)
class Container:
    """What the kubelet starts for pod 0 of a role. ``words`` start with the program."""

    words: tuple[str, ...]
    environ: dict[str, str]


def start(release: Release, role: str, folder: Path) -> Container:
    """Resolves a container as the kubelet does; its ConfigMap files land in ``folder``."""
    spec = release.container(role)
    environ = {
        entry["name"]: _value(entry, spec, f"{release.workload(role)['metadata']['name']}-0")
        for entry in spec["env"]
    }
    words = [_expand(word, environ) for word in (*spec["command"], *spec["args"])]
    volumes = {volume["name"]: volume for volume in release.pod(role)["volumes"]}
    for mount in spec["volumeMounts"]:
        source = volumes.get(mount["name"], {}).get("configMap")
        if source is None:
            continue
        target = folder / mount["mountPath"].strip("/")
        target.mkdir(parents=True)
        for file, text in release.one("ConfigMap", source["name"])["data"].items():
            (target / file).write_text(text, encoding="utf-8")
        words = [
            str(target / word.removeprefix(f"{mount['mountPath']}/"))
            if word.startswith(f"{mount['mountPath']}/")
            else word
            for word in words
        ]
    return Container(tuple(words), environ)


def _value(entry: Manifest, container: Manifest, pod_name: str) -> str:
    source = entry.get("valueFrom")
    if source is None:
        return str(entry["value"])
    if "fieldRef" in source:
        return {"status.podIP": POD_IP, "metadata.name": pod_name}[source["fieldRef"]["fieldPath"]]
    if "resourceFieldRef" in source:
        assert source["resourceFieldRef"] == {"resource": "limits.cpu"}
        return str(container.get("resources", {}).get("limits", {}).get("cpu", MACHINE_CPUS))
    return "from-a-secret"


def _expand(word: str, environ: dict[str, str]) -> str:
    """$(NAME) where NAME is known; an unknown one stays as it is, as in Kubernetes."""
    return re.sub(r"\$\((\w+)\)", lambda match: environ.get(match[1], match[0]), word)
