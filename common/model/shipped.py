"""Model files that come with Baton, pinned by digest.

`shipped/model_manifest.json` lists every file with its size and sha256. A file that was changed, lost or
added without the manifest is found by `verify_shipped`; `write_manifest` is what a training script calls
when it replaces a model. No torch.
"""

import json
from pathlib import Path

from common.errors import ModelLoadError
from common.model.checkpoint_files import file_digest
from common.model.model_config import read_json

SHIPPED = Path(__file__).parent / "shipped"
MANIFEST = "model_manifest.json"


def shipped_files(folder: Path = SHIPPED) -> dict[str, Path]:
    """Every model file below `folder` by its relative name, manifest, text and hidden files left out."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    return {name: path for name, path in names.items() if _is_pinned(name)}


def write_manifest(folder: Path = SHIPPED) -> None:
    """Pins the files that are there now."""
    files = {
        name: {"bytes": path.stat().st_size, "sha256": file_digest(path)}
        for name, path in shipped_files(folder).items()
    }
    (folder / MANIFEST).write_text(json.dumps({"files": files}, indent=2) + "\n")


def verify_shipped(folder: Path = SHIPPED, *, only: str | None = None) -> None:
    """ModelLoadError naming every file that is missing, changed or not in the manifest; `only` = one model's
    folder.
    """
    pinned: dict[str, dict[str, object]] = read_json(folder / MANIFEST).get("files", {})
    present = shipped_files(folder)
    if only is not None:
        pinned = {name: entry for name, entry in pinned.items() if name.startswith(f"{only}/")}
        present = {name: path for name, path in present.items() if name.startswith(f"{only}/")}
    problems = [f"{name} is missing" for name in pinned.keys() - present.keys()]
    problems += [f"{name} is not in the manifest" for name in present.keys() - pinned.keys()]
    for name in pinned.keys() & present.keys():
        if file_digest(present[name]) != pinned[name]["sha256"]:
            problems.append(f"{name} is not the pinned file")
    if problems:
        raise ModelLoadError(
            f"shipped model files in {folder}: {'; '.join(sorted(problems))}; install Baton again"
        )


def _is_pinned(name: str) -> bool:
    parts = name.split("/")
    return name != MANIFEST and len(parts) > 1 and not any(part.startswith((".", "__")) for part in parts)
