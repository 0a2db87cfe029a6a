"""Draws docs/img/provisional-slots.svg: which slots are exact, provisional or unwritten after which step.

    python -m scripts.draw_exactness

Nothing in the picture is placed by hand: a real engine (baton-tiny, N = 4) runs a prompt of 11 tokens with
scripted drafts, and what its drafter wrote, and from which tokens, is watched through the speculator's rows
and pads. A slot is exact iff the token that it was computed from is known now and was the right one.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from torch import Tensor

from common.config import EngineOptions, ModelOptions
from common.engine.batch import ScheduledRequest
from common.engine.build import BuiltEngine, build_engine
from common.engine.drafter import Drafts, Verified
from common.engine.model_runner import ModelRunner
from common.engine.rules import final_upto
from common.engine.speculator import MtpSpeculator, Rows
from common.request import Request, SamplingParams
from router.policy import cut_of
from scripts.svg import FAINT, INK, LINE, page, text_at

OUT = Path(__file__).resolve().parent.parent / "docs" / "img" / "provisional-slots.svg"
PROMPT = tuple(range(40, 51))  # any ids
BUDGET = 9  # tokens a step: the reserve rule ends the first chunk at 7, not at 9
ACCEPTED = 1  # of the first N drafts
COLUMNS = 18

Slot = tuple[int, int]  # module, position


@dataclass(frozen=True)
class Panel:
    """The state of one request at one moment. ``read[slot]``: the token its last writer took for the one at
    position p+m+1. ``carry``: positions whose hidden rows are kept (or, on P, shipped)."""

    title: str
    notes: tuple[str, ...]
    known: tuple[int, ...]
    drafts: tuple[int, ...]
    rejected: tuple[int, ...]
    trunk: int  # positions below it have the trunk's KV of known tokens
    trunk_stale: int  # from there up to here: of rejected drafts
    read: dict[Slot, int]
    fresh: frozenset[Slot]
    final: int
    carry: range
    cut: int | None = None

    def state(self, slot: Slot) -> str:
        """exact, provisional, stale or unwritten (02-exactness 1)."""
        m, p = slot
        if slot not in self.read:
            return "unwritten"
        text = (*self.known, *self.drafts)
        if text[p + m + 1 : p + m + 2] != (self.read[slot],):
            return "stale"
        return "exact" if p + m + 1 < len(self.known) else "provisional"


class Watched(MtpSpeculator):
    """Remembers what every slot was computed from."""

    read: dict[Slot, int]
    fresh: set[Slot]
    last: Rows
    before: dict[Slot, int]  # `read` when the trunk and the verification were done

    def run(
        self, entries: Sequence[ScheduledRequest], verified: Sequence[Verified], hidden: Sequence[Tensor]
    ) -> list[Drafts]:
        self.before, self.fresh = dict(self.read), set()
        return super().run(entries, verified, hidden)

    def rows(self, entry: ScheduledRequest, verified: Verified, hidden: Tensor) -> Rows:
        self.last = super().rows(entry, verified, hidden)
        return self.last

    def pads(self, rows: Rows, m: int, samples: bool) -> np.ndarray:
        pads = super().pads(rows, m, samples)
        for i in np.flatnonzero(~pads).tolist():
            self.read[(m, rows.first + i)] = int(rows.next_ids[i + m])
            self.fresh.add((m, rows.first + i))
        return pads


@dataclass
class Story:
    """One engine and the drafts that it is told to propose."""

    built: BuiltEngine
    script: dict[int, int] = field(default_factory=dict)  # position -> draft

    def watch(self) -> Watched:
        built = self.built
        assert built.modules is not None
        assert isinstance(built.engine.runner, ModelRunner)
        watched = Watched(
            built.modules,
            built.num_modules,
            built.storage,
            lambda _, position, own: self.script.get(position, own),
        )
        watched.read, watched.fresh = {}, set()
        built.engine.runner.speculator = watched
        return watched

    def answer(self) -> list[int]:
        """What the model says: the same with any drafts."""
        request = _request("answer")
        self.built.engine.add(request)
        while self.built.engine.has_work:
            self.built.engine.step()
        return request.token_ids

    def panel(
        self, watched: Watched, request: Request, title: str, *notes: str, cut: int | None = None
    ) -> Panel:
        """As it is after a step."""
        n = self.built.num_modules
        carry = range(max(0, request.num_computed - (n - 1)), request.num_computed)
        return Panel(
            title,
            notes,
            tuple(request.token_ids),
            request.drafts,
            (),
            request.num_computed,
            request.num_computed,
            dict(watched.read),
            frozenset(watched.fresh),
            final_upto(request, self.built.engine.scheduler.config.speculation.lookahead),
            carry if cut is None else carry[-1:],
            cut,
        )


def _request(name: str, stop_at: int | None = None) -> Request:
    sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    return Request(name, list(PROMPT), sampling, stop_at=stop_at, hold_blocks=stop_at is not None)


def story() -> list[Panel]:
    """The panels, top to bottom."""
    options = EngineOptions(
        block_size=4, num_blocks=64, max_num_batched_tokens=BUDGET, prefix_caching=False, threads=1
    )
    built = build_engine(ModelOptions(model="baton-tiny", dtype="float32"), options)
    engine, n, length = built.engine, built.num_modules, len(PROMPT)
    run = Story(built)
    truth = run.answer()
    # Token L is the model's; then ACCEPTED drafts are right and the next one is not.
    for position in range(length + 1, length + 1 + n):
        right = position <= length + ACCEPTED
        run.script[position] = (
            truth[position] if right else (truth[position] + 1) % built.trunk.config.vocab_size
        )
    watched, request = run.watch(), _request("d")
    engine.add(request)
    engine.step()
    panels = [
        run.panel(
            watched,
            request,
            f"1  A prefill chunk: positions 0..{request.num_computed - 1} of a prompt of L = {length} tokens",
            f"budget {BUDGET}, but a chunk leaves at least",
            f"N = {n} known tokens: it ends at {request.num_computed}",
            "every slot read a known token",
        )
    ]
    engine.step()
    panels.append(
        run.panel(
            watched,
            request,
            f"2  The prompt is finished, token L = {length} is sampled, {n} drafts proposed",
            f"T = {request.num_tokens - 1}: module 0 read token {length},",
            "module m draft m: provisional",
            "carry: rows for the next re-prefill",
        )
    )
    after_sampling = panels[-1]
    engine.step()
    rows, accepted = watched.last, request.num_computed - length - 1
    drafts = after_sampling.drafts
    panels.append(
        Panel(
            f"3  The next step's trunk pass verified {n} drafts and accepted {accepted}",
            (
                f"K = {rows.exact_upto}: slots that read token {rows.exact_upto} are",
                "exact now, without being touched;",
                "those that read a later draft are stale",
            ),
            tuple(request.token_ids),
            (),
            drafts[accepted:],
            request.num_computed,
            length + 1 + n,
            watched.before,
            frozenset(),
            after_sampling.final,
            after_sampling.carry,
        )
    )
    after_drafting = run.panel(
        watched,
        request,
        f"4  The same step re-prefills and drafts: rows F = {rows.first} .. T-1 = {rows.last_known - 1}",
        f"F = K+1-N = {rows.first}: from the carry, all that",
        "read past K are rewritten, from token",
        f"T = {rows.last_known} or from the new drafts",
    )
    panels.append(replace(after_drafting, trunk_stale=panels[-1].trunk_stale))
    engine.abort(request.request_id)
    panels.append(_prefill_side(built))
    return panels


def _prefill_side(built: BuiltEngine) -> Panel:
    """P, at the cut of the back-off hand-over."""
    run = Story(built)
    watched = run.watch()
    cut = cut_of(len(PROMPT), built.num_modules)
    assert cut is not None
    request = _request("p", stop_at=cut)
    built.engine.add(request)
    while built.engine.has_work:
        built.engine.step()
    return run.panel(
        watched,
        request,
        f"5  On a prefill node: the cut C = L-(N-1) = {cut}, all L prompt tokens known",
        f"module {built.num_modules - 1} at C-1 = {cut - 1} waits for token L:",
        f"unwritten. One carry row, of {cut - 1}, is",
        "shipped; D then arrives at picture 2",
        cut=cut,
    )


# ---- drawing --------------------------------------------------------------------------------------------

CELL, ROW, LEFT, TOP, PANEL, NOTES = 27, 22, 82, 98, 214, 268
WIDTH = LEFT + COLUMNS * CELL + NOTES
FILLS = {"exact": "#a5d0ff", "provisional": "#ffd68a", "stale": "#f7a9a8", "unwritten": "#ffffff"}
EDGES = {"exact": "#5b9bd5", "provisional": "#c98a1b", "stale": "#cf222e", "unwritten": "#8c959f"}
CARRY, FINAL, CUT = "#8250df", "#1a7f37", INK


def _box(x: float, y: float, state: str, text: str, *, fresh: bool = False) -> str:
    dash = ' stroke-dasharray="3 2"' if state == "unwritten" else ""
    weight = 2.4 if fresh else 1
    return (
        f'<rect x="{x + 1.5:g}" y="{y + 1.5:g}" width="{CELL - 3}" height="{ROW - 3}" rx="2" '
        f'fill="{FILLS[state]}" stroke="{EDGES[state]}" stroke-width="{weight}"{dash}/>'
        + text_at(x + CELL / 2, y + ROW / 2 + 4, text, anchor="middle", size=10.5)
    )


def _draw_panel(panel: Panel, y: float, num_modules: int) -> list[str]:
    """One picture: token row, trunk row, a row a module; lines at `final` and at the cut."""
    parts = [text_at(16, y, panel.title, size=13.5, bold=True)]
    rows_y = y + 28
    last = len(panel.known) - 1

    def x_of(position: int) -> float:
        return LEFT + position * CELL

    parts += [
        text_at(x_of(p) + CELL / 2, rows_y - 5, str(p), anchor="middle", size=9.5, fill=FAINT)
        for p in range(COLUMNS)
    ]
    labels = ["token", "trunk", *(f"module {m}" for m in range(num_modules))]
    for i, label in enumerate(labels):
        parts.append(text_at(LEFT - 8, rows_y + i * ROW + 15, label, anchor="end"))
    for p in range(last + 1):
        parts.append(_box(x_of(p), rows_y, "exact", "T" if p == last else ""))
    for i in range(len(panel.drafts)):
        parts.append(_box(x_of(last + 1 + i), rows_y, "provisional", f"d{i + 1}"))
    for i in range(len(panel.rejected)):  # the first of them stood where the trunk's own token is now
        if i:
            parts.append(_box(x_of(last + i), rows_y, "stale", "x"))
    for p in range(panel.trunk):
        parts.append(_box(x_of(p), rows_y + ROW, "exact", ""))
    for p in range(panel.trunk, panel.trunk_stale):
        parts.append(_box(x_of(p), rows_y + ROW, "stale", ""))
    for m in range(num_modules):
        for p in range(panel.trunk):
            slot = (m, p)
            parts.append(
                _box(
                    x_of(p),
                    rows_y + (2 + m) * ROW,
                    panel.state(slot),
                    str(p + m + 1),
                    fresh=slot in panel.fresh,
                )
            )
    parts += _marks(panel, x_of, rows_y, (2 + num_modules) * ROW)
    note_x = LEFT + COLUMNS * CELL + 14
    parts += [text_at(note_x, rows_y + 15 + 18 * i, note) for i, note in enumerate(panel.notes)]
    figures = f"T = {last}, final = {panel.final}"
    parts.append(text_at(note_x, rows_y + 15 + 18 * len(panel.notes) + 4, figures, fill=FAINT))
    return parts


def _marks(panel: Panel, x_of: Callable[[int], float], y: float, height: float) -> list[str]:
    """Carry rows, the end of what is final, the cut."""
    parts = []
    if panel.carry:
        x, width = x_of(panel.carry.start), len(panel.carry) * CELL
        parts.append(
            f'<rect x="{x:g}" y="{y + ROW:g}" width="{width}" height="{ROW}" rx="3" fill="none" '
            f'stroke="{CARRY}" stroke-width="2.4"/>'
        )
        parts.append(text_at(x + width / 2, y + ROW + 15, "carry", anchor="middle", size=9, fill=CARRY))
    x = x_of(panel.final)
    parts.append(_line(x, y + ROW - 2, y + height + 4, FINAL))
    parts.append(text_at(x - 4, y + height + 13, "final", anchor="end", size=10.5, fill=FINAL))
    if panel.cut is not None:
        x = x_of(panel.cut)
        parts.append(_line(x, y - 2, y + height + 4, CUT))
        parts.append(text_at(x + 4, y + height + 13, f"C = {panel.cut}", size=10.5, fill=CUT))
    return parts


def _line(x: float, top: float, bottom: float, colour: str) -> str:
    return f'<line x1="{x:g}" x2="{x:g}" y1="{top:g}" y2="{bottom:g}" stroke="{colour}" stroke-width="2"/>'


def _legend() -> list[str]:
    parts = [text_at(16, 28, "Which KV slots of the MTP modules are exact when", size=16, bold=True)]
    x = 16.0
    for state, words in (
        ("exact", "exact: read a known token"),
        ("provisional", "provisional: read a draft"),
        ("stale", "stale: read a draft that is gone"),
        ("unwritten", "unwritten"),
    ):
        parts += [_box(x, 40, state, ""), text_at(x + CELL + 4, 55, words)]
        x += CELL + 24 + 6.6 * len(words)
    parts += [_box(16, 64, "exact", "9", fresh=True)]
    words = "thick edge: written in this step; number: the token that the slot is computed from, p+m+1"
    parts.append(text_at(16 + CELL + 4, 79, words))
    return parts


def drawing(panels: Sequence[Panel]) -> str:
    num_modules = 1 + max(m for m, _ in panels[0].read)
    height = TOP + len(panels) * PANEL + 4
    parts = _legend()
    for i, panel in enumerate(panels):
        y = TOP + i * PANEL
        parts.append(f'<line x1="16" x2="{WIDTH - 16}" y1="{y}" y2="{y}" stroke="{LINE}"/>')
        parts += _draw_panel(panel, y + 22, num_modules)
    return page(WIDTH, height, parts)


def main() -> int:
    OUT.write_text(drawing(story()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
