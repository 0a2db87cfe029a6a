"""The pages that explain a design name files and tests; those exist."""

import re
from functools import cache

import pytest

from tests.builders import REPOSITORY

# where short names are looked for
FOLDERS = ("", "docs", "common/engine", "kv_transfer", "tests/unit", "tests/property")


@cache
def names_of_tests() -> frozenset[str]:
    sources = (path.read_text(encoding="utf-8") for path in (REPOSITORY / "tests").rglob("*.py"))
    return frozenset(name for text in sources for name in re.findall(r"^def (test_\w+)", text, re.M))


@pytest.mark.parametrize("name", ["exactness.md", "kv-transfer.md"])
def test_a_page_names_files_and_tests_that_exist(name: str) -> None:
    page = (REPOSITORY / "docs" / name).read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+)`", page))
    assert len(named) > 20
    assert named <= names_of_tests(), named - names_of_tests()
    for file in set(re.findall(r"[\w/-]+\.(?:py|svg|md)", page)):
        assert any((REPOSITORY / folder / file).exists() for folder in FOLDERS), f"there is no {file}"
