"""The drawings of the documentation, as SVG that takes its text colour from the page, so that it fits light and dark."""

from __future__ import annotations

import math
from html import escape

_COLOURS = ("#2563eb", "#db2777", "#6b7280", "#d97706")  # told apart on white and on black, also without red or green
_SHAPES = ("circle", "square", "diamond", "triangle")
# Each has its own colour and shape in all pictures.
SERIES = (BY_HAND, PLANNED, CHECKPOINT, COMPILED) = (
    "ours, chosen by hand",
    "ours, found by plan_memory",
    "PyTorch's own checkpoint",
    "torch.compile with a budget",
)
_TOP = 1.35  # slower ways are in the table; here they would press the others together
_HIGHEST = 1.8


Points = dict[str, list[tuple[float, float, str]]]


def frontier(points: Points) -> str:
    """Points (memory in %, time as a ratio, label) by series; down and to the left is better."""
    parts, num_outside = _frontier(points, _TOP)
    note = f"; {num_outside} slower ones are in the table only" if num_outside else ""
    return _svg(760, 390, f"Step time over activation memory{note}", parts)


def frontiers(by_title: dict[str, Points], *, is_file: bool = False) -> str:
    """Several such pictures, one below the other, each as high as its own points are slow.

    Args:
        is_file: it is no part of a page, whose background it would have.
    """
    height = 420
    parts = ['<rect width="100%" height="100%" fill="#fff"/>'] if is_file else []
    for index, (title, points) in enumerate(by_title.items()):
        slowest = max([1.15, *(y for each in points.values() for _, y, _ in each)])
        drawn, _ = _frontier(points, min(math.ceil(slowest * 20 + 0.4) / 20, _HIGHEST), has_labels=True)
        head = f'<text x="56" y="14" font-size="14" font-weight="bold" fill="currentColor">{escape(title)}</text>'
        parts.append(f'<g transform="translate(0 {index * height})">{head}<g transform="translate(0 14)">')
        parts += [*drawn, "</g></g>"]
    return _svg(760, height * len(by_title), f"Step time over activation memory: {', '.join(by_title)}", parts)


def _frontier(points: Points, highest: float, *, has_labels: bool = False) -> tuple[list[str], int]:
    """What is drawn, and how many points are above it and left out; one that has a label is drawn at the edge, and its label tells."""
    left, right, top, bottom = 56, 704, 16, 316
    lowest = math.floor(min([1.0, *(y for each in points.values() for _, y, _ in each)]) * 20) / 20

    def at(x: float, y: float) -> tuple[float, float]:
        return left + x / 100 * (right - left), bottom - (y - lowest) / (highest - lowest) * (bottom - top)

    parts = []
    for percent in range(0, 101, 20):
        x, _ = at(percent, lowest)
        parts += [_line(x, top, x, bottom, 0.15), _text(x, bottom + 18, f"{percent} %", "middle")]
    for step in range(round((highest - lowest) * 20) + 1):
        value = lowest + step / 20
        _, y = at(0, value)
        parts += [_line(left, y, right, y, 0.15), _text(left - 8, y + 4, f"{value:.2f}", "end")]
    parts.append(_text((left + right) / 2, bottom + 38, "activation peak, of the plain step", "middle"))
    parts.append(_text(left + 6, top + 12, "step time, to plain", "start"))
    num_outside = 0
    for position, (name, found) in enumerate(points.items()):
        index = SERIES.index(name)
        for x, y, label in found:
            if y > highest and not has_labels:
                num_outside += 1
                continue
            where = at(x, min(y, highest))
            parts.append(_mark(index, *where, f"{name}: {label}, {x:.1f} % at {y:.3f}"))
            if has_labels:
                said = f"{label} (above: {y:.2f})" if y > highest else label
                parts.append(_text(where[0] + 8, where[1] - 6, said, "start", 9))
        parts.append(_mark(index, left + 8 + 166 * position, bottom + 60, name))
        parts.append(_text(left + 18 + 166 * position, bottom + 64, name, "start", 11))
    return parts, num_outside


