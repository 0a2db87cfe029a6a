"""Options, markers, fixtures that every test may use, and a check that no test leaves threads behind."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

LEAK_GRACE_S = 2.0  # for threads that are just ending
# Pools that live as long as the process, whoever used them first.
LASTING_THREADS = (
    "asyncio_",
    "ThreadPoolExecutor",
    "tqdm",
    "pydevd",
    "AnyIO worker",
    "ucxx",
    "rmm",
    "notifier",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wants_slow = config.getoption("--slow")
    no_device = pytest.mark.skip(reason="needs a CUDA device")
    not_slow = pytest.mark.skip(reason="slow; run with --slow")
    has_device = any("gpu" in item.keywords for item in items) and _has_cuda()
    for item in items:
        if "slow" in item.keywords and not wants_slow:
            item.add_marker(not_slow)
        if "gpu" in item.keywords and not has_device:
            item.add_marker(no_device)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of recorded conformance data beside the repository; skips where it is absent."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not (folder / "conformance").is_dir():
        pytest.skip(f"no recorded conformance data at {folder}")
    return folder


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    """Fails a test that leaves a thread running which it started."""
    before = set(threading.enumerate())
    yield
    deadline_s = time.monotonic() + LEAK_GRACE_S
    while leaked := _leaked(before):
        if time.monotonic() > deadline_s:
            pytest.fail(f"threads left running: {', '.join(sorted(t.name for t in leaked))}")
        leaked[0].join(0.05)


def _leaked(before: set[threading.Thread]) -> list[threading.Thread]:
    started = set(threading.enumerate()) - before
    return [t for t in started if t.is_alive() and not t.name.startswith(LASTING_THREADS)]
