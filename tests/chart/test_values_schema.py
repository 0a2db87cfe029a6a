"""The values schema: equal to the config dataclasses, closed at every level, strict about types."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import helm_python
import pytest
import yaml

from common.config import option_names
from scripts.helm_schema import ROLES, SCHEMA_FILE, SET_BY_CHART, values_schema
from tests.chart.rendered import CHART, loaded_chart, render

Schema = dict[str, Any]
Path = tuple[str, ...]
SCHEMA = values_schema()
WRONG: dict[str, Any] = {
    "string": 7,
    "integer": "seven",
    "number": "seven",
    "boolean": "yes",
    "array": {},
    "object": 7,
}


def walk(schema: Schema, path: Path = ()) -> Iterator[tuple[Path, Schema]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from walk(child, (*path, name))


def at(path: Path, value: Any) -> dict[str, Any]:
    """{a: {b: value}} for (a, b)."""
    for name in reversed(path):
        value = {name: value}
    assert isinstance(value, dict)
    return value


@pytest.fixture
def chart() -> helm_python.Chart:
    return loaded_chart()


def test_file_is_up_to_date() -> None:
    assert json.loads(SCHEMA_FILE.read_text(encoding="utf-8")) == SCHEMA, (
        "run `python -m scripts.helm_schema`"
    )


@pytest.mark.parametrize("role", ROLES)
def test_every_option_of_a_role_has_a_value_or_is_set_by_the_chart(role: str) -> None:
    config = SCHEMA["properties"][role]["properties"]["config"]
    in_schema = [path[-1] for path, schema in walk(config) if path and "properties" not in schema]
    by_chart = [path[-1] for path in SET_BY_CHART.get(role, set())]
    options = [name.removeprefix("--").replace("-", "_") for name in option_names(ROLES[role])]
    assert sorted(in_schema + by_chart) == sorted(options)


CLOSED = [path for path, schema in walk(SCHEMA) if schema.get("additionalProperties") is False]


@pytest.mark.parametrize("path", CLOSED, ids=[".".join(path) or "values" for path in CLOSED])
def test_unknown_keys_are_refused(chart: helm_python.Chart, path: Path) -> None:
    with pytest.raises(helm_python.HelmValuesError, match="surprise"):
        chart.validate_schema(at((*path, "surprise"), 1))


def test_every_object_with_known_keys_is_closed() -> None:
    open_ones = {path for path, schema in walk(SCHEMA) if "properties" in schema} - set(CLOSED)
    assert open_ones == set()
    assert len(CLOSED) > 40


TYPED = [(path, schema) for path, schema in walk(SCHEMA) if path and isinstance(schema["type"], str)]


def test_wrong_types_are_refused(chart: helm_python.Chart) -> None:
    accepted = []
    for path, schema in TYPED:
        try:
            chart.validate_schema(at(path, WRONG[schema["type"]]))
        except helm_python.HelmValuesError as error:
            if path[-1] in str(error):
                continue
        accepted.append(".".join(path))
    assert accepted == []
    assert len(TYPED) > 150


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"router": {"replicas": 0}}, "replicas"),
        ({"prefill": {"replicas": -1}}, "replicas"),
        ({"prefill": {"config": {"node": {"events_port": 0}}}}, "events_port"),
        ({"prefill": {"config": {"node": {"events_port": None}}}}, "events_port"),
        ({"decode": {"config": {"node": {"port": 70000}}}}, "port"),
        ({"decode": {"config": {"node": {"host": "0.0.0.0"}}}}, "host"),
        ({"decode": {"config": {"engine": {"hash_algorithm": "md5"}}}}, "hash_algorithm"),
        ({"shared": {"config": {"engine": {"block_size": 0}}}}, "block_size"),
        ({"shared": {"config": {"model": {"dtype": "int4"}}}}, "dtype"),
        ({"router": {"service": {"type": "ExternalName"}}}, "service"),
        ({"router": {"extraEnv": [{"value": "x"}]}}, "name"),
        ({"router": {"tolerations": [{"efect": "NoSchedule"}]}}, "efect"),
        ({"router": {"resources": {"limits": {"memory": "2 gigs"}}}}, "memory"),
        ({"runAsUser": 0}, "runAsUser"),
        ({"routers": {}}, "routers"),
    ],
    ids=lambda case: json.dumps(case) if isinstance(case, dict) else "",
)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    with pytest.raises(helm_python.HelmValuesError, match=named):
        render(values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"decode": {"config": {"node": {"replay_port": 5557}}}}, "decode.config: ports must differ"),
        ({"prefill": {"cache": {"type": "existingClaim"}}}, "prefill.cache.existingClaim is empty"),
        ({"router": {"extraEnv": [{"name": "BATON_PORT", "value": "9"}]}}, "set it under router.config"),
    ],
    ids=["ports", "claim", "environment"],
)
def test_contradictions_are_refused_with_what_to_do(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm_python.HelmRenderError, match=message):
        render(values)


def test_default_values_repeat_no_default_of_the_process_wrongly() -> None:
    """values.yaml may differ from the dataclasses only where the chart must decide."""
    values = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    different = set()
    for role, cls in ROLES.items():
        for section, fields in values[role]["config"].items():
            group = getattr(cls(), section)
            assert dataclasses.is_dataclass(group)
            different |= {name for name, value in fields.items() if getattr(group, name) != value}
    assert different == {"host", "port", "events_port", "replay_port", "transfer_port"}
