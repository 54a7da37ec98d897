"""The picture of a schedule: one page without anything from elsewhere. Every rank is a row; time goes to the right.

A row shows what the rank computes, with the numbers of microbatches; hatched where it is idle. Below that stands what
it keeps for backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import TYPE_CHECKING

from hyper_parallel._base.page_frame import framed
from hyper_parallel.core.parallel.pipeline.actions import Action
from hyper_parallel.core.parallel.pipeline.simulation import Bar, Timeline
from hyper_parallel.core.parallel.pipeline.verdict import counted

if TYPE_CHECKING:
    from hyper_parallel.core.parallel.pipeline.schedule import Schedule

__all__ = ["page"]

_ROW, _BAR, _KEPT = 62, 28, 20  # heights in a row, in pixels: the row, its bars, what is kept below them
_AXIS = 22
# A number fits into the narrowest bar, as long as the page is not endless.
_NARROWEST, _LEAST_WIDTH, _MOST_WIDTH = 20.0, 1000.0, 30_000.0
_KINDS = {"F": "forward", "B": "backward", "I": "gradient of the input", "W": "gradient of the weights"}
_SHADES = 4  # of chunks


def page(schedule: Schedule, timeline: Timeline) -> str:
    """Write the page as text.

    Example:
        >>> import hyper_parallel as hp
        >>> schedule = hp.schedules.gpipe(2, 2)
        >>> page(schedule, schedule.simulate())[:15]
        '<!doctype html>'
    """
    sizes = ", ".join(
        [
            counted(schedule.num_ranks, "rank"),
            counted(schedule.num_stages, "stage"),
            counted(schedule.num_microbatches, "microbatch"),
        ]
    )
    name = schedule.name or "schedule"
    body = [
        f"<header><h1>{escape(name)}: {sizes}</h1></header>",
        _cards(timeline),
        _legend(schedule, timeline),
        _plot(schedule, timeline),
        _table(schedule, timeline),
    ]
    return framed(f"Schedule: {name}", _style(), "\n".join(body))


def _style() -> str:
    return resources.files(__package__).joinpath("drawing.css").read_text(encoding="utf-8").strip()


def _cards(timeline: Timeline) -> str:
    busiest = max(timeline.busy)
    cards = [
        ("time of a step", _number(timeline.time), f"of it the busiest rank computes {_number(busiest)}"),
        ("idle", f"{timeline.bubble:.1%}", "of the time that ranks compute"),
        ("most kept for backward", _number(max(timeline.peak)), "microbatches at all layers of a rank"),
    ]
    return (
        "<dl class=cards>" + "".join(f"<div><dt>{a}</dt><dd>{b}</dd><dd>{c}</dd></div>" for a, b, c in cards) + "</dl>"
    )


def _legend(schedule: Schedule, timeline: Timeline) -> str:
    seen = {part.kind.value for bars in timeline.bars for bar in bars for part in bar.action.parts or (bar.action,)}
    keys = [(f'<rect class="{kind}" width="16" height="14"/>', words) for kind, words in _KINDS.items() if kind in seen]
    num_chunks = max(len(schedule.placement.stages_on(rank)) for rank in range(schedule.num_ranks))
    if num_chunks > 1:
        shades = "".join(
            f'<rect class="F c{shade}" x="{shade * 4}" width="4" height="14"/>'
            for shade in range(min(num_chunks, _SHADES))
        )
        keys.append((shades, "paler: a later stage of the rank"))
    if any(bar.action.parts for bars in timeline.bars for bar in bars):
        keys.append(
            ('<rect class="F" width="16" height="7"/><rect class="B" y="7" width="16" height="7"/>', "at the same time")
        )
    keys.append(('<rect class="idle" width="16" height="14"/>', "idle"))
    keys.append(('<rect class="kept" width="16" height="14"/>', "kept for backward"))
    return (
        "<div class=legend>"
        + "".join(f"<span><svg aria-hidden=true>{key}</svg>{words}</span>" for key, words in keys)
        + "</div>"
    )


def _plot(schedule: Schedule, timeline: Timeline) -> str:
    shortest = min((bar.end - bar.start for bars in timeline.bars for bar in bars if bar.end > bar.start), default=1.0)
    span = timeline.time or 1.0
    width = min(max(_LEAST_WIDTH, span / shortest * _NARROWEST), _MOST_WIDTH)
    scale = width / span
    height = _AXIS + _ROW * schedule.num_ranks
    top = max(max(timeline.peak), 1e-9)
    parts = [
        f'<svg width="{width + 12:.0f}" height="{height}" viewBox="0 0 {width + 12:.0f} {height}" role="img" '
        f'aria-label="What every rank does over time; the table below has the numbers.">',
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<line class="hatch" x1="0" y1="0" x2="0" y2="6"/></pattern></defs>',
        _axis(span, scale, height),
    ]
    names = []
    for rank, bars in enumerate(timeline.bars):
        y = _AXIS + rank * _ROW + 4
        stages = schedule.placement.stages_on(rank)
        parts += [_idle(start, end, scale, y) for start, end in _gaps(bars, span)]
        parts += [_bar(bar, stages, scale, y) for bar in bars if bar.end > bar.start]
        parts.append(_kept(timeline.memory[rank], span, scale, top, y + _BAR + 3))
        what = f"{'stage' if len(stages) == 1 else 'stages'} {', '.join(map(str, stages))}"
        names.append(
            f'<div style="height:{_ROW}px">rank {rank}<small>{what}</small>'
            f"<small>kept: {_number(timeline.peak[rank])}</small></div>"
        )
    return (
        f'<div class=plot><div class=names aria-hidden=true style="padding-top:{_AXIS}px">{"".join(names)}</div>'
        f'<div class=scroll tabindex=0 role=region aria-label="Ranks over time">{"".join(parts)}</svg></div></div>'
    )


def _axis(span: float, scale: float, height: int) -> str:
    step = 10.0 ** math.floor(math.log10(span))
    step = next(step * factor for factor in (0.1, 0.2, 0.5, 1.0) if step * factor * scale >= 60 or factor == 1.0)
    places = [index * step for index in range(math.floor(span / step + 1e-9) + 1)]
    return "".join(
        f'<line class="tick" x1="{place * scale:.1f}" y1="{_AXIS - 4}" x2="{place * scale:.1f}" y2="{height}"/>'
        f'<text class="axis" x="{max(place * scale, 6):.1f}" y="12">{_number(place)}</text>'
        for place in places
    )


def _gaps(bars: Sequence[Bar], span: float) -> list[tuple[float, float]]:
    ends, starts = [0.0, *(bar.end for bar in bars)], [*(bar.start for bar in bars), span]
    return [(end, start) for end, start in zip(ends, starts, strict=True) if start > end]


def _idle(start: float, end: float, scale: float, y: int) -> str:
    return (
        f'<rect class="idle" x="{start * scale:.1f}" y="{y}" width="{(end - start) * scale:.1f}" height="{_BAR}">'
        f"<title>idle: {_number(start)} to {_number(end)}</title></rect>"
    )


def _bar(bar: Bar, stages: Sequence[int], scale: float, y: int) -> str:
    x, width = bar.start * scale, (bar.end - bar.start) * scale
    parts = bar.action.parts or (bar.action,)
    height = _BAR / len(parts)
    drawn = [f"<title>{escape(bar.action.words)}: {_number(bar.start)} to {_number(bar.end)}</title>"]
    for index, part in enumerate(parts):
        at = y + index * height
        drawn.append(
            f'<rect class="{part.kind.value} c{_shade(part, stages)}" '
            f'x="{x:.1f}" y="{at:g}" width="{width:.1f}" height="{height:g}"/>'
        )
        if width >= 14:
            drawn.append(f'<text x="{x + width / 2:.1f}" y="{at + height / 2:g}">{part.microbatch}</text>')
    return f'<g class="bar">{"".join(drawn)}</g>'


def _shade(action: Action, stages: Sequence[int]) -> int:
    return min(stages.index(action.stage), _SHADES - 1)


def _kept(moments: Sequence[tuple[float, float]], span: float, scale: float, top: float, y: int) -> str:
    path = [f"M0,{y + _KEPT}"]
    for moment, kept in moments:
        path.append(f"H{moment * scale:.1f}V{y + _KEPT * (1 - kept / top):.1f}")
    return f'<path class="kept" d="{"".join(path)}H{span * scale:.1f}V{y + _KEPT}Z"/>'


def _table(schedule: Schedule, timeline: Timeline) -> str:
    head = ["rank", "stages", "computes", "idle", "idle, of a step", "most kept"]
    rows = []
    for rank, (busy, idle, peak) in enumerate(zip(timeline.busy, timeline.idle, timeline.peak, strict=True)):
        part = f"{idle / timeline.time:.1%}" if timeline.time else "0%"
        stages = ", ".join(map(str, schedule.placement.stages_on(rank)))
        cells = "".join(f"<td>{cell}</td>" for cell in (stages, _number(busy), _number(idle), part, _number(peak)))
        rows.append(f"<tr><th scope=row>{rank}</th>{cells}</tr>")
    return (
        "<h2>Rank by rank</h2><div class=scroll tabindex=0 role=region aria-label=Ranks><table>"
        "<caption>Times in the unit of the costs; what is kept in microbatches at all layers of a rank</caption>"
        "<thead><tr>"
        + "".join(f"<th scope=col>{name}</th>" for name in head)
        + f"</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
