"""Config dataclasses as command-line flags, in both directions."""

import argparse
import dataclasses
from collections.abc import Collection
from typing import Any, TypeVar

from common.config import add_flags, build, option_names

T = TypeVar("T")


def add_config(parser: argparse.ArgumentParser, cls: type) -> None:
    """One flag per option of ``cls``, and `--config` for a YAML file with the same names."""
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file with options; flags and BATON_* win over it"
    )
    add_flags(parser, cls)


def config_from(args: argparse.Namespace, cls: type[T]) -> T:
    """The configuration that a command line, the environment and its `--config` file describe."""
    return build(cls, vars(args), file=args.config)


def environment_names(cls: type) -> set[str]:
    """The BATON_* variables that `config_from` reads for ``cls``."""
    return {"BATON_" + name.removeprefix("--").replace("-", "_").upper() for name in option_names(cls)}


def to_flags(*groups: Any, skip: Collection[str] = ()) -> list[str]:
    """A command line that says what these option groups (flat dataclasses) say, defaults left out."""
    words: list[str] = []
    for group in groups:
        for f in dataclasses.fields(group):
            value = getattr(group, f.name)
            if f.name in skip or value == f.default:
                continue
            flag = f.name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                words += [f"--{flag}={value}"]
    return words
