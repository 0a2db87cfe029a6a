"""What several files of these tests use."""

from collections.abc import Iterator

import pytest

from tests.live import Live, serving


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A `baton up` with one prefill and one decode node, for all tests of a file."""
    with serving(tmp_path_factory.mktemp("up")) as running:
        yield running
