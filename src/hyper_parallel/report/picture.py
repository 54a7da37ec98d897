"""Curves as SVG: stacked areas over time, lanes of copies. Pure text, no library, no script."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

WIDTH, LEFT, RIGHT = 960.0, 92.0, 12.0
_PLOT = WIDTH - LEFT - RIGHT


class Layer(NamedTuple):
    """One colour of a stack: its name, its CSS class, and its height at each moment."""

    name: str
    css: str
    values: Sequence[float]


class Bar(NamedTuple):
    """Something that takes time: a copy, or a wait."""

    start_ms: float
    end_ms: float
    css: str
    title: str


def stacked(
    times_ms: Sequence[float],
    layers: Sequence[Layer],
    *,
    end_ms: float,
    top: float,
    unit: float,
    unit_name: str,
    line: float | None,
) -> str:
    """Areas on top of each other, as steps; `top`: value at the upper edge; `line`: a value to draw across, the budget."""
    height, above, below = 260.0, 10.0, 28.0

    def x(ms: float) -> float:
        return LEFT + _PLOT * (ms / end_ms if end_ms > 0 else 0.0)

    def y(value: float) -> float:
        return above + (height - above - below) * (1 - value / top if top > 0 else 1.0)

    parts = [f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="memory over one step">']
    for tick in _ticks(top / unit):
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick * unit):.1f}" y2="{y(tick * unit):.1f}"/>'
        )
        parts.append(
            f'<text class="tick" x="{LEFT - 8}" y="{y(tick * unit) + 4:.1f}" text-anchor="end">{tick:g} {unit_name}</text>'
        )
    parts += [
        f'<text class="tick" x="{x(tick):.1f}" y="{height - 8}" text-anchor="middle">{tick:g} ms</text>'
        for tick in _ticks(end_ms)
    ]
    floor = [0.0] * len(times_ms)
    for layer in layers:
        ceiling = [low + value for low, value in zip(floor, layer.values, strict=True)]
        if any(layer.values):
            parts.append(
                f'<path class="{layer.css}" d="{_area(times_ms, floor, ceiling, end_ms, x, y)}"><title>{escape(layer.name)}</title></path>'
            )
        floor = ceiling
    if line is not None and line <= top:
        parts.append(f'<line class="budget" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(line):.1f}" y2="{y(line):.1f}"/>')
        parts.append(
            f'<text class="budget-name" x="{WIDTH - RIGHT - 4}" y="{y(line) - 5:.1f}" text-anchor="end">budget</text>'
        )
    parts.append("</svg>")
    return "".join(parts)


def lanes(rows: Sequence[tuple[str, Sequence[Bar]]], *, end_ms: float) -> str:
    """One lane for each row: what is at work when."""
    row_height = 26.0
    height = row_height * len(rows) + 4
    parts = [f'<svg viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="copies over one step">']
    for index, (name, bars) in enumerate(rows):
        top = 4 + index * row_height
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{top + 14:.1f}" text-anchor="end">{escape(name)}</text>')
        parts.append(f'<rect class="lane" x="{LEFT}" y="{top:.1f}" width="{_PLOT:.1f}" height="18"/>')
        for bar in bars:
            begin = LEFT + _PLOT * max(bar.start_ms, 0.0) / end_ms
            width = max(_PLOT * (min(bar.end_ms, end_ms) - max(bar.start_ms, 0.0)) / end_ms, 0.6)
            parts.append(
                f'<rect class="{bar.css}" x="{begin:.1f}" y="{top:.1f}" width="{width:.1f}" height="18">'
                f"<title>{escape(bar.title)}</title></rect>"
            )
    parts.append("</svg>")
    return "".join(parts)


def _area(
    times_ms: Sequence[float],
    floor: Sequence[float],
    ceiling: Sequence[float],
    end_ms: float,
    x: Callable[[float], float],
    y: Callable[[float], float],
) -> str:
    """A band between two step functions."""
    upper, lower = [], []
    for index, ms in enumerate(times_ms):
        until = times_ms[index + 1] if index + 1 < len(times_ms) else end_ms
        upper += [f"{x(ms):.1f},{y(ceiling[index]):.1f}", f"{x(until):.1f},{y(ceiling[index]):.1f}"]
        lower += [f"{x(ms):.1f},{y(floor[index]):.1f}", f"{x(until):.1f},{y(floor[index]):.1f}"]
    return "M" + "L".join(upper + lower[::-1]) + "Z"


def _ticks(top: float) -> list[float]:
    """Round numbers from 0 up to `top`, four to ten of them."""
    if top <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(top))
    step = next(factor * power for factor in (0.1, 0.2, 0.25, 0.5, 1.0) if top / (factor * power) <= 10)
    return [round(step * index, 6) for index in range(int(top / step + 1e-9) + 1)]
