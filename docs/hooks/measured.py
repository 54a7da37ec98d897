"""Tables of what was measured, made from `benchmarks/results/*.json`, so that no figure on a page can differ from its source.

A line `<!-- measured: NAME -->` in a page becomes the table or picture of that name when the site is built. The README, which is read as it
stands, has its table between that line and `<!-- end of what was measured -->`:

    python docs/hooks/measured.py          write the README's table anew, after new measurements
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
_MARK = re.compile(r"^<!-- measured: ([\w -]+) -->$", re.MULTILINE)
_README_MARK = re.compile(r"(<!-- measured: summary -->\n).*?(\n<!-- end of what was measured -->)", re.DOTALL)

sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "benchmarks"), str(ROOT / "src")]

import frontiers as frontiers_of  # noqa: E402 - beside this file, which no package holds
import pictures  # noqa: E402
import promises as promised  # noqa: E402
import results_state  # noqa: E402

from hyper_parallel.platform.contract import OPERATIONS, Section  # noqa: E402


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs for every page."""
    return _MARK.sub(lambda found: NAMES[found[1]](), markdown)


def summary() -> str:
    """The README's table: three rows, since a reader of it has not heard of any other way yet."""
    rows = _rows("activation_h200")
    plain = next(row for row in rows if row["kind"] == "plain")
    full = next(row for row in rows if row["mode"] == "PyTorch full checkpoint")
    lines = [["plain", f"{plain['peak_gib']:.1f} GiB", "1.00"]]
    lines.append(["every block recomputed, by PyTorch's checkpoint", *_shares(full)])
    wanted = ", ".join(row["budget"] for row in _plans())
    lines.append(_together(f"`plan_memory` for {wanted} %", _plans()))
    return _table(["", "memory of activations", "step time"], lines)


def frontier() -> str:
    """Step time over memory, all ways in one picture."""
    ours, planned = [row for row in _rows("activation_h200") if row["kind"] == "ours"], _plans()
    peers = [row for row in _rows("activation_h200") if row["kind"] == "peer"]
    series = {
        pictures.BY_HAND: ours,
        pictures.PLANNED: planned,
        pictures.CHECKPOINT: peers,
        pictures.COMPILED: [row for row in _rows("activation_h200_compile") if row["kind"] == "peer"],
    }
    points = {
        name: [(row["of_plain"] * 100, row["to_plain"], row["mode"]) for row in rows] for name, rows in series.items()
    }
    return pictures.frontier(points)


def activation() -> str:
    return _activation_table("activation_h200")


def long_sequence() -> str:
    return _activation_table("activation_h200_long")


def compiled() -> str:
    return _activation_table("activation_h200_compile")


def frontiers() -> str:
    """A picture and a table for each model of `benchmarks/frontier.py`; it takes minutes of an H200, and may not have been run yet."""
    if not (RESULTS / "frontier_h200.json").exists():
        return "*Not measured yet: `python benchmarks/frontier.py --out benchmarks/results/frontier_h200.json`.*"
    return frontiers_of.section(_read("frontier_h200"), _table)


def small_model() -> str:
    rows = _read("small_model_h200")["rows"]
    lines = [[row["mode"], f"{row['step_ms']:.1f}", f"{row['to_plain']:.2f}"] for row in rows]
    return _table(["mode", "step ms", "to plain"], lines)


def distributed_ops() -> str:
    rows = _read("distributed_cpu")["ops"]
    lines = [
        [f"`{row['op']}`", *(f"{row[who] - row['plain']:.1f}" for who in ("ours", "PyTorch's")), f"{row['plain']:.1f}"]
        for row in rows
    ]
    return _table(["op", "ours adds µs", "PyTorch's DTensor adds µs", "the plain op µs"], lines)


def distributed_blocks() -> str:
    rows = _read("distributed_cpu")["blocks"]
    lines = [
        [f"width {row['width']}, length {row['length']}", f"{row['ours over plain']:.2f}", f"{row[_PEER]:.2f}"]
        for row in rows
    ]
    return _table(["one Llama block, forward and backward", "ours, to plain", "PyTorch's DTensor, to plain"], lines)


_PEER = "PyTorch's over plain"


def communication() -> str:
    """What our call costs over the framework's own: the middle and the worst of all calls, by size."""
    rows = _read("communication_cpu")["rows"]
    lines = []
    for framework in dict.fromkeys(row["framework"] for row in rows):
        for size in dict.fromkeys(row["size"] for row in rows):
            ratios = sorted(
                row["ratio"]
                for row in rows
                if (row["framework"], row["size"]) == (framework, size) and row["ratio"] is not None
            )
            if ratios:
                lines.append(
                    [framework, size, str(len(ratios)), f"{ratios[len(ratios) // 2]:.2f}", f"{ratios[-1]:.2f}"]
                )
    return _table(["framework", "size", "calls", "middle, to its own", "worst"], lines)


