"""Writes helm/values.schema.json: `python -m scripts.helm_schema` (`--check` only compares).

The `config` sections come from the config dataclasses, so that a chart value and a flag are one option;
the rest says what a pod may be told. Unknown keys are refused at every level, except inside what
Kubernetes itself defines deeply (affinity terms, `valueFrom`).
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

from common.config import LogOptions, ModelOptions
from decode_node.config import DecodeConfig
from prefill_node.config import PrefillConfig
from router.config import RouterConfig

SCHEMA_FILE = Path(__file__).resolve().parents[1] / "helm" / "values.schema.json"
ROLES: dict[str, type] = {"router": RouterConfig, "prefill": PrefillConfig, "decode": DecodeConfig}
# Options that the chart sets per pod (flags win over the file): a value here would be ignored in silence.
SET_BY_CHART: dict[str, set[tuple[str, ...]]] = {
    role: {("node", "host"), ("node", "node_id")} for role in ("prefill", "decode")
}
JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}

Schema = dict[str, Any]


def closed(
    properties: dict[str, Schema], *, required: list[str] | None = None, description: str = ""
) -> Schema:
    """An object that refuses keys other than ``properties``."""
    schema: Schema = {"type": "object", "additionalProperties": False, "properties": properties}
    if required:
        schema["required"] = required
    if description:
        schema["description"] = description
    return schema


def config_schema(cls: type, skip: set[tuple[str, ...]], path: tuple[str, ...] = ()) -> Schema:
    """The options of a config dataclass, nested as in its YAML file. Ports must be given and not 0 (a free
    port cannot be named in a Service)."""
    hints = get_type_hints(cls)
    properties: dict[str, Schema] = {}
    ports: list[str] = []
    for f in dataclasses.fields(cls):
        kind = hints[f.name]
        if (*path, f.name) in skip:
            continue
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            properties[f.name] = config_schema(kind, skip, (*path, f.name))
            continue
        kinds = [JSON_TYPES[k] for k in get_args(kind) or (kind,)]
        option: Schema = {"type": kinds[0] if len(kinds) == 1 else kinds}
        if f.metadata.get("help"):
            option["description"] = f.metadata["help"]
        if f.metadata.get("choices"):
            option["enum"] = list(f.metadata["choices"])
        if f.metadata.get("minimum") is not None:
            option["minimum"] = f.metadata["minimum"]
        if kind is int and (f.name == "port" or f.name.endswith("_port")):
            option |= {"minimum": 1, "maximum": 65535}
            ports.append(f.name)
        properties[f.name] = option
    required = ports + [name for name, schema in properties.items() if "required" in schema]
    if "drain_timeout_s" in properties:
        required.append("drain_timeout_s")  # the pods' grace period is computed from it
    return closed(properties, required=required)


STRING: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
QUANTITY: Schema = {
    "type": ["string", "number"],
    "pattern": r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?$",
}
STRING_MAP: Schema = {"type": "object", "additionalProperties": STRING}
PROBE = closed(
    {
        "initialDelaySeconds": COUNT,
        "periodSeconds": {"type": "integer", "minimum": 1},
        "timeoutSeconds": {"type": "integer", "minimum": 1},
        "failureThreshold": {"type": "integer", "minimum": 1},
    }
)
IMAGE: dict[str, Schema] = {
    "repository": STRING,
    "tag": STRING,
    "pullPolicy": {"type": "string", "enum": ["Always", "IfNotPresent", "Never"]},
}
RESOURCE_LIST: Schema = {"type": "object", "additionalProperties": QUANTITY}
TOLERATION = closed(
    {
        "key": STRING,
        "operator": {"type": "string", "enum": ["Exists", "Equal"]},
        "value": STRING,
        "effect": {"type": "string", "enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]},
        "tolerationSeconds": COUNT,
    }
)
ENVIRONMENT_VARIABLE = closed(
    {"name": STRING, "value": STRING, "valueFrom": {"type": "object"}}, required=["name"]
)
CACHE = closed(
    {
        "type": {"type": "string", "enum": ["emptyDir", "claimTemplate", "existingClaim"]},
        "size": QUANTITY,
        "storageClassName": STRING,
        "existingClaim": STRING,
    },
    required=["type", "size"],
    description="where prepared models are kept (BATON_CACHE)",
)
DISRUPTION_BUDGET = closed(
    {
        "enabled": {"type": "boolean"},
        "maxUnavailable": {"type": ["integer", "string"], "pattern": r"^[0-9]+%$"},
    },
    required=["enabled", "maxUnavailable"],
)


def component_schema(role: str) -> Schema:
    """The values block of one role."""
    properties: dict[str, Schema] = {
        "replicas": {"type": "integer", "minimum": 1 if role == "router" else 0},
        "config": config_schema(ROLES[role], SET_BY_CHART.get(role, set())),
        "image": closed(IMAGE),
        "resources": closed({"requests": RESOURCE_LIST, "limits": RESOURCE_LIST}),
        "probes": closed(
            {"startup": PROBE, "liveness": PROBE, "readiness": PROBE},
            required=["startup", "liveness", "readiness"],
        ),
        "cache": CACHE,
        "podDisruptionBudget": DISRUPTION_BUDGET,
        "nodeSelector": STRING_MAP,
        "tolerations": {"type": "array", "items": TOLERATION},
        "affinity": closed(
            {name: {"type": "object"} for name in ("nodeAffinity", "podAffinity", "podAntiAffinity")}
        ),
        "extraEnv": {"type": "array", "items": ENVIRONMENT_VARIABLE},
        "podAnnotations": STRING_MAP,
    }
    if role == "router":
        service_type = {"type": "string", "enum": ["ClusterIP", "NodePort", "LoadBalancer"]}
        port = {"type": "integer", "minimum": 1, "maximum": 65535}
        properties["service"] = closed(
            {"type": service_type, "port": port, "annotations": STRING_MAP}, required=["type", "port"]
        )
    return closed(properties, required=sorted(properties))


def values_schema() -> Schema:
    """The schema of all values."""
    node = {f.name: get_type_hints(PrefillConfig)[f.name] for f in dataclasses.fields(PrefillConfig)}
    shared = {
        "model": ModelOptions,
        "engine": node["engine"],
        "transfer": node["transfer"],
        "log": LogOptions,
    }
    user_id: Schema = {"type": "integer", "minimum": 1}
    properties: dict[str, Schema] = {
        "nameOverride": STRING,
        "fullnameOverride": STRING,
        "image": closed(IMAGE, required=list(IMAGE)),
        "imagePullSecrets": {"type": "array", "items": closed({"name": STRING}, required=["name"])},
        "serviceAccount": closed(
            {"create": {"type": "boolean"}, "name": STRING, "annotations": STRING_MAP}, required=["create"]
        ),
        "runAsUser": user_id,
        "runAsGroup": user_id,
        "fsGroup": user_id,
        "shared": closed(
            {"config": closed({name: config_schema(cls, set()) for name, cls in shared.items()})},
            required=["config"],
        ),
        **{role: component_schema(role) for role in ROLES},
    }
    required = sorted(properties)
    properties["global"] = {"type": "object", "description": "Helm adds it where this chart is a dependency"}
    return {"$schema": "http://json-schema.org/draft-07/schema#", **closed(properties, required=required)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Writes helm/values.schema.json from the config dataclasses."
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if the file is out of date"
    )
    args = parser.parse_args()
    text = json.dumps(values_schema(), indent=2) + "\n"
    if args.check:
        if SCHEMA_FILE.exists() and SCHEMA_FILE.read_text(encoding="utf-8") == text:
            return 0
        print(f"{SCHEMA_FILE} is out of date: run `python -m scripts.helm_schema`", file=sys.stderr)
        return 1
    SCHEMA_FILE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
