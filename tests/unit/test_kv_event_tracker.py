"""Sequence numbers: gaps, repeats and restarts, told apart without any socket."""

from common.kv_event_tracker import SequenceTracker, Verdict


def live(tracker: SequenceTracker, seq: int, payload: bytes = b"") -> Verdict:
    verdict = tracker.judge(seq, payload)
    if verdict is Verdict.NEXT:
        tracker.applied(seq)
    return verdict


def test_in_order_then_a_gap() -> None:
    tracker = SequenceTracker()
    assert [live(tracker, seq) for seq in (0, 1, 2)] == [Verdict.NEXT] * 3
    assert live(tracker, 5) is Verdict.GAP
    assert tracker.next_seq == 3


def test_what_a_replay_brought_is_a_repeat_when_it_comes_live() -> None:
    tracker = SequenceTracker()
    live(tracker, 0)
    assert live(tracker, 3, b"3") is Verdict.GAP
    for seq in (1, 2, 3, 4):
        tracker.applied_by_replay(seq, b"%d" % seq)
    assert live(tracker, 4, b"4") is Verdict.REPEAT
    assert live(tracker, 5, b"5") is Verdict.NEXT


def test_the_same_number_with_other_bytes_is_another_process() -> None:
    """The replay ran ahead of the live stream; then the publisher restarted and reached number 2."""
    tracker = SequenceTracker()
    live(tracker, 0)
    for seq in (1, 2, 3):
        tracker.applied_by_replay(seq, b"%d" % seq)
    assert live(tracker, 2, b"new process") is Verdict.RESTART


def test_a_lower_number_is_a_restart_and_is_judged_anew() -> None:
    tracker = SequenceTracker()
    for seq in range(5):
        live(tracker, seq)
    assert live(tracker, 4) is Verdict.RESTART
    assert live(tracker, 1) is Verdict.RESTART
    tracker.restarted()
    assert live(tracker, 1) is Verdict.GAP
    assert tracker.next_seq == 0


def test_what_a_snapshot_covers_is_a_repeat() -> None:
    tracker = SequenceTracker()
    live(tracker, 0)
    assert live(tracker, 50) is Verdict.GAP
    tracker.applied(60)
    assert live(tracker, 55) is Verdict.REPEAT
    assert live(tracker, 61) is Verdict.NEXT
