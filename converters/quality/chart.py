"""Error by layer as an inline SVG bar chart."""

from __future__ import annotations

import math
import re
from html import escape

from dspark.converters.quality.layers import LayerRow

WIDTH, HEIGHT = 960, 320
LEFT, RIGHT, TOP, BOTTOM = 48, 8, 28, 36
GRID_DB = 5

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#8C6D31", "#444444")
"""Okabe and Ito's palette, which colour-blind readers tell apart; https://jfly.uni-koeln.de/color/"""

_LAYER = re.compile(r"model\.layers\.(\d+)\..+")


def error_chart(rows: list[LayerRow]) -> str:
    """Bars in the order of the layers, coloured by kind of module, higher for a larger error; "" when nothing was measured.

    Of several modules of one kind in a layer (experts) the worst is drawn, so that the chart stays small.
    """
    bars = worst_of_each(rows)
    if not bars:
        return ""
    errors = [error for _, _, error in bars]
    low = GRID_DB * math.floor(min(errors) / GRID_DB - 0.2)
    high = max(GRID_DB * math.ceil(max(errors) / GRID_DB), low + GRID_DB)
    kinds = list(dict.fromkeys(row.kind for _, row, _ in bars))
    colour = {kind: COLOURS[i % len(COLOURS)] for i, kind in enumerate(kinds)}
    parts = [_grid(low, high), _legend(colour)]
    step = (WIDTH - LEFT - RIGHT) / len(bars)
    last = ""
    for index, (place, row, error) in enumerate(bars):
        left, top = LEFT + index * step, _y(error, low, high)
        parts.append(
            f'<rect x="{left:.2f}" y="{top:.1f}" width="{0.85 * step:.2f}" height="{HEIGHT - BOTTOM - top:.1f}" fill="{colour[row.kind]}">'
            f"<title>{escape(row.module)}: {error:.2f} dB</title></rect>"
        )
        if place != last and _labelled(place, len(bars)):
            parts.append(f'<text x="{left:.1f}" y="{HEIGHT - BOTTOM + 16}">{escape(place)}</text>')
        last = place
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 4}">layer</text>')
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="error by layer in dB" xmlns="http://www.w3.org/2000/svg">'
        + "".join(parts)
        + "</svg>"
    )


def worst_of_each(rows: list[LayerRow]) -> list[tuple[str, LayerRow, float]]:
    """(layer number or module name, the worst row, its error in dB) for each layer and kind, in the rows' order."""
    worst: dict[tuple[str, str], tuple[LayerRow, float]] = {}
    for row in rows:
        if row.error_db is None:
            continue
        match = _LAYER.fullmatch(row.module)
        key = (match[1] if match else row.module, row.kind)
        if key not in worst or row.error_db > worst[key][1]:
            worst[key] = (row, row.error_db)
    return [(place, row, error) for (place, _), (row, error) in worst.items()]


def _labelled(place: str, num_bars: int) -> bool:
    """Every layer where there is room, else every fourth."""
    return not place.isdigit() or num_bars <= 256 or int(place) % 4 == 0


def _y(error: float, low: float, high: float) -> float:
    return TOP + (HEIGHT - TOP - BOTTOM) * (high - error) / (high - low)


def _grid(low: int, high: int) -> str:
    parts = []
    for value in range(low, high + 1, GRID_DB):
        y = _y(value, low, high)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value}</text>')
    return "".join(parts) + f'<text x="4" y="{TOP - 12}">dB</text>'


def _legend(colour: dict[str, str]) -> str:
    parts, x = [], LEFT
    for kind, fill in colour.items():
        parts.append(f'<rect x="{x}" y="6" width="10" height="10" fill="{fill}"/><text x="{x + 14}" y="15">{escape(kind)}</text>')
        x += 30 + 7 * len(kind)
    return "".join(parts)
