"""Configuration: frozen dataclasses, and the one function that fills them.

Every process composes its configuration from dataclasses whose fields carry a sentence of help.
Command-line flags, environment variables (``BATON_*``), the YAML file and Helm values are all derived
from these fields, so an option exists in exactly one place. Precedence: flag, environment, file, default.
"""

import argparse
import dataclasses
import os
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import yaml

from common.errors import ConfigError

T = TypeVar("T")


def option(
    default: Any, help: str, *, choices: Sequence[str] | None = None, minimum: float | None = None
) -> Any:
    """A dataclass field with help text; ``choices`` and ``minimum`` are checked by ``build``."""
    metadata = {"help": help, "choices": tuple(choices) if choices else None, "minimum": minimum}
    if isinstance(default, list | dict):
        raise TypeError("option defaults are immutable")
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and in which precision."""

    model: str = option("baton-tiny", "model: a shipped or prepared name, a checkpoint folder, or a hub id")
    modules: str = option("", "folder of MTP modules for the trunk; empty: the ones shipped for the model")
    dtype: str = option("bfloat16", "weights and KV precision", choices=("float32", "bfloat16"))
    served_model_name: str = option("", "name clients use in the `model` field; empty: the model's own name")


@dataclass(frozen=True)
class EngineOptions:
    """The engine: scheduler, KV cache and speculator."""

    num_speculative_tokens: int = option(
        -1, "drafts a step; -1: one for each module of the modules folder, 0: no speculation", minimum=-1
    )
    speculative_method: str = option(
        "mtp",
        "mtp: the modules folder (a single module is applied again for further drafts); ngram: look-up in "
        "the known tokens",
        choices=("mtp", "ngram"),
    )
    disable_lookahead_block_hashes: bool = option(
        False, "plain block hashes, as other engines have them; every hit then loses its last block"
    )
    block_size: int = option(16, "tokens in a KV block", minimum=1)
    kv_cache_mib: int = option(512, "memory for the KV blocks of all groups, MiB", minimum=1)
    num_blocks: int = option(0, "KV blocks of each group; 0: what kv_cache_mib holds", minimum=0)
    max_model_len: int = option(0, "longest prompt plus output, tokens; 0: the model's own limit", minimum=0)
    max_num_seqs: int = option(64, "requests that run at once", minimum=1)
    max_num_batched_tokens: int = option(512, "token budget of one step", minimum=1)
    long_prefill_token_threshold: int = option(
        0, "longest chunk of one prompt, tokens; 0: the budget", minimum=0
    )
    prefix_caching: bool = option(True, "reuse KV blocks of equal prefixes")
    hash_algorithm: str = option(
        "blake2b",
        "block hashes; the _cbor ones are the bytes that other engines hash",
        choices=("blake2b", "sha256_cbor", "xxhash_cbor"),
    )
    hash_seed: str = option("", "seed string of the first block's parent hash; equal on all nodes")
    tell_salted_tokens: bool = option(
        False, "KV events of requests with a cache_salt tell token ids and salt too, not only hashes"
    )
    threads: int = option(0, "CPU threads for tensor work; 0: all cores", minimum=0)


@dataclass(frozen=True)
class NodeOptions:
    """What every node process has."""

    node_id: str = option("", "name of this node; empty: role and a random suffix")
    host: str = option("127.0.0.1", "address to listen on and to announce (a name peers can resolve)")
    port: int = option(0, "HTTP port for /health, /ready and /metrics; 0: a free one", minimum=0)
    events_port: int = option(0, "ZMQ port of the KV events (PUB); 0: a free one", minimum=0)
    replay_port: int = option(0, "ZMQ port of the KV event replay (ROUTER); 0: a free one", minimum=0)
    transfer_port: int = option(0, "port of the KV transfer's control connection; 0: a free one", minimum=0)
    router: str = option("tcp://127.0.0.1:8001", "control addresses of the routers, comma-separated")
    drain_timeout_s: float = option(20.0, "longest wait for running requests at shutdown, seconds", minimum=0)


@dataclass(frozen=True)
class LogOptions:
    """Logging of every process."""

    log_level: str = option(
        "info", "least severe level written", choices=("debug", "info", "warning", "error")
    )
    log_format: str = option("text", "one line a record: plain text or JSON", choices=("text", "json"))


def _scalar_fields(cls: type) -> list[tuple[tuple[str, ...], dataclasses.Field[Any], Any]]:
    """(path, field, type) of every scalar option of a nested config dataclass."""
    hints = get_type_hints(cls)
    found: list[tuple[tuple[str, ...], dataclasses.Field[Any], Any]] = []
    for f in dataclasses.fields(cls):
        kind = hints[f.name]
        if dataclasses.is_dataclass(kind):
            found += [((f.name, *path), g, t) for path, g, t in _scalar_fields(typing.cast(type, kind))]
        else:
            found.append(((f.name,), f, kind))
    return found


def _parse(kind: Any, text: str) -> Any:
    if get_origin(kind) in (typing.Union, types.UnionType):
        kind = next(k for k in get_args(kind) if k is not type(None))
    if kind is bool:
        lowered = text.lower()
        if lowered in ("1", "true", "yes", "on"):
            return True
        if lowered in ("0", "false", "no", "off"):
            return False
        raise ValueError("expected true or false")
    return kind(text)


def option_names(cls: type) -> list[str]:
    """Flag names of a config dataclass, in order: what the pinned option list compares."""
    names = ["--" + f.name.replace("_", "-") for _, f, _ in _scalar_fields(cls)]
    repeated = {n for n in names if names.count(n) > 1}
    if repeated:
        raise TypeError(f"options defined twice: {sorted(repeated)}")
    return names


def add_flags(parser: argparse.ArgumentParser, cls: type) -> None:
    """Adds one flag per option; the default shown is the dataclass's, a flag not given stays unset."""
    option_names(cls)
    for _, f, kind in _scalar_fields(cls):
        flag = "--" + f.name.replace("_", "-")
        help_text = f"{f.metadata.get('help', '')} (default: {f.default!r})".replace("%", "%%")
        if kind is bool:
            parser.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=help_text
            )
        else:
            parser.add_argument(
                flag, default=argparse.SUPPRESS, help=help_text, metavar=f.metadata.get("metavar") or "VALUE"
            )


