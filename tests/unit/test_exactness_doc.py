"""Every test that docs/exactness.md names is there."""

import re

from tests.builders import REPOSITORY


def test_the_tests_that_the_page_names_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", (REPOSITORY / "docs" / "exactness.md").read_text()))
    there: set[str] = set()
    for path in (REPOSITORY / "tests").rglob("test_*.py"):
        there |= {path.stem, *re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)}
    assert len(named) > 20
    assert not named - there
