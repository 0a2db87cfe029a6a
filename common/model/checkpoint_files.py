"""The safetensors files of a model folder, read as bytes: which tensors, where, and one digest over all of
them.

The digest is what an MTP sidecar and two nodes compare: it covers the configuration that changes the
arithmetic and every tensor's name, dtype, shape and bytes, in name order, so it does not depend on how
files are split. No torch.
"""

import contextlib
import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common.errors import ModelLoadError
from common.model.model_config import ModelConfig, RopeConfig, read_json

DIGEST_FILE = ".baton-digest.json"
_ARITHMETIC = (
    *("family", "vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
    *("intermediate_size", "rms_norm_eps", "qkv_bias", "o_bias", "mlp_bias", "qk_norm"),
    *("tie_word_embeddings", "layer_windows"),
)
_READ_BYTES = 1 << 22
_KEEP_FROM_BYTES = 64 << 20  # smaller ones hash in milliseconds: their folders stay as they are


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies: `begin`..`end` are byte offsets in `path`."""

    path: Path
    dtype: str  # safetensors' name: F32, BF16, ...
    shape: tuple[int, ...]
    begin: int
    end: int


def is_ignorable(name: str, tied: bool) -> bool:
    """Tensors that old exporters wrote and nobody reads: rotary buffers, and the head of a tied model."""
    return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder by name, with or without an index file; ModelLoadError if there is none."""
    tensors: dict[str, StoredTensor] = {}
    for path, expected in _files(folder).items():
        header = _header(path)
        missing = sorted(expected - header.keys())
        if missing:
            raise ModelLoadError(f"{path} lacks tensors that the index places there: {_some(missing)}")
        again = sorted(tensors.keys() & header.keys())
        if again:
            raise ModelLoadError(f"{path} repeats tensors of another file: {_some(again)}")
        tensors.update(header)
    return tensors


def trunk_digest(folder: str | Path) -> str:
    """sha256 (hex) of a checkpoint, as the module docstring says; kept in the folder of a large one."""
    folder = Path(folder)
    config = ModelConfig.from_folder(folder)
    tensors = stored_tensors(folder)
    described = {"config": _arithmetic(config), "files": _stamps(tensors)}
    kept = _kept_digest(folder, described)
    if kept is not None:
        return kept
    digest = hashlib.sha256(json.dumps(_arithmetic(config), sort_keys=True).encode())
    for name in sorted(tensors):
        if not is_ignorable(name, config.tie_word_embeddings):
            _digest_tensor(digest, name, tensors[name])
    value = digest.hexdigest()
    if sum(tensor.end - tensor.begin for tensor in tensors.values()) < _KEEP_FROM_BYTES:
        return value
    with contextlib.suppress(OSError):  # a read-only folder just hashes again next time
        temporary = folder / f"{DIGEST_FILE}.{os.getpid()}"
        temporary.write_text(json.dumps({"trunk_digest": value, "of": described}, indent=1))
        temporary.replace(folder / DIGEST_FILE)
    return value


def file_digest(path: Path) -> str:
    """sha256 (hex) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(folder: Path) -> dict[Path, set[str]]:
    """Files of the folder, each with the names that the index (if any) expects in it."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        single = folder / "model.safetensors"
        if not single.is_file():
            raise ModelLoadError(f"{folder} has neither model.safetensors nor model.safetensors.index.json")
        return {single: set()}
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index} has no weight_map")
    files: dict[Path, set[str]] = {}
    for name, file in weight_map.items():
        if Path(file).name != file:
            raise ModelLoadError(f"{index} places {name} in {file!r}, expected a plain file name")
        files.setdefault(folder / file, set()).add(name)
    absent = sorted(path.name for path in files if not path.is_file())
    if absent:
        raise ModelLoadError(f"{index} names files that do not exist: {_some(absent)}")
    return files


def _header(path: Path) -> dict[str, StoredTensor]:
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= size - 8:
                raise ValueError(f"header of {length} bytes in a file of {size}")
            header: dict[str, Any] = json.loads(file.read(length))
        header.pop("__metadata__", None)
        start = 8 + length
        tensors = {
            name: StoredTensor(
                path,
                entry["dtype"],
                tuple(entry["shape"]),
                *(start + offset for offset in entry["data_offsets"]),
            )
            for name, entry in header.items()
        }
    except (ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(f"{path} is not a safetensors file: {error}") from error
    if any(tensor.end > size for tensor in tensors.values()):
        raise ModelLoadError(f"{path} is truncated: {size} bytes, its header names data beyond that")
    return tensors


def _arithmetic(config: ModelConfig) -> dict[str, Any]:
    """What changes a logit: listed by name, rotary fields only where they differ from their default and
    recurrent layers only where there are some, so that a field added to the configuration later leaves the
    digests of today's models as they are.
    """
    rope, plain = asdict(config.rope), asdict(RopeConfig())
    out = {name: getattr(config, name) for name in _ARITHMETIC}
    out["rope"] = {name: value for name, value in rope.items() if value != plain[name]}
    if config.recurrent is not None:
        out["recurrent"] = {"layer_types": config.layer_types, **asdict(config.recurrent)}
    return out


def _stamps(tensors: dict[str, StoredTensor]) -> dict[str, list[int]]:
    stamps = {path: path.stat() for path in {tensor.path for tensor in tensors.values()}}
    return {path.name: [stat.st_size, stat.st_mtime_ns] for path, stat in sorted(stamps.items())}


def _kept_digest(folder: Path, described: dict[str, Any]) -> str | None:
    try:
        kept = json.loads((folder / DIGEST_FILE).read_text())
        same = kept["of"] == json.loads(json.dumps(described))
        return str(kept["trunk_digest"]) if same else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _digest_tensor(digest: "hashlib._Hash", name: str, tensor: StoredTensor) -> None:
    digest.update(f"\n{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
    with tensor.path.open("rb") as file:
        file.seek(tensor.begin)
        left = tensor.end - tensor.begin
        while left:
            chunk = file.read(min(left, _READ_BYTES))
            digest.update(chunk)
            left -= len(chunk)


def _some(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
