"""Imports run one way: kernels <- common <- kv_transfer <- prefill_node, decode_node <- cli; the router needs
no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAY_IMPORT: dict[str, set[str]] = {
    "kernels": set(),
    "common": {"kernels"},
    "kv_transfer": {"common", "kernels"},
    "prefill_node": {"common", "kv_transfer"},
    "decode_node": {"common", "kv_transfer"},
    "router": {"common"},
    "cli": {"common", "kernels", "kv_transfer", "prefill_node", "decode_node", "router"},
}
WITHOUT_TORCH = [  # the modules below common/ that plan and decide
    "common/engine/scheduler.py",
    "common/engine/batch.py",
    "common/engine/stopping.py",
    "common/kv_cache/block_pool.py",
    "common/kv_cache/events.py",
    "common/kv_cache/layout.py",
    "common/kv_cache/manager.py",
]


def imported_modules(file: Path) -> set[str]:
    """Every module that a file imports, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_run_one_way(package: str) -> None:
    forbidden = set(MAY_IMPORT) - MAY_IMPORT[package] - {package} | {"tests", "scripts", "transformers"}
    wrong = [
        f"{file.relative_to(ROOT)} imports {module}"
        for file in sorted((ROOT / package).rglob("*.py"))
        for module in sorted(imported_modules(file))
        if module.split(".")[0] in forbidden
    ]
    assert not wrong


def loads_torch(statements: str) -> str:
    """The answer of a fresh interpreter."""
    code = f"{statements}\nimport sys\nprint('torch' in sys.modules)"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def test_router_and_cli_load_no_torch() -> None:
    commands = [
        "import cli.main",
        "import cli.up",
        "import cli.router",
        "import cli.generate",
        "import cli.client",
    ]
    assert loads_torch("; ".join(["import router.server", *commands])) == "False"


def test_modules_directly_in_common_load_no_torch() -> None:
    modules = [f"import common.{file.stem}" for file in sorted((ROOT / "common").glob("*.py"))]
    assert loads_torch("; ".join(modules)) == "False"


def test_scheduler_and_block_manager_load_no_torch() -> None:
    modules = [f"import {file.removesuffix('.py').replace('/', '.')}" for file in WITHOUT_TORCH]
    assert loads_torch("; ".join(modules)) == "False"


def test_the_check_sees_torch() -> None:
    assert loads_torch("import common.model.transformer") == "True"
