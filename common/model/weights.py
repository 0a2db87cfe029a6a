"""Checkpoint folders -> parameters and back, strictly: a name that is missing or left over is an error that
names it.

Tensors are read one at a time into views of the (fused) parameters, so that loading needs the model plus
one tensor. Files are read and written in the usual Hugging Face layout; only this module and
`checkpoint_tensors` know it.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from common.errors import ModelLoadError
from common.model.checkpoint_files import StoredTensor, is_ignorable, stored_tensors, trunk_digest
from common.model.model_config import ModelConfig
from common.model.mtp import MtpModules
from common.model.mtp_config import MtpConfig
from common.model.transformer import Transformer

__all__ = ["load_mtp", "load_transformer", "save_checkpoint", "save_mtp", "to_dtype", "trunk_digest"]

Dtype = Literal["float32", "bfloat16"] | torch.dtype
Progress = Callable[[int, int], None]  # bytes done, bytes in all
_FLOATS = ("F32", "F16", "BF16")


def to_dtype(name: str | torch.dtype) -> torch.dtype:
    """The names float32 and bfloat16 (or the torch dtype) -> torch dtype; ModelLoadError for others."""
    dtype = (
        {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(name, name)
        if isinstance(name, str)
        else name
    )
    if dtype not in (torch.float32, torch.bfloat16):
        raise ModelLoadError(f"dtype {name} is not supported: use float32 or bfloat16")
    assert isinstance(dtype, torch.dtype)
    return dtype


def load_transformer(folder: str | Path, dtype: Dtype, progress: Progress | None = None) -> Transformer:
    """The model of a checkpoint folder, in eval mode, without gradients.

    ModelLoadError names missing, left-over or wrongly shaped tensors.
    """
    folder = Path(folder)
    config = ModelConfig.from_folder(folder)
    model = Transformer(config, to_dtype(dtype))
    stored = {
        name: tensor
        for name, tensor in stored_tensors(folder).items()
        if not is_ignorable(name, config.tie_word_embeddings)
    }
    _fill(folder, model.checkpoint_tensors(), stored, progress)
    return model.eval().requires_grad_(False)


def load_mtp(
    folder: str | Path, trunk: Transformer, dtype: Dtype, trunk_digest: str, progress: Progress | None = None
) -> MtpModules:
    """The modules of a folder for `trunk`, whose checkpoint has the digest `trunk_digest`; others are
    refused.
    """
    folder = Path(folder)
    config = MtpConfig.from_folder(folder)
    if config.trunk_digest != trunk_digest:
        raise ModelLoadError(
            f"MTP modules in {folder} belong to the trunk {config.trunk_digest}, "
            f"this trunk is {trunk_digest}: "
            "use the modules made for it, or serve without modules"
        )
    stored = stored_tensors(folder)
    draft_vocab: Tensor | None = None
    if config.draft_vocab_size is not None:
        entry = stored.pop("draft_vocab", None)
        if entry is None:
            raise ModelLoadError(
                f"{folder}: tensor draft_vocab is missing, config.json says draft_vocab_size"
            )
        with safe_open(entry.path, framework="pt") as file:
            draft_vocab = file.get_tensor("draft_vocab").to(torch.int64)
    modules = MtpModules(config, trunk, draft_vocab, to_dtype(dtype))
    _fill(folder, modules.checkpoint_tensors(), stored, progress)
    return modules.eval().requires_grad_(False)


def save_checkpoint(
    folder: str | Path, model: Transformer, dtype: Dtype = "bfloat16", metadata: dict[str, str] | None = None
) -> None:
    """Writes config.json and model.safetensors; tokenizer files are the caller's."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    torch_dtype = to_dtype(dtype)
    config = {**model.config.to_json(), "torch_dtype": str(torch_dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _save(folder / "model.safetensors", model.checkpoint_tensors(), torch_dtype, metadata)


def save_mtp(folder: str | Path, modules: MtpModules, dtype: Dtype = "bfloat16") -> None:
    """Writes config.json and model.safetensors of a modules folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(modules.config.to_json())
    extra = {} if modules.draft_vocab is None else {"draft_vocab": modules.draft_vocab.to("cpu", torch.int32)}
    _save(folder / "model.safetensors", modules.checkpoint_tensors(), to_dtype(dtype), None, extra)


def _save(
    path: Path,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    metadata: dict[str, str] | None,
    extra: dict[str, Tensor] | None = None,
) -> None:
    """Written beside and renamed, so that a reader never sees half a file."""
    out = {name: tensor.detach().to("cpu", dtype).contiguous().clone() for name, tensor in tensors}
    temporary = path.with_suffix(".tmp")
    save_file({**out, **(extra or {})}, temporary, {"format": "pt", **(metadata or {})})
    temporary.chmod(0o644)
    temporary.replace(path)


@torch.no_grad()
def _fill(
    folder: Path,
    targets: Iterable[tuple[str, Tensor]],
    stored: dict[str, StoredTensor],
    progress: Progress | None,
) -> None:
    """Copies every stored tensor into its target view; names must agree exactly."""
    wanted = dict(targets)
    _check_names(folder, set(wanted), set(stored))
    total = sum(tensor.end - tensor.begin for tensor in stored.values())
    done = 0
    by_file: dict[Path, list[str]] = {}
    for name, tensor in stored.items():
        _check_tensor(name, tensor, tuple(wanted[name].shape))
        by_file.setdefault(tensor.path, []).append(name)
    for path, names in by_file.items():
        with safe_open(path, framework="pt") as file:
            for name in names:
                wanted[name].copy_(file.get_tensor(name))
                done += stored[name].end - stored[name].begin
                if progress is not None:
                    progress(done, total)


def _check_names(folder: Path, wanted: set[str], stored: set[str]) -> None:
    missing, left_over = sorted(wanted - stored), sorted(stored - wanted)
    if not missing and not left_over:
        return
    parts = []
    if missing:
        parts.append(f"missing {_list(missing)}")
    if left_over:
        parts.append(f"left over {_list(left_over)}")
    raise ModelLoadError(f"{folder}: tensors do not match config.json: {'; '.join(parts)}")


def _list(names: list[str], limit: int = 12) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _check_tensor(name: str, stored: StoredTensor, shape: tuple[int, ...]) -> None:
    if stored.shape != shape:
        raise ModelLoadError(
            f"{stored.path}: {name} has shape {list(stored.shape)}, config.json wants {list(shape)}"
        )
    if stored.dtype not in _FLOATS:
        raise ModelLoadError(
            f"{stored.path}: {name} is {stored.dtype}; only {', '.join(_FLOATS)} are supported"
        )