def stress() -> str:
    checks = _read("cuda_stress_h200")["checks"]
    lines = [[name, check["outcome"].lower(), check["text"]] for name, check in checks.items()]
    return _table(["check", "", "what was seen"], lines)


def sources() -> str:
    """Every results file with its commit, and whether the code it speaks of is still the same."""
    lines = []
    for each in results_state.states(ROOT):
        if each.name.endswith(".json"):
            data = json.loads((RESULTS / each.name).read_text(encoding="utf-8"))
            about = data.get("about", data)
            versions = data.get("versions") or {"PyTorch": about.get("torch", "")}
            lines.append(
                [f"`{each.name}`", (about.get("date") or about.get("when", ""))[:10], about.get("device", ""),
                 ", ".join(f"{name} {version}" for name, version in versions.items()), " ".join(each.commits), each.state]
            )  # fmt: skip
    return _table(["file of `benchmarks/results`", "date", "device", "with", "commit", "the code since"], lines)


def promises() -> str:
    head = ["what could go wrong", "in every test run", "in full", "of", "shown by"]
    return _table(head, promised.rows())


def platform() -> str:
    """Every operation of the platform, and where its tests passed: the data of `hyper-parallel doctor --platform`."""
    columns = json.loads((ROOT / "src/hyper_parallel/platform/outcomes.json").read_text(encoding="utf-8"))["columns"]
    parts = []
    for section in Section:
        lines = [
            [f"`{each.name}`", each.summary, *(_outcome(column["cells"].get(each.name)) for column in columns.values())]
            for each in OPERATIONS
            if each.section is section
        ]
        head = ["operation", "", *(column["title"] for column in columns.values())]
        parts.append(f"### {section.value}\n\n{_table(head, lines)}")
    return "\n\n".join(parts)


def _outcome(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "not tested"
    return f"comes with {cell['text']}" if cell["state"] == "comes with" else str(cell["state"])


def timeline() -> str:
    return pictures.timeline()


NAMES: dict[str, Callable[[], str]] = {
    "summary": summary,
    "frontier": frontier,
    "activation": activation,
    "long sequence": long_sequence,
    "compiled": compiled,
    "frontiers": frontiers,
    "small model": small_model,
    "distributed ops": distributed_ops,
    "distributed blocks": distributed_blocks,
    "communication": communication,
    "stress": stress,
    "sources": sources,
    "promises": promises,
    "platform": platform,
    "timeline": timeline,
}


def readme_with_what_was_measured(text: str) -> str:
    """The README with its table made anew."""
    return _README_MARK.sub(lambda found: found[1] + summary() + found[2], text)


def _read(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return data


def _rows(name: str) -> list[dict[str, Any]]:
    """What was measured, each with its memory and time against the plain run of the same file."""
    rows = [row for row in _read(name)["rows"] if "skipped" not in row]
    plain = next(row for row in rows if row["kind"] == "plain")
    return [
        {
            **row,
            "of_plain": row["peak_gib"] / plain["peak_gib"],
            "to_plain": row["step_ms"] / row.get("plain_ms", plain["step_ms"]),
        }
        for row in rows
    ]


def _plans() -> list[dict[str, Any]]:
    """Of the model of `activation.py`, for percentages."""
    return [
        {**row, "mode": f"budget {row['budget']} %", "of_plain": row["peak_gib"] / row["plain_peak_gib"], "to_plain": row["ratio"]}
        for row in _read("frontier_h200")["rows"]
        if row["model"] == "llama" and row["kind"] == "plan" and row["budget"] != "min" and "peak_gib" in row
    ]  # fmt: skip


def _activation_table(name: str) -> str:
    lines = []
    for row in _rows(name):
        moved = f"{row['out_gb']:.1f} / {row['in_gb']:.1f}" if row["out_gb"] else ""
        lines.append(
            [row["mode"], f"{row['peak_gib']:.1f}", f"{row['of_plain']:.1%}", f"{row['step_ms']:.0f}", f"{row['to_plain']:.3f}",
             moved, "" if row.get("to_bound") is None else f"{row['to_bound']:.3f}", row.get("gradients", "")]
        )  # fmt: skip
    head = ["mode", "peak GiB", "of plain", "step ms", "to plain", "GB out / in", "to the bound", "gradients"]
    return _table(head, lines)


def _shares(row: dict[str, Any]) -> tuple[str, str]:
    return f"{row['of_plain'] * 100:.0f} %", f"{row['to_plain']:.2f}"


def _together(name: str, rows: list[dict[str, Any]]) -> list[str]:
    """Several measurements in one line of a table."""
    memory = " / ".join(f"{row['of_plain'] * 100:.0f}" for row in rows)
    return [name, f"{memory} %", " / ".join(f"{row['to_plain']:.2f}" for row in rows)]


def _table(head: list[str], lines: list[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(readme_with_what_was_measured(readme.read_text(encoding="utf-8")), encoding="utf-8")
