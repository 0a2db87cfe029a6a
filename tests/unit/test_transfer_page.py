"""docs/kv-transfer.md: its picture is what two nodes say, and its tables have what the code has."""

import re
from dataclasses import fields

import pytest

from kv_transfer import ucx_environment
from kv_transfer.config import TransferConfig
from kv_transfer.protocol import Message, ReceiverState, SenderState
from scripts.draw_transfer import OUT, drawing
from tests.builders import REPOSITORY
from tests.virtual.recording import Recording
from tests.virtual.stories import recordings

PAGE = (REPOSITORY / "docs" / "kv-transfer.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def recorded() -> list[Recording]:
    return recordings()


def test_the_committed_picture_is_the_generated_one(recorded: list[Recording]) -> None:
    assert drawing(*recorded) == OUT.read_text(encoding="utf-8"), "run `python -m scripts.draw_transfer`"


def test_the_picture_shows_what_the_page_says(recorded: list[Recording]) -> None:
    def states(recording: Recording, side: str) -> list[str]:
        return [m.text for m in recording.marks if (m.side, m.kind) == (side, "state")]

    good, death, abort = recorded
    assert states(good, "D") == ["CONNECTING", "ASKING", "RECEIVING", "CLOSING", "COMMITTED"]
    assert states(good, "P") == ["OFFERED", "SENDING", "FINISHED", "DRAINING", "RELEASED"]
    assert all(arrow.arrived is not None for arrow in good.arrows)
    # nothing of P's comes after its death; D finds it by silence
    (died,) = [m.row for m in death.marks if m.kind == "fault"]
    assert [a.label for a in death.arrows if a.arrived is None] == ["bytes of chunk 2", "Credit 5"]
    assert max(a.arrived for a in death.arrows if a.arrived is not None) < died
    assert states(death, "D")[-2:] == ["FENCING", "FAILED"]
    assert death.times[-1] - death.times[died] == pytest.approx(10.0, abs=1.0)
    # credits 2 and 3 were unused: two empty messages, and only then is the fetch over
    empty = [a for a in abort.arrows if a.label.startswith("empty")]
    failed = next(m.row for m in abort.marks if m.text == "FAILED")
    assert len(empty) == 2
    assert all(a.arrived is not None and a.arrived <= failed for a in empty)
    assert states(abort, "P")[-2:] == ["DRAINING", "RELEASED"]


def test_every_message_and_state_is_explained() -> None:
    messages = {kind.__name__ for kind in Message.__subclasses__()}
    assert messages == set(re.findall(r"`([A-Z]\w+)`", PAGE)) & messages
    for state in (*SenderState, *ReceiverState):
        assert re.search(rf"\b{state.name}\b", PAGE), state


def test_every_option_stands_there_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `--([\w-]+)` \| (\S+) \|", PAGE, re.M))
    assert rows == {f.name.replace("_", "-"): str(f.default) for f in fields(TransferConfig)}


def test_every_ucx_setting_stands_there_with_its_value() -> None:
    rows = dict(re.findall(r"^\| `(UCX_\w+)` \| (\S+) \|", PAGE, re.M))
    assert rows == ucx_environment.DEFAULTS


def test_every_named_case_stands_there() -> None:
    cases = (REPOSITORY / "tests" / "unit" / "test_transfer_cases.py").read_text(encoding="utf-8")
    defined = set(re.findall(r"^def (test_\w+)", cases, re.M))
    assert defined <= set(re.findall(r"`(test_\w+)`", PAGE)), defined
