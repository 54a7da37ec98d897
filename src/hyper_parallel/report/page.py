"""The page of a plan: one self-contained file that needs no network.

What it shows is in `numbers`; how it looks is in `page.css`. A script of a few lines moves a line through the pictures
and shows the numbers there; without it the page has everything but that.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hyper_parallel._base import files
from hyper_parallel._base.files import checked_path
from hyper_parallel._base.page_frame import framed
from hyper_parallel.core.planner.plan.table import (
    gap_words,
    host_words,
    html_words,
    notes_words,
    nothing_swapped_words,
    unlike_predicted,
)
from hyper_parallel.core.swap.sizes import format_size
from hyper_parallel.report.numbers import CURVE_SECONDS, Block, Numbers, Row, Step, Stretch, numbers_of
from hyper_parallel.report.picture import Axis, Bar, Mark, curve, frame, lane, stacked

if TYPE_CHECKING:
    from hyper_parallel.core.planner.plan.plan import MemoryPlan

_NUM_PARTS = 16  # rows of the table beside the pictures of memory


def write_report(
    plan: MemoryPlan,
    path: str | os.PathLike[str],
    *,
    notes: list[tuple[str, str]] | None = None,
    curve_seconds: float = CURVE_SECONDS,
) -> Path:
    """Write the page of a plan; `notes`: more facts to show beside the others, name and text."""
    target = checked_path(path)  # before the work is done
    files.write(target, page(numbers_of(plan, curve_seconds=curve_seconds), notes or []).encode())
    return Path(target)


def page(numbers: Numbers, notes: list[tuple[str, str]]) -> str:
    name = numbers.plan.profile.identity.model or "model"
    body = [
        f"<header><h1>Memory of one step: {escape(name)}</h1><p>{escape(_summary(numbers.plan))}</p></header>",
        _cards(numbers, notes),
        _memory(numbers),
        _copies(numbers),
        _curve(numbers),
        _blocks(numbers.blocks),
        _facts(numbers),
        f'<script type="application/json" id="plan">{_json(numbers)}</script>',
        f"<script>{_text('page.js')}</script>",
    ]
    return framed(f"Memory plan: {name}", _text("page.css"), "\n".join(body))


def _text(name: str) -> str:
    return resources.files(__package__ or "hyper_parallel.report").joinpath(name).read_text(encoding="utf-8").strip()


def _json(numbers: Numbers) -> str:
    return json.dumps(numbers.as_dict()).replace("<", "\\u003c")


# -- words -------------------------------------------------------------------------------------------------------------


def _summary(plan: MemoryPlan) -> str:
    profile = plan.profile
    if plan.is_empty:
        return (
            f"The plain step fits into {format_size(plan.budget_bytes)}: "
            f"its peak is {format_size(profile.peak_bytes)}. Nothing is changed."
        )
    to_plain = plan.measured_to_plain
    times, how = (plan.predicted_to_plain, "predicted") if to_plain is None else (to_plain, "measured")
    return (
        f"A plain step needs {format_size(profile.peak_bytes)}. With this plan it needs {format_size(plan.peak_bytes)} "
        f"({_how(plan)}), within the {format_size(plan.budget_bytes)} that were allowed; "
        f"the step takes {times:.2f} times as long ({how})."
    )


def _how(plan: MemoryPlan) -> str:
    return "predicted" if plan.measured is None else "measured"


class Card(NamedTuple):
    """A number, and in small letters what to compare it with."""

    name: str
    number: str
    beside: str = ""


def _cards(numbers: Numbers, notes: list[tuple[str, str]]) -> str:
    plan, profile, measured = numbers.plan, numbers.plan.profile, numbers.plan.measured
    plain_peak = "plain peak" if profile.is_plain_measured else "plain peak (computed)"
    cards = [
        Card("budget", format_size(plan.budget_bytes)),
        Card(plain_peak, format_size(profile.peak_bytes)),
        Card("plain step", f"{plan.plain_step_ms:.1f} ms"),
    ]
    if not plan.is_empty:
        part = (plan.peak_bytes - profile.base_bytes) / max(profile.activation_peak_bytes, 1)
        predicted = plan.predicted
        if measured is None:
            peak = "predicted"
        elif format_size(predicted.peak_bytes) == format_size(measured.peak_bytes):
            peak = "measured, as predicted"
        else:
            peak = f"measured; predicted {format_size(predicted.peak_bytes)}"
        cards.append(Card("peak with the plan", format_size(plan.peak_bytes), peak))
        cards.append(Card("activations", f"{part:.0%} of plain"))
        if measured is None or measured.step_ms is None:
            cards.append(
                Card(
                    "step with the plan",
                    f"{predicted.step_ms:.1f} ms",
                    f"predicted: {plan.predicted_to_plain:.2f} of plain",
                )
            )
        else:
            beside = f"measured: {plan.measured_to_plain:.2f} of plain; predicted {plan.predicted_to_plain:.2f}"
            cards.append(Card("step with the plan", f"{measured.step_ms:.1f} ms", beside))
    cards += [Card(*note) for note in notes]
    items = "".join(
        f"<div><dt>{escape(card.name)}</dt><dd>{escape(card.number)}</dd>"
        + (f"<dd>{escape(card.beside)}</dd>" if card.beside else "") + "</div>"
        for card in cards
    )  # fmt: skip
    words = [] if plan.is_empty else unlike_predicted(plan)
    if not plan.is_empty and profile.link is None:
        words.append(nothing_swapped_words(plan))
    lines = "".join(f"<p>{html_words(text)}</p>" for text in [*words, *notes_words(plan)])
    return f'<dl class="cards">{items}</dl>{lines}'


# -- memory over one step ----------------------------------------------------------------------------------------------


def _memory(numbers: Numbers) -> str:
    plan, before, after = numbers.plan, numbers.before, numbers.after
    x = Axis(0.0, max(before.step_ms, after.step_ms), 1.0, "ms")
    highest = max(before.peak_bytes, after.peak_bytes, 0 if plan.is_empty else plan.budget_bytes)
    y = Axis(0.0, 1.08 * highest, *_unit(highest))
    line = None if plan.is_empty else plan.budget_bytes
    steps = (
        [("before", "The plain step", before)]
        if plan.is_empty
        else [("before", "Before", before), ("after", "With the plan", after)]
    )
    figures = "".join(_figure(name, title, step, x, y, line) for name, title, step in steps)
    budget = "" if plan.is_empty else f'<span><i class="budget-key"></i>budget, {format_size(plan.budget_bytes)}</span>'
    legends = "".join(
        f'<p class="legend {css}">'
        + "".join(
            f'<span><i class="{layer.css}"></i>{escape(layer.name)}</span>' for layer in layers if any(layer.num_bytes)
        )
        + budget + "</p>"
        for css, layers in (("by-choice", after.stacks.by_choice), ("by-block", after.stacks.by_block))
    )  # fmt: skip
    return (
        '<section aria-labelledby="h-memory"><h2 id="h-memory">Memory over one step</h2>'
        f"<p>{escape(_peaks_words(numbers))}</p>"
        '<input type="radio" name="view" id="view-choice" checked><label for="view-choice">by choice</label>'
        '<input type="radio" name="view" id="view-block"><label for="view-block">by block</label>'
        f'<div class="views">{legends}{figures}{_slider()}{_moments_table(steps, x.high)}</div></section>'
    )


def _peaks_words(numbers: Numbers) -> str:
    """Say what each of several numbers of one peak is."""
    plan, profile = numbers.plan, numbers.plan.profile
    words = ["Drawn from the profile, moment by moment."]
    if numbers.before.peak_bytes != profile.peak_bytes:
        drawn, whole = format_size(numbers.before.peak_bytes), format_size(profile.peak_bytes)
        words.append(f"The picture shows {drawn} of the plain step's {whole}.")
    if plan.is_empty:
        return " ".join(words)
    peak, drawn = format_size(plan.peak_bytes), format_size(numbers.after.peak_bytes)
    if drawn != peak:
        words.append(
            f"The picture shows {drawn} of the {peak} that were {_how(plan)} with the plan: "
            "small things, such as states of random generators, are left out."
        )
    predicted = format_size(plan.predicted.peak_bytes)
    if plan.has_swaps and predicted not in (peak, drawn):
        words.append(f"The predicted {predicted} are a bound, with every copy under way that may be at that time.")
    return " ".join(words)


def _figure(name: str, title: str, step: Step, x: Axis, y: Axis, line: float | None) -> str:
    stacks = step.stacks
    turn = step.forward_ms + step.turn_ms
    ends = (step.forward_ms, turn, step.step_ms)
    ms = [*stacks.ms, step.step_ms]
    drawings = "".join(
        stacked(
            ms,
            [layer._replace(num_bytes=[*layer.num_bytes, layer.num_bytes[-1]]) for layer in layers],
            x, y, css=css, line=line, ends=ends,
        )
        for css, layers in (("by-choice", stacks.by_choice), ("by-block", stacks.by_block))
    )  # fmt: skip
    peak = format_size(step.peak_bytes)
    label = (
        f"{title}: memory rises to {peak} at {step.peak_ms:.1f} ms of {step.step_ms:.1f} ms. "
        f"Forward takes {step.forward_ms:.1f} ms, backward begins at {turn:.1f} ms."
    )
    plot = frame(label, drawings, x, y, marks=[Mark(step.peak_ms, step.peak_bytes, "peak")])
    return (
        f'<figure data-step="{name}"><figcaption><b>{title}</b> '
        f"<small>forward until {step.forward_ms:.1f} ms, backward from {turn:.1f} ms</small></figcaption>"
        f"{plot}</figure>"
    )


def _slider() -> str:
    return (
        '<div class="slider" hidden><label for="moment">Numbers at a moment: <output id="moment-ms"></output></label>'
        '<input type="range" id="moment" min="0" max="1000" value="0">'
        '<div class="scroll"><table id="moment-table"></table></div></div>'
    )


def _moments_table(steps: Sequence[tuple[str, str, Step]], end_ms: float) -> str:
    rows = []
    for index in range(_NUM_PARTS):
        low, high = end_ms * index / _NUM_PARTS, end_ms * (index + 1) / _NUM_PARTS
        rows.append([f"{low:.1f} to {high:.1f} ms", *(_highest_within(step, low, high) for _, _, step in steps)])
    table = _table("Highest point in each part of the step", ["time", *(title for _, title, _ in steps)], rows)
    return f"<details><summary>The same as a table</summary>{table}</details>"


def _highest_within(step: Step, low_ms: float, high_ms: float) -> str:
    if low_ms >= step.step_ms:
        return "(over)"
    totals = step.stacks.totals()
    inside = [total for ms, total in zip(step.stacks.ms, totals, strict=True) if low_ms <= ms < high_ms]
    before = [total for ms, total in zip(step.stacks.ms, totals, strict=True) if ms < low_ms][-1:]
    return format_size(max(inside + before, default=totals[0]))


# -- copies ------------------------------------------------------------------------------------------------------------


def _copies(numbers: Numbers) -> str:
    copies = numbers.copies
    if not copies.out and not copies.back:
        return ""
    x = Axis(0.0, max(numbers.before.step_ms, numbers.after.step_ms), 1.0, "ms")
    lanes = (
        ("out", "out", copies.out, "window"),
        ("back", "back", copies.back, "prefetched"),
        ("waits", "waits", copies.waits, "stall"),
    )
    drawn = []
    for name, words, stretches, css in lanes:
        busy_ms = sum(stretch.end_ms - stretch.start_ms for stretch in stretches)
        label = f"copies {words}: busy for {busy_ms:.1f} ms of {numbers.after.step_ms:.1f} ms"
        plot = frame(label, lane([_bar(stretch, css) for stretch in stretches], x), x, None, css=f"lane lane-{name}")
        drawn.append(f'<div class="lane-row"><span class="lane-name">{escape(words)}</span>{plot}</div>')
    sums = copies.as_dict()
    where = "the host" if numbers.plan.host.tier == "host" else "files"
    text = (
        f"{format_size(sums['out_bytes'])} go to {where} in forward and "
        f"{format_size(sums['back_bytes'])} come back for backward. "
        f"Predicted is that compute waits {sums['wait_ms']:.1f} ms for them, "
        f"{sums['wait_ms'] / numbers.after.step_ms:.1%} of the step."
    )
    return (
        '<section aria-labelledby="h-copies"><h2 id="h-copies">Copies out and back</h2>'
        f'<p>{escape(text)}</p><figure class="lanes">{"".join(drawn)}</figure>{_copies_table(numbers)}</section>'
    )


def _bar(stretch: Stretch, css: str) -> Bar:
    size = f", {format_size(stretch.num_bytes)}" if stretch.num_bytes else ""
    return Bar(
        stretch.start_ms,
        stretch.end_ms,
        css,
        f"{stretch.block}{size}, {stretch.start_ms:.1f} to {stretch.end_ms:.1f} ms",
    )


def _copies_table(numbers: Numbers) -> str:
    copies = numbers.copies
    rows = []
    for block in dict.fromkeys(stretch.block for stretch in (*copies.out, *copies.back, *copies.waits)):
        out, back, waits = (
            [stretch for stretch in stretches if stretch.block == block]
            for stretches in (copies.out, copies.back, copies.waits)
        )
        cells = [_sum_of(out), _sum_of(back), f"{sum(stretch.end_ms - stretch.start_ms for stretch in waits):.2f}"]
        rows.append([block or "between blocks", *cells])
    head = ["block", "out", "back", "waits ms"]
    return f"<details><summary>The same as a table</summary>{_table('Copies by block', head, rows)}</details>"


def _sum_of(stretches: Sequence[Stretch]) -> str:
    if not stretches:
        return "–"  # noqa: RUF001 - nothing, in a table
    busy_ms = sum(stretch.end_ms - stretch.start_ms for stretch in stretches)
    return f"{format_size(sum(stretch.num_bytes for stretch in stretches))} in {busy_ms:.2f} ms"


# -- other budgets -----------------------------------------------------------------------------------------------------


def _curve(numbers: Numbers) -> str:
    head = '<section aria-labelledby="h-curve"><h2 id="h-curve">Step time under other budgets</h2>'
    plan, points = numbers.plan, numbers.curve
    if not points:
        why = numbers.why_no_curve or "no other budget was solved in time"
        return f"{head}<p>There is no curve: {escape(why)}</p></section>"
    plain_ms, measured = plan.profile.step_ms, plan.measured_to_plain
    pairs = [(float(point.budget_bytes), point.step_ms / plain_ms) for point in points]
    mine = (float(min(plan.budget_bytes, plan.profile.peak_bytes)), plan.predicted_to_plain)
    low, high = min(mine[0], pairs[0][0]), max(mine[0], pairs[-1][0])
    room = 0.04 * (high - low) or 0.04 * high
    x = Axis(low - room, high + room, *_unit(high))
    ratios = [mine[1], measured or 1.0, *(ratio for _, ratio in pairs)]
    y = Axis(0.0, 1.12 * max(ratios), 1.0, "")
    if max(ratios) < 2.5:  # what differs is seen; the edge says where it begins
        more = max(*(ratio - 1 for ratio in ratios), 0.05)
        y = Axis(1 - 0.12 * more + min(0.0, *(1.1 * (ratio - 1) for ratio in ratios)), 1 + 1.2 * more, 1.0, "")
    mine_words = f"this plan, predicted: {mine[1]:.3f} with {format_size(int(mine[0]))}"
    legend = [("mine", mine_words)]
    marks = [*(Mark(a, b, "", "dot") for a, b in pairs), Mark(*mine, "", "mine")]
    if measured is not None:
        legend.append(("measured", f"this plan, measured: {measured:.3f}"))
        marks.append(Mark(mine[0], measured, "", "measured"))
    smallest = points[0]
    label = (
        f"Step time as a multiple of the plain step, over the budget. With {format_size(smallest.budget_bytes)} it is "
        f"{smallest.step_ms / plain_ms:.3f}, with {format_size(points[-1].budget_bytes)} it is "
        f"{points[-1].step_ms / plain_ms:.3f}; {'; '.join(words for _, words in legend)}."
    )
    text = (
        "Predicted, as a multiple of the plain step. "
        f"The smallest budget that can be met is about {format_size(smallest.budget_bytes)}; "
        f"from {format_size(plan.profile.peak_bytes)} on nothing has to be changed."
    )
    plot = frame(label, curve(pairs, x, y), x, y, marks=marks, css="curve-plot")
    keys = "".join(f'<span><b class="mark {css}"></b>{escape(words)}</span>' for css, words in legend)
    rows = [
        [
            format_size(point.budget_bytes),
            format_size(point.peak_bytes),
            f"{point.step_ms:.1f}",
            f"{point.step_ms / plain_ms:.3f}",
        ]
        for point in points
    ]
    this_plan, predicted = f"{format_size(plan.budget_bytes)} (this plan)", plan.predicted
    rows.append([this_plan, format_size(predicted.peak_bytes), f"{predicted.step_ms:.1f}", f"{mine[1]:.3f}"])
    table = _table("Predicted step time by budget", ["budget", "peak", "step ms", "to plain"], rows)
    return (
        f'{head}<p>{escape(text)}</p><p class="legend">{keys}</p><figure>{plot}</figure>'
        f"<details><summary>The same as a table</summary>{table}</details></section>"
    )


# -- tables ------------------------------------------------------------------------------------------------------------

_HEAD = ["saved", "swapped", "recomputed", "recompute ms"]


def _blocks(blocks: Sequence[Block]) -> str:
    folded = _folded(blocks)
    rows = [[name, *_cells(block.row)] for name, block in folded]
    parts = [
        '<section class="blocks" aria-labelledby="h-blocks"><h2 id="h-blocks">Block by block</h2>',
        _table("What each block keeps, swaps and recomputes", ["block", *_HEAD], rows),
        "<details><summary>Module by module</summary>",
    ]
    for name, block in folded:
        table = _table(f"Modules of {name}", ["module", *_HEAD], [[row.name, *_cells(row)] for row in block.modules])
        parts.append(f"<details><summary>{escape(name)}</summary>{table}</details>")
    return "".join([*parts, "</details></section>"])


def _folded(blocks: Sequence[Block]) -> list[tuple[str, Block]]:
    """Join neighbours with the same numbers, module by module, into one."""
    found: list[tuple[str, str, Block]] = []
    for block in blocks:
        if found and _alike(found[-1][2], block):
            found[-1] = (found[-1][0], block.row.name, found[-1][2])
        else:
            found.append((block.row.name, block.row.name, block))
    return [(first if first == last else f"{first} to {last}", block) for first, last, block in found]


def _alike(left: Block, right: Block) -> bool:
    rows = [left.row, *left.modules], [right.row, *right.modules]
    return [_cells(row) for row in rows[0]] == [_cells(row) for row in rows[1]]


def _cells(row: Row) -> list[str]:
    sizes = (row.saved_bytes, row.swapped_bytes, row.recomputed_bytes)
    return [*map(format_size, sizes), f"{row.recompute_ms:.2f}"]


def _table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    lines = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>' + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:]) + "</tr>"
        for row in rows
    )
    # It can be scrolled with the keyboard where it is wider than the screen.
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def _facts(numbers: Numbers) -> str:
    plan, identity = numbers.plan, numbers.plan.profile.identity
    window, prefetch = plan.setting.window_bytes, plan.setting.prefetch_bytes
    rows = [
        ["device", identity.device or ""],
        ["framework", f"{identity.framework or ''} {identity.version or ''}".strip()],
        ["batch", "" if identity.batch is None else str(identity.batch)],
        ["parameters, gradients and the like", format_size(plan.base_bytes)],
    ]
    if plan.has_swaps:
        rows.append(
            ["copies in flight", f"at most {format_size(window)} out and {format_size(prefetch)} ahead of backward"]
        )
        rows.append(["swapped at once", host_words(plan).partition(": ")[2]])
    rows += [["how good it is", text] for text in gap_words(plan)]
    table = _table("What the plan was made for", ["", ""], [row for row in rows if row[1]])
    return (
        f'<section aria-labelledby="h-facts"><h2 id="h-facts">Made for</h2><div class="facts">{table}</div>'
        '<p class="small">Pictures and curve are predicted from one profiled step; '
        "peaks and times that were measured are named so.</p></section>"
    )


def _unit(top: float) -> tuple[float, str]:
    for power, name in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if top >= 1024**power:
            return float(1024**power), name
    return 1.0, "B"