def timeline() -> str:
    """A schematic step of four blocks under a plan: compute, the two directions of the link, and memory."""
    left, unit = 96, 44.0
    rows = {"compute": 24, "offload": 66, "load": 108}
    parts = [_text(left - 10, y + 18, name, "end") for name, y in rows.items()]
    forward = [(k, 1.0) for k in (1, 2, 3, 4)]
    backward = [(4, 0.0, 2.0), (3, 0.5, 2.0), (2, 0.5, 2.0), (1, 0.5, 2.0)]  # block, what is recomputed first, backward
    start, ends = 0.0, {}
    for block, length in forward:
        parts.append(
            _box(
                left + start * unit, rows["compute"], length * unit, f"F{block}", "#2563eb", f"forward of block {block}"
            )
        )
        start += length
        ends[block] = start
        if block < 4:  # the last block is not swapped
            begin = start - 0.75
            parts.append(
                _box(left + begin * unit, rows["offload"], 0.95 * unit, f"{block}", "#0d9488", f"what block {block} swaps goes out while forward goes on")
            )  # fmt: skip
    turn = start
    for block, recomputed, length in backward:
        if recomputed:
            parts.append(
                _box(left + start * unit, rows["compute"], recomputed * unit, f"R{block}", "#d97706", f"block {block} recomputes what it neither saved nor swapped")
            )  # fmt: skip
        start += recomputed
        parts.append(
            _box(
                left + start * unit,
                rows["compute"],
                length * unit,
                f"B{block}",
                "#7c3aed",
                f"backward of block {block}",
            )
        )
        start += length
        if block > 1:
            parts.append(
                _box(left + (start - 1.35) * unit, rows["load"], 0.95 * unit, f"{block - 1}", "#0d9488", f"what block {block - 1} swapped comes back before its backward asks")
            )  # fmt: skip
    parts += _memory(left, unit, turn, start)
    return _svg(760, 330, "One training step of four blocks under a plan (schematic)", parts)


def _memory(left: float, unit: float, turn: float, end: float) -> list[str]:
    """Two curves of memory under the bars: the plain step, and the same under the plan."""
    floor, height = 290.0, 120.0
    plain = (
        [(0.0, 0.0)]
        + [(k, k / 4) for k in (1.0, 2.0, 3.0, 4.0)]
        + [(turn + 2.0 * (4 - k) / 1.0, k / 4) for k in (3, 2, 1, 0)]
    )
    kept, working = 0.09, 0.25
    planned = [(0.0, 0.0)]
    for k in (1, 2, 3):
        planned += [(k - 0.05, kept * (k - 1) + working), (k + 0.2, kept * k)]
    planned += [(4.0, kept * 3 + working)]
    time = turn
    for k, recomputed in ((4, 0.0), (3, 0.5), (2, 0.5), (1, 0.5)):
        top = kept * (k - 1) + working
        planned += [
            (time + recomputed + 0.1, top),
            (time + recomputed + 1.9, top * 0.8),
            (time + recomputed + 2.0, kept * (k - 1)),
        ]
        time += recomputed + 2.0
    parts = [
        _line(left, floor, left + end * unit, floor, 0.5),
        _line(left + turn * unit, 150, left + turn * unit, floor, 0.3),
        _text(left - 10, floor - height / 2, "memory", "end"),
        _text(left + turn * unit + 6, floor + 18, "loss", "start"),
        _text(left, floor + 18, "time", "start"),
    ]  # fmt: skip
    for curve, colour, name, dash in ((plain, "#6b7280", "as it is", "5 4"), (planned, "#db2777", "with the plan", "")):
        path = " ".join(f"{left + x * unit:.1f},{floor - y * height:.1f}" for x, y in curve)
        parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"><title>{name}</title></polyline>'
        )
    x, y = left + (turn + 2.2) * unit, floor - height * 0.8
    parts.append(f'<text x="{x}" y="{y}" fill="#6b7280" font-size="13">as it is</text>')
    parts.append(
        f'<text x="{left + (end - 2.2) * unit}" y="{floor - height * 0.33}" fill="#db2777" font-size="13">with the plan</text>'
    )
    return parts


def _svg(width: int, height: int, title: str, parts: list[str]) -> str:
    body = "".join(parts)
    return (
        f'<svg class="figure" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}" '
        f'xmlns="http://www.w3.org/2000/svg" style="width:100%;height:auto" font-family="inherit" font-size="12">{body}</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str, size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="currentColor">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, opacity: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="currentColor" opacity="{opacity}"/>'


def _box(x: float, y: float, width: float, text: str, colour: str, title: str) -> str:
    middle = x + width / 2
    return (
        f'<g><title>{escape(title)}</title><rect x="{x + 1:.1f}" y="{y}" width="{width - 2:.1f}" height="28" rx="3" fill="{colour}"/>'
        f'<text x="{middle:.1f}" y="{y + 18}" text-anchor="middle" fill="#fff" font-size="12">{escape(text)}</text></g>'
    )


def _mark(index: int, x: float, y: float, title: str) -> str:
    """A point; each series has a colour and a shape of its own."""
    colour, size = _COLOURS[index], 5.5
    shape = {
        "circle": f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}"/>',
        "square": f'<rect x="{x - size:.1f}" y="{y - size:.1f}" width="{2 * size}" height="{2 * size}"/>',
        "diamond": f'<path d="M{x:.1f} {y - 7:.1f} l7 7 l-7 7 l-7 -7 z"/>',
        "triangle": f'<path d="M{x:.1f} {y - 7:.1f} l7 12 l-14 0 z"/>',
    }[_SHAPES[index]]
    return f'<g fill="{colour}"><title>{escape(title)}</title>{shape}</g>'
