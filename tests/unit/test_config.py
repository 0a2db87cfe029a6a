"""`common.config`: precedence of flag, environment, file and default; every wrong value is named."""

import argparse
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from common.config import EngineOptions, add_flags, build, option, option_names
from common.errors import ConfigError
from decode_node.config import DecodeConfig


@dataclass(frozen=True)
class Oven:
    degrees: int = option(180, "temperature", minimum=20)
    mode: str = option("air", "heat", choices=("air", "grill"))
    light: bool = option(True, "lamp")
    hours: float = option(1.0, "how long", minimum=0)


@dataclass(frozen=True)
class Kitchen:
    oven: Oven = field(default_factory=Oven)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kitchen.yaml"
    path.write_text("oven:\n  degrees: 200\n  mode: grill\n  light: false\n")
    return path


def test_defaults_without_any_source() -> None:
    assert build(Kitchen, environ={}) == Kitchen()


def test_flag_wins_over_environment_over_file_over_default(file: Path) -> None:
    environ = {"BATON_DEGREES": "210", "BATON_MODE": "air"}
    oven = build(Kitchen, {"degrees": "220"}, file=file, environ=environ).oven
    assert oven == Oven(degrees=220, mode="air", light=False, hours=1.0)


def test_flags_are_parsed_and_unset_ones_stay_unset() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, Kitchen)
    assert vars(parser.parse_args([])) == {}
    args = parser.parse_args(["--degrees", "30", "--no-light", "--hours=0.5"])
    assert build(Kitchen, vars(args), environ={}).oven == Oven(degrees=30, light=False, hours=0.5)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"degrees": "warm"}, "--degrees: 'warm' is not a valid int"),
        ({"degrees": "5"}, "--degrees: 5 is below the minimum of 20"),
        ({"mode": "steam"}, "--mode: 'steam' is not one of air, grill"),
        ({"light": "maybe"}, "--light: 'maybe' is not a valid bool"),
        ({"hours": "-1"}, "--hours: -1.0 is below the minimum of 0"),
    ],
)
def test_wrong_flag_is_named_with_its_value(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(Kitchen, flags, environ={})
    assert message in caught.value.message


def test_wrong_variable_is_named() -> None:
    with pytest.raises(ConfigError, match="BATON_DEGREES: 'hot' is not a valid int"):
        build(Kitchen, environ={"BATON_DEGREES": "hot"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("oven:\n  degres: 200\n", "unknown key 'oven.degres'"),
        ("stove:\n  degrees: 200\n", "unknown key 'stove'"),
        ("oven: 200\n", "oven must be a mapping"),
        ("- oven\n", "the document must be a mapping"),
        ("oven:\n  degrees: true\n", "True is not a valid int"),
        ("oven:\n  degrees: [1]\n", "[1] is not a valid int"),
        ("oven:\n  light: 1\n", "1 is not a valid bool"),
        ("oven: {degrees: 200\n", "config file"),
    ],
)
def test_wrong_file_is_named_with_key_and_value(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "kitchen.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        build(Kitchen, file=path, environ={})
    assert message in caught.value.message
    assert str(path) in caught.value.message


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        build(Kitchen, file=tmp_path / "nowhere.yaml", environ={})


def test_empty_file_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert build(Kitchen, file=tmp_path / "empty.yaml", environ={}) == Kitchen()


def test_same_option_in_two_groups_is_refused() -> None:
    @dataclass(frozen=True)
    class Two:
        a: Oven = field(default_factory=Oven)
        b: Oven = field(default_factory=Oven)

    with pytest.raises(TypeError, match="--degrees"):
        option_names(Two)


def test_a_real_config_is_built_from_all_sources(tmp_path: Path) -> None:
    path = tmp_path / "decode.yaml"
    path.write_text("engine:\n  block_size: 32\n  max_num_seqs: 8\nnode:\n  node_id: from-file\n")
    config = build(DecodeConfig, {"max_num_seqs": "4"}, file=path, environ={"BATON_NODE_ID": "d1"})
    assert (config.engine.block_size, config.engine.max_num_seqs, config.node.node_id) == (32, 4, "d1")
    assert config.engine.max_num_batched_tokens == EngineOptions().max_num_batched_tokens
