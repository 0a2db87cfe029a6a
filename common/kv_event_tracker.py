"""Which numbered batch comes next: tells gaps, repeats and restarts apart. Pure, no I/O.

A publisher's live stream only ever counts up, so a live number that does not exceed the last live one
means that another process took over the address. Batches that a replay brought come once more live; they
are repeats only if they are the same bytes, else they too are from another process.
"""

from enum import Enum


class Verdict(Enum):
    NEXT = "next"  # apply it
    REPEAT = "repeat"  # applied already
    GAP = "gap"  # next_seq .. seq-1 are missing
    RESTART = "restart"  # another publisher: forget everything, then judge again


class SequenceTracker:
    def __init__(self) -> None:
        self.next_seq = 0  # all below are applied, or given up
        self.last_live_seq = -1
        self._replayed: dict[int, int] = {}  # seq -> hash of a payload that may still come live

    def judge(self, seq: int, payload: bytes) -> Verdict:
        """Judge a live batch. Changes nothing but what was last seen live."""
        if seq <= self.last_live_seq:
            return Verdict.RESTART
        expected = self._replayed.pop(seq, None)
        if expected is not None and expected != hash(payload):
            return Verdict.RESTART
        self.last_live_seq = seq
        if seq < self.next_seq:
            return Verdict.REPEAT
        return Verdict.NEXT if seq == self.next_seq else Verdict.GAP

    def applied(self, seq: int) -> None:
        """Everything up to ``seq`` is applied: live, or by a snapshot of that number."""
        self.next_seq = max(self.next_seq, seq + 1)

    def applied_by_replay(self, seq: int, payload: bytes) -> None:
        self.applied(seq)
        if seq > self.last_live_seq:
            self._replayed[seq] = hash(payload)

    def restarted(self) -> None:
        self.next_seq = 0
        self.last_live_seq = -1
        self._replayed.clear()