def build(
    cls: type[T],
    flags: Mapping[str, Any] | None = None,
    *,
    file: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> T:
    """Fills ``cls`` from flags, environment, file and defaults.

    ``flags`` maps field names to values (strings or typed). Raises ConfigError naming the source, the
    key, the value and what was expected; an unknown key in the file is an error.
    """
    from_file = _read_file(cls, file) if file else {}
    environ = os.environ if environ is None else environ
    flags = flags or {}

    def fill(dataclass_type: type, path: tuple[str, ...]) -> Any:
        hints = get_type_hints(dataclass_type)
        values: dict[str, Any] = {}
        for f in dataclasses.fields(dataclass_type):
            kind = hints[f.name]
            if dataclasses.is_dataclass(kind):
                values[f.name] = fill(typing.cast(type, kind), (*path, f.name))
                continue
            variable = "BATON_" + f.name.upper()
            if f.name in flags:
                values[f.name] = _checked(f, kind, flags[f.name], "--" + f.name.replace("_", "-"))
            elif variable in environ:
                values[f.name] = _checked(f, kind, environ[variable], variable)
            elif (*path, f.name) in from_file:
                where = f"{file}: {'.'.join((*path, f.name))}"
                values[f.name] = _checked(f, kind, from_file[(*path, f.name)], where)
        return dataclass_type(**values)

    return typing.cast(T, fill(cls, ()))


def _checked(f: dataclasses.Field[Any], kind: Any, value: Any, where: str) -> Any:
    if isinstance(value, str) or kind is float:
        try:
            value = _parse(kind, str(value))
        except ValueError as error:
            expected = getattr(kind, "__name__", str(kind))
            raise ConfigError(f"{where}: {value!r} is not a valid {expected} ({error})") from None
    if isinstance(kind, type) and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise ConfigError(f"{where}: {value!r} is not a valid {kind.__name__}")
    choices = f.metadata.get("choices")
    if choices and value not in choices:
        raise ConfigError(f"{where}: {value!r} is not one of {', '.join(choices)}")
    minimum = f.metadata.get("minimum")
    if minimum is not None and value < minimum:
        raise ConfigError(f"{where}: {value} is below the minimum of {minimum}")
    return value


def _read_file(cls: type, file: str | os.PathLike[str]) -> dict[tuple[str, ...], Any]:
    try:
        document = yaml.safe_load(Path(file).read_text(encoding="utf-8")) or {}
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"config file {file}: {error}") from None
    known = {path for path, _, _ in _scalar_fields(cls)}
    sections = {path[:i] for path in known for i in range(1, len(path))}
    values: dict[tuple[str, ...], Any] = {}

    def walk(node: Any, path: tuple[str, ...]) -> None:
        if path in known:
            values[path] = node
        elif path == () or path in sections:
            if not isinstance(node, dict):
                raise ConfigError(f"config file {file}: {'.'.join(path) or 'the document'} must be a mapping")
            for key, child in node.items():
                walk(child, (*path, str(key)))
        else:
            raise ConfigError(
                f"config file {file}: unknown key {'.'.join(path)!r}; `--help` lists the options"
            )

    walk(document, ())
    return values
