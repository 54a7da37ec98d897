"""Plans and profiles as text for a terminal."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from hyper_parallel.core.planner.model.choices import (
    RECOMPUTE,
    SAVE,
    SWAP,
    Choice,
    kept_bytes,
    recompute_ms,
    recomputed_bytes,
    swapped_bytes,
)
from hyper_parallel.core.planner.model.identity import DeviceKind
from hyper_parallel.core.planner.model.profile import Link, Region, StepProfile
from hyper_parallel.core.swap.sizes import format_size

if TYPE_CHECKING:
    from hyper_parallel.core.planner.plan.plan import MemoryPlan

_MAX_ROWS = 60


class Table(NamedTuple):
    header: list[str]
    rows: list[list[str]]


Parts = Sequence[str | Table]  # lines and tables, in the order in which they are read


def text_of(parts: Parts) -> str:
    """Write lines and tables for a terminal."""
    return "\n".join(part if isinstance(part, str) else table(*part) for part in parts)


def html_words(text: str) -> str:
    """Write a line of prose: what stands between backticks is code."""
    return re.sub(r"`(.+?)`", r"<code>\1</code>", escape(text))


def html_of(parts: Parts) -> str:
    """Write lines and tables for a notebook: colours and fonts are its own."""
    found = []
    for part in parts:
        if isinstance(part, str):
            found.append(f"<p>{html_words(part)}</p>" if part else "")
            continue
        head = "".join(f"<th>{escape(name)}</th>" for name in part.header)
        cells = (["<td>" + escape(cell) + "</td>" for cell in row[1:]] for row in part.rows)
        rows = (
            f"<tr><th>{escape(row[0])}</th>{''.join(rest)}</tr>" for row, rest in zip(part.rows, cells, strict=True)
        )
        found.append(f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>")
    return "\n".join(filter(None, found))


def table(header: list[str], rows: list[list[str]]) -> str:
    """Write columns of equal width; numbers (all but the first column) to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        first, *rest = cells
        return "  ".join(
            [first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(rest, widths[1:], strict=True))]
        ).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])


def plan_parts(plan: MemoryPlan) -> Parts:
    """Say what is saved, recomputed and swapped, per block; and peak and time before and after."""
    profile, predicted = plan.profile, plan.predicted
    base = profile.base_bytes
    lines: list[str | Table] = [
        f"Memory plan for {profile.identity.model_words}: at most {format_size(plan.budget_bytes)}, "
        f"of which {format_size(base)} are alive when forward begins",
        "",
    ]
    if plan.is_empty:
        lines.append(f"The plain step fits: its peak is {format_size(profile.peak_bytes)}. Nothing is changed.")
        return [*lines, *notes_words(plan)]
    plain = "plain" if profile.is_plain_measured else "plain (computed)"
    rows = [
        [plain, format_size(profile.peak_bytes), "100.0%", f"{profile.step_ms:.1f}", "1.000"],
        ["predicted", *_numbers(profile, predicted.peak_bytes, predicted.step_ms, plan.predicted_to_plain)],
    ]
    if plan.measured is not None:
        times = plan.measured.step_ms, plan.measured_to_plain
        rows.append(["measured", *_numbers(profile, plan.measured.peak_bytes, *times)])
    lines.append(Table(["", "peak", "of activations", "step ms", "to plain"], rows))
    lines += time_words(plan)
    lines += ["", Table(["block", "saved", "swapped", "recomputed", "recompute ms"], _regions(plan)), ""]
    if profile.link is None:
        lines.append(nothing_swapped_words(plan))
    if plan.has_swaps:
        window, prefetch = plan.setting.window_bytes, plan.setting.prefetch_bytes
        lines.append(
            f"Copies in flight: at most {format_size(window)} out and {format_size(prefetch)} ahead of backward."
        )
        lines.append(host_words(plan))
    if not profile.is_plain_measured:
        lines.append("A plain step does not fit the device: what it would take was computed from one that recomputes.")
    lines += gap_words(plan)
    lines += notes_words(plan)
    return lines if lines[-1] else lines[:-1]


def notes_words(plan: MemoryPlan) -> list[str]:
    """Say what is unusual about what was asked for."""
    identity = plan.profile.identity
    words = []
    if identity.is_training is False and identity.framework == "mindspore":  # where a cell begins in this mode
        words.append(
            "Planned with `set_train(False)`: where training calls `model.set_train()`, call it first, and plan again."
        )
    elif identity.is_training is False:
        words.append(
            "Planned in eval mode: a model that trains in train mode, with dropout for example, is another one. "
            "Then call `model.train()` and plan again."
        )
    return [*words, *([plan.note] if plan.note else [])]


