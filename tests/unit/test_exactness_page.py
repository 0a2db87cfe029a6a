"""docs/exactness.md: its picture is what the engine does."""

from functools import cache

from scripts.draw_exactness import OUT, Panel, drawing, story

FIX = "run `python -m scripts.draw_exactness`"


@cache
def panels() -> tuple[Panel, ...]:
    return tuple(story())


def test_the_committed_picture_is_the_generated_one() -> None:
    assert drawing(panels()) == OUT.read_text(encoding="utf-8"), FIX


def test_what_is_final_stays_as_it_was() -> None:
    """Register late: below `final` all slots are exact, and no later picture has them from another token."""
    of_one_request = panels()[:4]
    for i, earlier in enumerate(of_one_request):
        below = [(m, p) for m in range(4) for p in range(earlier.final)]
        assert {earlier.state(slot) for slot in below} == {"exact"}
        for later in of_one_request[i + 1 :]:
            assert all(later.read[slot] == earlier.read[slot] for slot in below)
            assert not later.fresh & set(below)


def test_stale_slots_are_rewritten_in_the_same_step() -> None:
    verified, after = panels()[2:4]
    stale = {slot for slot in verified.read if verified.state(slot) == "stale"}
    assert stale == {(2, 10), (3, 9), (3, 10)}
    assert stale <= after.fresh
    assert "stale" not in {after.state(slot) for slot in after.read}


def test_at_the_cut_one_slot_waits() -> None:
    at_cut = panels()[4]
    slots = [(m, p) for m in range(4) for p in range(at_cut.trunk)]
    assert [slot for slot in slots if at_cut.state(slot) == "unwritten"] == [(3, at_cut.trunk - 1)]
    assert {at_cut.state(slot) for slot in at_cut.read} == {"exact"}
