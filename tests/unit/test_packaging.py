"""The wheel carries what an installed Baton needs: every module, py.typed, and the shipped model files."""

import configparser
import hashlib
import json
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from common.version import __version__

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = "common/model/shipped"
MIB = 1 << 20


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of a copy of the sources: building in place would leave a `build` folder behind."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source / name)
    for package in project()["tool"]["setuptools"]["packages"]:
        if "." not in package:
            shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    built = subprocess.run(
        [*command, "--wheel-dir", str(folder), str(source)], capture_output=True, text=True, timeout=120
    )
    assert built.returncode == 0, built.stderr
    (file,) = folder.glob("*.whl")
    return zipfile.ZipFile(file)


def source_modules() -> set[str]:
    top = {name.split(".")[0] for name in project()["tool"]["setuptools"]["packages"]}
    return {str(file.relative_to(ROOT)) for package in top for file in (ROOT / package).rglob("*.py")}


def test_every_module_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    assert source_modules() - set(wheel.namelist()) == set()


def test_wheel_is_typed_and_carries_the_packages_only(wheel: zipfile.ZipFile) -> None:
    names = wheel.namelist()
    assert "common/py.typed" in names
    info = f"baton_serve-{__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {
        info,
        "cli",
        "common",
        "decode_node",
        "kernels",
        "kv_transfer",
        "prefill_node",
        "router",
    }


def test_console_script_is_the_front_door(wheel: zipfile.ZipFile) -> None:
    entry_points = configparser.ConfigParser()
    entry_points.read_string(wheel.read(f"baton_serve-{__version__}.dist-info/entry_points.txt").decode())
    assert dict(entry_points["console_scripts"]) == {"baton": "cli.main:main"}


def pinned_files() -> dict[str, dict[str, Any]]:
    """Name -> bytes and sha256 of every shipped model file, from the manifest in the sources."""
    manifest = ROOT / SHIPPED / "model_manifest.json"
    if not manifest.exists():
        pytest.skip(f"no {manifest.relative_to(ROOT)}: these sources ship no model yet")
    files: dict[str, dict[str, Any]] = json.loads(manifest.read_text(encoding="utf-8"))["files"]
    return files


def test_shipped_models_are_in_the_wheel_as_pinned(wheel: zipfile.ZipFile) -> None:
    pinned = pinned_files()
    assert pinned
    carried = {name for name in wheel.namelist() if name.startswith(f"{SHIPPED}/") and name.count("/") > 3}
    assert carried == {f"{SHIPPED}/{name}" for name in pinned}
    for name, entry in pinned.items():
        content = wheel.read(f"{SHIPPED}/{name}")
        assert len(content) == entry["bytes"], name
        assert hashlib.sha256(content).hexdigest() == entry["sha256"], name


def test_shipped_models_keep_their_size_budget() -> None:
    """baton-tiny with its modules 32 MiB, a sidecar 40 MiB."""
    sizes: dict[str, int] = {}
    for name, entry in pinned_files().items():
        model = name.split("/")[0]
        sizes[model] = sizes.get(model, 0) + entry["bytes"]
    assert "baton-tiny" in {name.removesuffix("-mtp") for name in sizes}
    tiny = sum(size for model, size in sizes.items() if model.startswith("baton-tiny"))
    others = {model: size for model, size in sizes.items() if not model.startswith("baton-tiny")}
    assert tiny <= 32 * MIB
    assert {model: size for model, size in others.items() if size > 40 * MIB} == {}