def gap_words(plan: MemoryPlan) -> list[str]:
    """Say how much better another choice could be by the prediction, where it could be seen in the table."""
    if plan.gap < _SEEN_GAP:
        return []
    return [
        "Not proved to be the best: another choice for these windows could be predicted faster, "
        f"by at most {plan.gap:.1%}."
    ]


def nothing_swapped_words(plan: MemoryPlan) -> str:
    """Say why a plan could not swap."""
    if _is_cpu(plan):
        return "Nothing is swapped: no directory is set for it, by `hp.configure_swap(disk_dir=...)` or `--swap-dir`."
    return "Nothing is swapped: there was no room to measure how fast the device copies."


def _is_cpu(plan: MemoryPlan) -> bool:
    return plan.profile.device_kind is DeviceKind.CPU


def host_words(plan: MemoryPlan) -> str:
    """Say what is needed elsewhere for what is swapped."""
    tier, used, reserved = plan.host
    where = "pinned memory of the host" if tier == "host" else "files"
    return f"Swapped at once: {format_size(used)}, in {format_size(reserved)} of {where}."


def time_words(plan: MemoryPlan) -> list[str]:
    """Say what a reader of the table has to know about its times, a sentence each."""
    by_turns = plan.measured is not None and plan.measured.plain_step_ms is not None
    words = [f"Measured steps took turns with plain ones, of {plan.plain_step_ms:.1f} ms."] if by_turns else []
    return [*words, *unlike_predicted(plan)]


def unlike_predicted(plan: MemoryPlan) -> list[str]:
    """Say why the measured time is not the predicted one: nothing where they agree."""
    predicted, to_plain, is_cpu = plan.predicted_to_plain, plan.measured_to_plain, _is_cpu(plan)
    words = []
    if to_plain is None:
        if is_cpu and plan.has_swaps:
            words.append(
                "The step time is predicted only, and on a CPU it leaves out that copies and compute share the cores."
            )
        return words
    if abs(to_plain - predicted) > _NOT_AS_PREDICTED * predicted:
        words.append(
            f"{_difference(to_plain, predicted)} {_why_slower(plan, is_cpu) if to_plain > predicted else _NOISE}"
        )
    return words


def _difference(to_plain: float, predicted: float) -> str:
    word = "Slower" if to_plain > predicted else "Faster"
    return f"{word} than predicted: {to_plain:.2f} of plain, not {predicted:.2f}."


def _why_slower(plan: MemoryPlan, is_cpu: bool) -> str:
    if is_cpu and plan.has_swaps:
        return "On a CPU copies and compute share the cores, which is not predicted; on a GPU they do not."
    if is_cpu:
        return "On a CPU what the regions' own Python takes is not predicted; the smaller the ops, the more that is."
    return _NOISE


_NOISE = "Times of a busy machine differ so much; `plan.verify(model, batch)` measures again."
_SEEN_GAP = 0.0005
_NOT_AS_PREDICTED = 0.1  # a larger difference is said


def _numbers(profile: StepProfile, peak_bytes: int, step_ms: float | None, to_plain: float | None) -> list[str]:
    part = (peak_bytes - profile.base_bytes) / max(profile.activation_peak_bytes, 1)
    times = ["" if step_ms is None else f"{step_ms:.1f}", "" if to_plain is None else f"{to_plain:.3f}"]
    return [format_size(peak_bytes), f"{part:.1%}", *times]


def _regions(plan: MemoryPlan) -> list[list[str]]:
    rows: list[list[str]] = []
    for region, decision in zip(plan.profile.regions, plan.decision, strict=True):
        sizes = (size_of(region, decision) for size_of in (kept_bytes, swapped_bytes, recomputed_bytes))
        rows.append([_name(region), *map(format_size, sizes), f"{recompute_ms(region, decision):.2f}"])
    return _folded(rows)


def _folded(rows: list[list[str]]) -> list[list[str]]:
    """Fold neighbours with the same numbers into one row."""
    folded: list[list[str]] = []
    first = ""
    for row in rows:
        if folded and folded[-1][1:] == row[1:]:
            folded[-1][0] = f"{first} to {row[0]}"
        else:
            folded.append(list(row))
            first = row[0]
    return folded


