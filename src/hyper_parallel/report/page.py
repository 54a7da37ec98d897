"""The page of a plan: memory over one step before and after, copies with stalls, and the table per block. No network, no script."""

from __future__ import annotations

import json
import os
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from hyper_parallel.core.planner.choices import kept_bytes, recompute_ms, recomputed_bytes, swapped_bytes
from hyper_parallel.core.planner.timeline import Timeline, plain_step, run_step
from hyper_parallel.core.swap.engine import Limits
from hyper_parallel.core.swap.sizes import format_size
from hyper_parallel.report.picture import Bar, Layer, lanes, stacked

if TYPE_CHECKING:
    from hyper_parallel.core.planner.plan import MemoryPlan

_MAX_MOMENTS = 1500  # more would not be seen, and make the page heavy
_LAYERS = (
    ("alive before forward", "base", "base_bytes"),
    ("outside of blocks", "outside", "outside_bytes"),
    ("saved for backward", "saved", "saved_bytes"),
    ("working set", "working", "working_bytes"),
    ("on its way out", "window", "window_bytes"),
    ("loaded ahead", "prefetched", "prefetched_bytes"),
)


def write_report(plan: MemoryPlan, path: str | os.PathLike[str], *, notes: list[tuple[str, str]] | None = None) -> Path:
    """Write the page of a plan; `notes`: more facts to show beside the others, name and text."""
    target = Path(path)
    target.write_text(page(plan, notes or []), encoding="utf-8")
    return target


def page(plan: MemoryPlan, notes: list[tuple[str, str]]) -> str:
    before = plain_step(plan.profile)
    window, prefetch = plan.setting
    after = run_step(plan.profile, plan.decision, Limits(window, prefetch))
    end_ms = max(before.step_ms, after.step_ms)
    top = 1.08 * max(before.peak_bytes, after.peak_bytes, plan.budget_bytes if not plan.is_empty else 0)
    name = str(plan.profile.facts.get("model", "model"))
    body = [
        f"<h1>Memory of one step: {escape(name)}</h1>",
        f"<p>{escape(_summary(plan))}</p>",
        _cards(plan, notes),
        "<h2>Before</h2>",
        _memory(before, plan, end_ms, top),
        "<h2>With the plan</h2>",
        _memory(after, plan, end_ms, top),
        _legend(),
        _copies(after, end_ms),
        "<h2>Block by block</h2>",
        _table(plan),
        '<p class="small">Curves are predicted from one profiled step; peaks and times that were measured are named so.</p>',
        f'<script type="application/json" id="plan">{_json(plan, before, after)}</script>',
    ]
    return _FRAME.format(title=escape(f"Memory plan: {name}"), style=_STYLE, body="\n".join(body))


def _summary(plan: MemoryPlan) -> str:
    profile = plan.profile
    if plan.is_empty:
        return (
            f"The plain step fits into {format_size(plan.budget_bytes)}: its peak is {format_size(profile.peak_bytes)}."
        )
    peak = plan.predicted.peak_bytes if plan.measured is None else plan.measured.peak_bytes
    return (
        f"A plain step needs {format_size(profile.peak_bytes)}. With this plan it needs {format_size(peak)} "
        f"({'measured' if plan.measured else 'predicted'}), within the {format_size(plan.budget_bytes)} that were allowed."
    )


def _cards(plan: MemoryPlan, notes: list[tuple[str, str]]) -> str:
    profile = plan.profile
    activations = max(profile.activation_peak_bytes, 1)
    part = (plan.predicted.peak_bytes - profile.base_bytes) / activations
    cards = [
        ("plain peak", format_size(profile.peak_bytes)),
        ("predicted peak", format_size(plan.predicted.peak_bytes)),
        *([("measured peak", format_size(plan.measured.peak_bytes))] if plan.measured else []),
        ("activations", f"{part:.0%} of plain"),
        ("predicted step time", f"{plan.predicted.step_ms / profile.step_ms:.2f} of plain"),
        *notes,
    ]
    return (
        '<dl class="cards">'
        + "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in cards)
        + "</dl>"
    )


