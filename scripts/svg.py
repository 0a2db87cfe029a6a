"""What our SVG pictures share: text, colours, and a page that reads the same on light and dark."""

from collections.abc import Sequence
from html import escape

INK, FAINT, LINE = "#1f2328", "#656d76", "#d0d7de"


def text_at(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    size: float = 12,
    fill: str = INK,
    bold: bool = False,
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size:g}" fill="{fill}"{weight}>'
        f"{escape(text)}</text>"
    )


def page(width: float, height: float, parts: Sequence[str]) -> str:
    """The document; opaque, so that it reads the same on light and dark pages."""
    return (
        "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
                'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif">',
                f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" fill="#ffffff" '
                f'stroke="{LINE}"/>',
                *parts,
                "</svg>",
            ]
        )
        + "\n"
    )
