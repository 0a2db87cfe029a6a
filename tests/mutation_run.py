"""Runs catchers on a source with one place changed: must they not fail, the rule is not tested.

A process that has loaded the libraries, but nothing of ours, forks for every mutation: the child imports our
modules through a hook that changes the one text, runs the catcher, and says how that ended. A catch is an
assertion that fails; a crash of another kind is none.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import io
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Schedules:
    """A catcher: random schedules on one of the random models, up to the first that finds something."""

    kind: str
    num_modules: int
    pair: bool
    count: int = 60
    first: int = 0

    def __str__(self) -> str:
        where = "through the hand-over" if self.pair else "on one engine"
        return f"random schedules: {self.kind}, N = {self.num_modules}, {where}"


@dataclass(frozen=True)
class Mutation:
    """``old``, which must be there exactly once in ``file``, becomes ``new``; ``catcher`` (schedules, or the
    id of a test) must see it."""

    name: str
    file: str
    old: str
    new: str
    catcher: Schedules | str

    @property
    def module(self) -> str:
        return self.file.removesuffix(".py").replace("/", ".")

    def patched(self) -> str:
        """The changed source. Raises ValueError unless the old text is there exactly once."""
        source = (ROOT / self.file).read_text(encoding="utf-8")
        if source.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: {self.file} has {self.old!r} {source.count(self.old)} times, not once"
            )
        return source.replace(self.old, self.new)


@dataclass(frozen=True)
class Result:
    """``verdict``: "passed", "caught" (an assertion failed) or "crashed"."""

    verdict: str
    detail: str


class _Loader(importlib.machinery.SourceFileLoader):
    """Gives a module its changed source; byte code is neither read nor written."""

    source = b""

    def get_data(self, path: str | bytes) -> bytes:
        return self.source

    def path_stats(self, path: str | bytes) -> Mapping[str, float]:
        raise OSError("byte code of the unchanged source must not be used")  # nor is any written then


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the one module that is changed."""

    def __init__(self, mutation: Mutation) -> None:
        self._module = mutation.module
        self._loader = _Loader(mutation.module, str(ROOT / mutation.file))
        self._loader.source = mutation.patched().encode()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._module:
            return None
        return importlib.util.spec_from_file_location(fullname, self._loader.path, loader=self._loader)


def run_schedules_until_seen(catcher: Schedules) -> Result:
    """The seed that saw it is the first word of the detail."""
    from cli.schedules.random_models import random_weights
    from cli.schedules.run import run_schedules
    from cli.schedules.texts import Texts

    weights = random_weights(catcher.kind, catcher.num_modules)
    texts = Texts(weights.trunk)
    for seed in range(catcher.first, catcher.first + catcher.count):
        try:
            problems = run_schedules(weights, texts, (seed,), pair=catcher.pair).problems
        except AssertionError as error:  # the mutation broke what draws the schedule
            problems = [f"assertion: {error}"]
        if problems:
            return Result("caught", f"{seed}: {problems[0]}")
    return Result("passed", f"{catcher.count} schedules")


def run_test(node_id: str) -> Result:
    import pytest

    class Seen:
        assertions = others = 0

        def pytest_exception_interact(self, call: "pytest.CallInfo[object]") -> None:
            kinds = (AssertionError, pytest.fail.Exception)
            if call.excinfo is not None and call.excinfo.errisinstance(kinds):
                self.assertions += 1
            else:
                self.others += 1

    seen, output = Seen(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        code = pytest.main([node_id, "-x", "-p", "no:cacheprovider"], plugins=[seen])
    last = output.getvalue().strip().splitlines()[-1]
    if code == 0:
        return Result("passed", last)
    return Result("caught" if seen.assertions and not seen.others else "crashed", last)


def run_in_child(mutation: Mutation | None, catchers: Sequence[Schedules | str]) -> Result:
    """One catcher after the other, up to the first that does not pass, in a child of this process.

    ``mutation`` None: the source as it is.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if mutation is not None:
                sys.meta_path.insert(0, _Finder(mutation))
            result = _run_all(catchers)
        except BaseException:
            result = Result("crashed", traceback.format_exc().strip()[-600:])
        with os.fdopen(writing, "w") as pipe:
            json.dump([result.verdict, result.detail], pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return Result(*json.loads(text)) if text else Result("crashed", "the process ended without a word")


def _run_all(catchers: Sequence[Schedules | str]) -> Result:
    for catcher in catchers:
        result = run_test(catcher) if isinstance(catcher, str) else run_schedules_until_seen(catcher)
        if result.verdict != "passed":
            return result
    return Result("passed", f"{len(catchers)} of {len(catchers)}")


def load_libraries() -> None:
    """Everything slow that children need; one thread, since threads do not survive a fork."""
    import msgspec  # noqa: F401
    import pytest  # noqa: F401
    import safetensors  # noqa: F401
    import tokenizers  # noqa: F401
    import torch

    torch.set_num_threads(1)
    ours = ("common", "cli", "kernels", "kv_transfer", "router", "prefill_node", "decode_node")
    loaded = [name for name in sys.modules if name.split(".")[0] in ours]
    assert not loaded, f"already imported, a mutation would not reach them: {loaded}"