def _memory(timeline: Timeline, plan: MemoryPlan, end_ms: float, top: float) -> str:
    moments = timeline.moments
    stride = -(-len(moments) // _MAX_MOMENTS)
    # Of each few moments the highest: the peak is never left out.
    chosen = [max(moments[i : i + stride], key=lambda m: m.num_bytes) for i in range(0, len(moments), stride)]
    layers = [Layer(name, css, [getattr(moment, field) for moment in chosen]) for name, css, field in _LAYERS]
    unit, unit_name = _unit(top)
    return stacked(
        [moment.ms for moment in chosen], layers, end_ms=end_ms, top=top, unit=unit, unit_name=unit_name,
        line=None if plan.is_empty else plan.budget_bytes,
    )  # fmt: skip


def _unit(top: float) -> tuple[float, str]:
    for power, name in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if top >= 1024**power:
            return float(1024**power), name
    return 1.0, "B"


def _legend() -> str:
    return (
        '<p class="legend">' + "".join(f'<span><i class="{css}"></i>{name}</span>' for name, css, _ in _LAYERS) + "</p>"
    )


def _copies(timeline: Timeline, end_ms: float) -> str:
    if not timeline.copies:
        return ""
    out, back = ([
        Bar(copy.start_ms, copy.end_ms, css, f"{timeline.paths[copy.region]}: {format_size(copy.num_bytes)}")
        for copy in timeline.copies if copy.direction == direction
    ] for direction, css in (("offload", "window"), ("load", "prefetched")))  # fmt: skip
    stalls = [Bar(s.start_ms, s.start_ms + s.ms, "stall", f"{s.kind}: {s.ms:.2f} ms") for s in timeline.stalls]
    return "<h2>Copies</h2>" + lanes([("out", out), ("back", back), ("waits", stalls)], end_ms=end_ms)


def _table(plan: MemoryPlan) -> str:
    rows = []
    for region, decision in zip(plan.profile.regions, plan.decision, strict=True):
        cells = [
            region.path,
            "plain" if decision.is_plain else "managed",
            *(format_size(each(region, decision)) for each in (kept_bytes, swapped_bytes, recomputed_bytes)),
            f"{recompute_ms(region, decision):.2f}",
        ]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in ("block", "", "saved", "swapped", "recomputed", "recompute ms"))
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _json(plan: MemoryPlan, before: Timeline, after: Timeline) -> str:
    data = {
        "budget_bytes": plan.budget_bytes,
        "plain": {"peak_bytes": plan.profile.peak_bytes, "step_ms": plan.profile.step_ms},
        "predicted": vars(plan.predicted),
        "measured": None if plan.measured is None else vars(plan.measured),
        "curves": {"before_peak_bytes": before.peak_bytes, "after_peak_bytes": after.peak_bytes},
    }
    return json.dumps(data).replace("<", "\\u003c")


_FRAME = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>{style}</style></head><body><main>
{body}
</main></body></html>
"""
_STYLE = """
:root{--text:#1a1d21;--soft:#5d6670;--page:#fff;--card:#f3f5f7;--line:#dde2e7;--base:#aeb7c0;--outside:#8d99a5;--saved:#3b7dd8;
--working:#f0a030;--window:#9b6bd3;--prefetched:#2fa084;--stall:#d64545}
@media (prefers-color-scheme:dark){:root{--text:#e8eaed;--soft:#9aa4ae;--page:#14171a;--card:#1f2429;--line:#323a42;--base:#5c6670;
--outside:#76828d;--saved:#5b9bf0;--working:#f2b04c;--window:#b48be6;--prefetched:#45bf9f;--stall:#f06a6a}}
body{margin:0;background:var(--page);color:var(--text);font:16px/1.5 system-ui,sans-serif}
main{max-width:1000px;margin:0 auto;padding:24px 16px 48px}
h1{font-size:1.5rem;line-height:1.25}h2{font-size:1.1rem;margin:1.6em 0 .4em}
svg{width:100%;height:auto;display:block}
.grid{stroke:var(--line)}.tick{fill:var(--soft);font-size:12px}.lane{fill:var(--card)}
.budget{stroke:var(--stall);stroke-width:1.5;stroke-dasharray:6 4}.budget-name{fill:var(--stall);font-size:12px}
.base{fill:var(--base);background:var(--base)}.outside{fill:var(--outside);background:var(--outside)}
.saved{fill:var(--saved);background:var(--saved)}.working{fill:var(--working);background:var(--working)}
.window{fill:var(--window);background:var(--window)}.prefetched{fill:var(--prefetched);background:var(--prefetched)}
.stall{fill:var(--stall);background:var(--stall)}
.cards{display:flex;flex-wrap:wrap;gap:12px;margin:1em 0}.cards div{background:var(--card);border-radius:8px;padding:10px 14px}
.cards dt{color:var(--soft);font-size:.8rem}.cards dd{margin:0;font-size:1.15rem;font-weight:600}
.legend{display:flex;flex-wrap:wrap;gap:6px 18px;font-size:.85rem;color:var(--soft)}
.legend i{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:6px;vertical-align:-1px}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem;width:100%}
th,td{padding:4px 10px;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child{text-align:left}th{color:var(--soft);font-weight:500}.small{color:var(--soft);font-size:.85rem}
@media (max-width:600px){.tick,.budget-name{font-size:20px}h1{font-size:1.25rem}}
"""
