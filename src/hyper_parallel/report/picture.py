"""Plots as HTML around SVG: pure text, no library.

The SVG is stretched to the width of the page; words and numbers beside it are text of the page, and keep their size.
What a plot shows is said by its label and by a table beside it, see `page`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from hyper_parallel.report.stacks import Layer

WIDTH, HEIGHT = 1000.0, 240.0  # units of every drawing


class Axis(NamedTuple):
    """The place of a value along an edge, as a part of its length. `unit`: what one of the numbers at the ticks stands
    for.
    """

    low: float
    high: float
    unit: float
    unit_name: str

    def part(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low) if self.high > self.low else 0.0

    def ticks(self) -> list[tuple[float, str]]:
        """Choose round numbers, at most seven, and return the place and the text of each."""
        low, high = self.low / self.unit, self.high / self.unit
        if high <= low:
            return [(0.0, f"{low:g} {self.unit_name}".strip())]
        power = 10.0 ** math.floor(math.log10(high - low))
        step = next(factor * power for factor in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0) if (high - low) / (factor * power) < 7)
        first = math.ceil(low / step - 1e-9)
        last = math.floor(high / step + 1e-9)
        values = [round(step * index, 9) for index in range(first, last + 1)]
        return [(self.part(value * self.unit), f"{value:g} {self.unit_name}".strip()) for value in values]


class Mark(NamedTuple):
    """A point with words beside it. `css`: what kind of point."""

    x: float
    y: float
    words: str
    css: str = ""


class Bar(NamedTuple):
    """What is drawn in a lane, from `start` to `end` on its axis; `words` are shown when the mouse is on it."""

    start: float
    end: float
    css: str
    words: str


def frame(label: str, drawing: str, x: Axis, y: Axis | None, *, marks: Sequence[Mark] = (), css: str = "") -> str:
    """Put a drawing, ticks at its edges and points with words together into a plot.

    `label` is what a reader who does not see it is told.
    """
    across = _ticks("x", x.ticks())
    upward = "" if y is None else _ticks("y", y.ticks())
    points = "".join(_mark(mark, x, y) for mark in marks) if y is not None else ""
    return (
        f'<div class="plot {css}"><div class="y" aria-hidden="true">{upward}</div>'
        f'<div class="area" role="img" aria-label="{escape(label)}">{drawing}{points}<i class="cursor"></i></div>'
        f'<div class="x" aria-hidden="true">{across}</div></div>'
    )


def stacked(
    times_ms: Sequence[float],
    layers: Sequence[Layer],
    x: Axis,
    y: Axis,
    *,
    css: str,
    line: float | None,
    ends: Sequence[float],
) -> str:
    """Draw areas on top of each other, as steps.

    `line` is a value to draw across, such as the budget; `ends` are the moments at which the phases of the step end.
    """
    parts = [_svg(css), _grid(y)]
    ceilings: list[list[float]] = []
    total = [0.0] * len(times_ms)
    for layer in layers:
        total = [low + value for low, value in zip(total, layer.num_bytes, strict=True)]
        ceilings.append(total)
    # From the top of the stack down, each from the ground up: what is lower is drawn over what is higher.
    for layer, ceiling in reversed(list(zip(layers, ceilings, strict=True))):
        if any(layer.num_bytes):
            outline = _steps(times_ms, ceiling, x, y)
            parts.append(f'<path class="{layer.css}" d="M0,{HEIGHT:g}{outline}V{HEIGHT:g}Z"/>')
    parts += [_line("phase", x.part(end) * WIDTH, 0, x.part(end) * WIDTH, HEIGHT) for end in ends]
    if line is not None and line <= y.high:
        at = (1 - y.part(line)) * HEIGHT
        parts.append(_line("budget", 0, at, WIDTH, at))
    return "".join([*parts, "</svg>"])


def curve(points: Sequence[tuple[float, float]], x: Axis, y: Axis) -> str:
    """Draw a line through points, with the ground below it filled."""
    places = [f"{x.part(a) * WIDTH:.1f},{(1 - y.part(b)) * HEIGHT:.1f}" for a, b in points]
    drawn = f'<polyline class="curve" points="{" ".join(places)}"/>' if len(places) > 1 else ""
    return f"{_svg('')}{_grid(y)}{drawn}</svg>"


def lane(bars: Sequence[Bar], x: Axis) -> str:
    """Draw when something is at work: one bar for each stretch of time."""
    parts = [_svg("")]
    for bar in bars:
        begin, end = (min(max(x.part(value), 0.0), 1.0) * WIDTH for value in (bar.start, bar.end))
        width = max(end - begin, 0.8)
        parts.append(
            f'<rect class="{bar.css}" x="{begin:.1f}" y="0" width="{width:.1f}" height="{HEIGHT:g}">'
            f"<title>{escape(bar.words)}</title></rect>"
        )
    return "".join([*parts, "</svg>"])


def _svg(css: str) -> str:
    return (
        f'<svg class="{css}" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" preserveAspectRatio="none" aria-hidden="true" '
        'focusable="false">'
    )


def _grid(y: Axis) -> str:
    return "".join(_line("grid", 0, (1 - part) * HEIGHT, WIDTH, (1 - part) * HEIGHT) for part, _ in y.ticks())


def _line(css: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{css}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _steps(times_ms: Sequence[float], values: Sequence[float], x: Axis, y: Axis) -> str:
    """Draw a step function up to the right edge of its last moment; places that cannot be seen apart are one."""
    parts: list[str] = []
    before_x = before_y = ""
    for ms, value in zip(times_ms, values, strict=True):
        at_x, at_y = f"{x.part(ms) * WIDTH:.1f}", f"{(1 - y.part(value)) * HEIGHT:.1f}"
        if at_y == before_y:
            continue
        if at_x != before_x:
            parts.append(f"H{at_x}")
        parts.append(f"V{at_y}")
        before_x, before_y = at_x, at_y
    parts.append(f"H{x.part(times_ms[-1]) * WIDTH:.1f}")
    return "".join(parts)


def _ticks(edge: str, ticks: Sequence[tuple[float, str]]) -> str:
    side = "left" if edge == "x" else "bottom"
    return "".join(
        f'<span style="{side}:{part:.2%}"{" class=every-other" if index % 2 else ""}>{escape(text)}</span>'
        for index, (part, text) in enumerate(ticks)
        if 0 <= part <= 1
    )


def _mark(mark: Mark, x: Axis, y: Axis) -> str:
    across, upward = x.part(mark.x), y.part(mark.y)
    # Words stay inside the plot: to the left of points in its right half, below those near its upper edge.
    sides = f"{'left' if across > 0.5 else 'right'} {'below' if upward > 0.85 else 'above'}"
    words = f'<b class="{sides}">{escape(mark.words)}</b>' if mark.words else ""
    return (
        f'<span class="mark {mark.css}" style="left:{across:.2%};bottom:{upward:.2%}" aria-hidden="true">{words}</span>'
    )