def residual_parts(profile: StepProfile, kept: Sequence[tuple[str, str, str, int]] = ()) -> Parts:
    """List what backward needs, per module and op, summed over blocks that are alike; the largest first.

    `kept`: of blocks that the profile takes as one op: path, module in it, op, bytes. They come below their block.
    """
    bytes_of: Counter[tuple[str, str]] = Counter()
    counts: Counter[tuple[str, str]] = Counter()
    ms_of: dict[tuple[str, str], float] = {}
    for region in profile.regions:
        pattern = _pattern(region)
        for given in region.inputs:
            if given.value.is_residual:
                bytes_of[pattern, "(input)"] += given.value.num_bytes
                counts[pattern, "(input)"] += 1
        for index, op in enumerate(region.ops):
            if op.is_needed:
                key = (f"{pattern}.{op.module}" if op.module else pattern), op.name
                bytes_of[key] += op.residual_bytes
                counts[key] += 1
                ms_of[key] = ms_of.get(key, 0.0) + _again_ms(region, index)
    total = sum(bytes_of.values())
    rows = [
        [f"{module}  {op}", str(counts[module, op]), format_size(num_bytes), f"{num_bytes / max(total, 1):.1%}",
         f"{ms_of.get((module, op), 0.0):.2f}" if (module, op) in ms_of else "-",
         suits(num_bytes, counts[module, op], ms_of.get((module, op)), profile.link)]
        for (module, op), num_bytes in bytes_of.most_common(_MAX_ROWS)
    ]  # fmt: skip
    within: dict[str, Counter[tuple[str, str]]] = {}
    times: Counter[tuple[str, str, str]] = Counter()
    for path, module, made_by, num_bytes in kept:
        pattern = _pattern_of(path)
        within.setdefault(pattern, Counter())[module, made_by] += num_bytes
        times[pattern, module, made_by] += 1
    for place in range(len(rows) - 1, -1, -1):
        pattern, _, name = rows[place][0].partition("  ")
        if name != "(input)":
            rows[place + 1 : place + 1] = [
                [f"  {module or '.'}  {made_by}", str(times[pattern, module, made_by]), format_size(num_bytes),
                 f"{num_bytes / max(total, 1):.1%}", "", ""]
                for (module, made_by), num_bytes in within.get(pattern, Counter()).most_common(_MAX_ROWS)
            ]  # fmt: skip
    computed = "" if profile.is_plain_measured else " (computed: it does not fit the device)"
    head = (
        f"Residuals of {len(profile.regions)} blocks: {format_size(total)}. "
        f"Peak of the plain step: {format_size(profile.peak_bytes)}{computed}, "
        f"of which {format_size(profile.base_bytes)} are alive when forward begins; {profile.step_ms:.1f} ms."
    )
    return [head, "", Table(["kept by", "times", "bytes", "part", "recompute ms", "suits"], rows)]


def _again_ms(region: Region, index: int) -> float:
    """Give the time that an op takes to run again.

    A part takes its share of its op's, as all parts come together.
    """
    op, whole = region.ops[index], region.made_with(index)
    if op.part is None:
        return op.forward_ms
    share = op.num_bytes / max(sum(region.ops[part].num_bytes for part in region.parts()[whole]), 1)
    return share * region.ops[whole].forward_ms


_SMALL_BYTES = 64 * 1024  # of one value: keeping it costs less than thinking about it


def suits(num_bytes: int, count: int, recompute_ms: float | None, link: Link | None) -> Choice:
    """Choose what costs least for values of one kind, each taken by itself: a plan weighs them against each other."""
    if num_bytes < count * _SMALL_BYTES:
        return SAVE
    if recompute_ms is None:  # an input of the block: nothing that could be run again
        return SAVE if link is None else SWAP
    if link is None:
        return RECOMPUTE
    copy_ms = num_bytes / link.out_bytes_per_ms + num_bytes / link.in_bytes_per_ms
    return RECOMPUTE if recompute_ms <= copy_ms else SWAP


def _name(region: Region) -> str:
    return region.path if region.call == 0 else f"{region.path}, call {region.call + 1}"


def _pattern(region: Region) -> str:
    """Leave the number out of a block's path: blocks of one list are alike."""
    return _pattern_of(region.path)


def _pattern_of(path: str) -> str:
    return ".".join("*" if part.isdecimal() else part for part in path.split("."))
