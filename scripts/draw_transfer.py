"""Draws docs/img/kv-transfer.svg: a good transfer, a death in the middle, and an abort.

    python -m scripts.draw_transfer

Nothing in the picture is placed by hand: real KvSenders and KvReceivers run in a virtual world, and what they
send, when it arrives and which state they are in is recorded (`tests/virtual/recording.py`).
"""

import logging
import sys
from pathlib import Path

from scripts.svg import FAINT, INK, LINE, page, text_at
from tests.virtual.recording import Arrow, Mark, Recording
from tests.virtual.stories import recordings

OUT = Path(__file__).resolve().parent.parent / "docs" / "img" / "kv-transfer.svg"
ROW, SIDE, LANE, TOP, HEAD = 15, 146, 262, 66, 62
WIDTH = 2 * SIDE + LANE  # of a panel
GAP_S = 0.5  # a pause of at least so long is drawn as one
CONTROL, DATA, STATE, FAULT = INK, "#0969da", "#1a7f37", "#cf222e"


class Panel:
    """One recording, its first row at ``y``."""

    def __init__(self, recording: Recording, x: float, y: float) -> None:
        self.recording = recording
        self.lifeline = {"D": x + SIDE, "P": x + SIDE + LANE}
        self._x, self._y = x, y
        self._rows: list[float] = []
        at, before = y + HEAD, 0.0
        self._pauses: list[tuple[float, float]] = []  # y, seconds
        for time in recording.times:
            if time - before >= GAP_S:
                self._pauses.append((at + ROW * 0.4, time - before))
                at += 2 * ROW
            self._rows.append(at)
            at, before = at + ROW, time
        self.bottom = at + ROW / 2

    def draw(self) -> list[str]:
        x, y = self._x, self._y
        parts = [text_at(x + 12, y + 20, self.recording.title, size=13.5, bold=True)]
        faults = {mark.side: mark for mark in self.recording.marks if mark.text.endswith(" dies")}
        for side, name in (("D", "D, decode node"), ("P", "P, prefill node")):
            at = self.lifeline[side]
            end = self._rows[faults[side].row] if side in faults else self.bottom
            parts += [
                text_at(at, y + HEAD - 20, name, anchor="middle", bold=True),
                f'<line x1="{at:g}" x2="{at:g}" y1="{y + HEAD - 13:g}" y2="{end:g}" stroke="{FAINT}"/>',
            ]
        parts += [part for pause in self._pauses for part in self._pause(*pause)]
        parts += [part for arrow in self.recording.arrows for part in self._arrow(arrow)]
        parts += [self._label(arrow) for arrow in self.recording.arrows]
        parts += [part for mark in self.recording.marks for part in self._mark(mark)]
        return parts

    def _pause(self, y: float, seconds: float) -> list[str]:
        middle = self._x + WIDTH / 2
        return [
            f'<rect x="{self._x + 12:g}" y="{y - 10:g}" width="{WIDTH - 24:g}" height="{ROW + 8}" rx="3" '
            'fill="#f6f8fa"/>',
            text_at(middle, y + 6, f"{seconds:.1f} s pass", anchor="middle", size=10.5, fill=FAINT),
        ]

    def _arrow(self, arrow: Arrow) -> list[str]:
        start, end = self.lifeline[arrow.side], self.lifeline["P" if arrow.side == "D" else "D"]
        right = 1 if end > start else -1
        top, colour = self._rows[arrow.sent], DATA if arrow.is_data else CONTROL
        width = 2.4 if arrow.is_data else 1.1
        if arrow.arrived is None:  # as far as the middle, and a cross
            end, low = start + right * LANE * 0.62, top + ROW * 0.8
            tip = f"M{end - 4:g} {low - 4:g}l8 8m0 -8l-8 8"
            head = f'<path d="{tip}" stroke="{FAULT}" stroke-width="1.8"/>'
        else:
            low = self._rows[arrow.arrived]
            tip = f"M{end:g} {low:g}l{-8 * right} -3.6v7.2z"
            head = f'<path d="{tip}" fill="{colour}"/>'
        return [
            f'<line x1="{start:g}" y1="{top:g}" x2="{end:g}" y2="{low:g}" stroke="{colour}" '
            f'stroke-width="{width}"/>',
            head,
        ]

    def _label(self, arrow: Arrow) -> str:
        """At the sender's end, where no two share a row."""
        right, anchor = (1, "start") if arrow.side == "D" else (-1, "end")
        x, y = self.lifeline[arrow.side] + 9 * right, self._rows[arrow.sent] - 2.5
        colour = DATA if arrow.is_data else CONTROL
        text = text_at(x, y, arrow.label, anchor=anchor, size=10.5, fill=colour)
        return text.replace("<text", '<text paint-order="stroke" stroke="#ffffff" stroke-width="2.5"', 1)

    def _mark(self, mark: Mark) -> list[str]:
        outward = -1 if mark.side == "D" else 1
        x, y = self.lifeline[mark.side], self._rows[mark.row]
        anchor = "end" if outward < 0 else "start"
        if mark.kind == "state":
            return [
                f'<circle cx="{x:g}" cy="{y:g}" r="3.6" fill="{STATE}"/>',
                text_at(x + 9 * outward, y + 4, mark.text, anchor=anchor, size=11, fill=STATE, bold=True),
            ]
        colour = FAULT if mark.kind == "fault" else INK
        parts = [text_at(x + 9 * outward, y + 4, mark.text, anchor=anchor, size=11, fill=colour)]
        if mark.kind == "fault":
            cross = f"M{x - 6:g} {y - 6:g}l12 12m0 -12l-12 12"
            parts.append(f'<path d="{cross}" stroke="{FAULT}" stroke-width="2.4"/>')
        return parts


def _legend() -> list[str]:
    parts = [text_at(16, 28, "KV transfer: what two nodes really said to each other", size=16, bold=True)]
    x = 16.0
    for colour, width, words in (
        (CONTROL, 1.1, "message on the control connection"),
        (DATA, 2.4, "bytes on the data lane"),
    ):
        parts.append(
            f'<line x1="{x:g}" x2="{x + 28:g}" y1="47" y2="47" stroke="{colour}" stroke-width="{width}"/>'
        )
        parts.append(text_at(x + 34, 51, words))
        x += 34 + 24 + 6.4 * len(words)
    parts.append(f'<circle cx="{x + 4:g}" cy="47" r="3.6" fill="{STATE}"/>')
    parts.append(text_at(x + 14, 51, "state entered"))
    parts.append(
        text_at(x + 122, 51, "plain: calls. Not drawn: heartbeats, one a second each way", fill=FAINT)
    )
    return parts


def drawing(good: Recording, *troubled: Recording) -> str:
    """The good transfer at the left, the others below each other at the right."""
    left = Panel(good, 0, TOP)
    right, y = [], float(TOP)
    for recording in troubled:
        right.append(Panel(recording, WIDTH, y))
        y = right[-1].bottom + 2 * ROW
    bottom = max(panel.bottom for panel in (left, *right)) + ROW
    parts = [*_legend(), f'<line x1="16" x2="{2 * WIDTH - 16}" y1="{TOP}" y2="{TOP}" stroke="{LINE}"/>']
    parts.append(f'<line x1="{WIDTH}" x2="{WIDTH}" y1="{TOP}" y2="{bottom:g}" stroke="{LINE}"/>')
    for panel in (left, *right):
        parts += panel.draw()
    return page(2 * WIDTH, round(bottom), parts)


def main() -> int:
    logging.getLogger("kv_transfer").setLevel(logging.CRITICAL)  # the failures are the story
    OUT.write_text(drawing(*recordings()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
