"""Columns of a training curve (CSV) as an SVG line chart, without a plotting library.

python -m scripts.train_plot CURVE.csv OUT.svg --x tokens --y train_loss val_loss --title "Trunk"
"""

import argparse
import csv
from collections.abc import Sequence
from html import escape
from pathlib import Path

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 400, 64, 150, 40, 48
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df")
Series = list[tuple[float, float]]


def read_series(path: Path, x: str, y: str) -> Series:
    """The (x, y) pairs of the rows that have both."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for column in (x, y):
        if not rows or column not in rows[0]:
            raise ValueError(f"{path} has no column {column!r}")
    return [(float(row[x]), float(row[y])) for row in rows if row[x] and row[y]]


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers between the limits."""
    raw = (high - low) / count or 1.0
    magnitude = 10.0 ** (len(str(int(1 / raw))) * -1 if raw < 1 else len(str(int(raw))) - 1)
    step = next(s * magnitude for s in (1, 2, 5, 10, 20, 50, 100) if s * magnitude >= raw)
    first = int(low / step) if low % step == 0 else int(low / step) + 1
    return [i * step for i in range(first, int(high / step + 1e-9) + 1)]


def chart(series: dict[str, Series], title: str, x_label: str) -> str:
    """An SVG document; every series has at least one point."""
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    low_x, high_x, low_y, high_y = min(xs), max(xs), min(ys), max(ys)
    low_y, high_y = low_y - 0.05 * (high_y - low_y), high_y + 0.05 * (high_y - low_y)

    def at_x(x: float) -> float:
        return LEFT + (x - low_x) / ((high_x - low_x) or 1) * (WIDTH - LEFT - RIGHT)

    def at_y(y: float) -> float:
        return HEIGHT - BOTTOM - (y - low_y) / ((high_y - low_y) or 1) * (HEIGHT - TOP - BOTTOM)

    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{escape(title)}</text>',
        f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x_label)}</text>',
    ]
    for y in ticks(low_y, high_y):
        parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{at_y(y):.1f}" y2="{at_y(y):.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at_y(y) + 4:.1f}" text-anchor="end">{y:g}</text>')
    for x in ticks(low_x, high_x):
        parts.append(f'<text x="{at_x(x):.1f}" y="{bottom + 18}" text-anchor="middle">{x:,.0f}</text>')
    for number, (name, points) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{at_x(x):.1f},{at_y(y):.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        legend_y = TOP + 14 + 18 * number
        parts.append(f'<text x="{right + 12}" y="{legend_y}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("curve", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--x", default="tokens")
    parser.add_argument("--y", nargs="+", required=True)
    parser.add_argument("--title", default="")
    args = parser.parse_args(arguments)
    series = {y: read_series(args.curve, args.x, y) for y in args.y}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(chart(series, args.title, args.x))


if __name__ == "__main__":
    main()
