"""What `benchmarks/frontier.py` has measured, as a picture and a table for each model. Reads its results, imports nothing of the package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pictures  # beside this file, which no package holds

Row = dict[str, Any]
_SERIES = {"plan": pictures.PLANNED, "peer": pictures.CHECKPOINT, "compiled": pictures.COMPILED}
_WORDS = {True: "yes", False: "**no**", None: "not measured"}
_TITLES = {
    "llama": "Llama-3 blocks",
    "gpt2": "GPT-2 with dropout, Hugging Face",
    "moe": "Mixture of experts",
    "hf_llama": "Llama with its head, Hugging Face",
    "llama compiled": "Llama-3 blocks, compiled",
}


def picture(result: dict[str, Any]) -> str:
    """All models in one SVG file."""
    return pictures.frontiers(
        {_title(result, model): _points(rows) for model, rows in _by_model(result).items()}, is_file=True
    )


def section(result: dict[str, Any], table: Callable[[list[str], list[list[str]]], str]) -> str:
    """Markdown: a picture and a table for each model, what was promised, and the largest batches."""
    parts = []
    for model, rows in _by_model(result).items():
        title = _title(result, model)
        drawn = pictures.frontiers({title: _points(rows)})
        lines = [_line(row) for row in rows]
        head = ["way", "predicted peak", "peak", "predicted time", "time", "swapped GB"]
        when = result.get("measured", {}).get(model, result)
        parts += [
            f"### {_TITLES.get(model, model)}",
            f"{when['date']}, commit {when['commit']}.",
            drawn,
            table(head, lines),
        ]
    names = list(dict.fromkeys(name for each in result["checks"].values() for name in each))
    lines = [
        [name, *(_WORDS[each.get(name)] for each in result["checks"].values())]
        for name in names
    ]  # fmt: skip
    parts += ["### What is promised", table(["", *(_TITLES.get(each, each) for each in result["checks"])], lines)]
    if result["largest"]:
        parts += ["### The largest batch", _largest(result["largest"], table)]
    return "\n\n".join(parts)


def _by_model(result: dict[str, Any]) -> dict[str, list[Row]]:
    rows = [row for row in result["rows"] if row["kind"] in ("plain", *_SERIES)]
    return {
        model: [row for row in rows if row["model"] == model] for model in dict.fromkeys(row["model"] for row in rows)
    }


def _title(result: dict[str, Any], model: str) -> str:
    sizes = result["setting"].get(model, {})
    named = ", ".join(f"{sizes[name]} {name}" for name in ("blocks", "experts") if name in sizes)
    shape = f"{named}, dim {sizes.get('dim')}, length {sizes.get('length')}, batch {sizes.get('batch')}"
    return f"{_TITLES.get(model, model)}: {shape}" if sizes else _TITLES.get(model, model)


def _points(rows: list[Row]) -> pictures.Points:
    found: pictures.Points = {}
    for row in rows:
        if row["kind"] in _SERIES and row.get("ratio") is not None:
            point = (row["of_plain"] * 100, row["ratio"], _label(row))
            found.setdefault(_SERIES[row["kind"]], []).append(point)
    return {name: found[name] for name in pictures.SERIES if name in found}


def _label(row: Row) -> str:
    if row.get("against"):
        return f"plan on {row['on']}, {row['budget'].replace('that of', 'as')}"
    words: str = row["way"].removeprefix("PyTorch ").removeprefix("plan, ").removeprefix("torch.compile, ")
    return {"memory of full checkpoint": "as full", "full checkpoint": "full"}.get(words, words)


def _line(row: Row) -> list[str]:
    if "peak_gib" not in row:
        said = row.get("skipped") or row["error"].partition("\n")[0]
        smallest = f" Smallest: {row['smallest_gib']:.2f} GiB" if "smallest_gib" in row else ""
        return [row["way"], "", f"{said}{smallest}", "", "", ""]
    if row["kind"] == "plain":
        return [row["way"], "", f"{row['peak_gib']:.2f} GiB", "", f"{row['step_ms']:.0f} ms", ""]
    peak, time = f"{row['peak_gib']:.2f} GiB{_share(row)}", "" if row["ratio"] is None else f"{row['ratio']:.3f}"
    if row["kind"] != "plan":
        return [row["way"], "", peak, "", time, ""]
    predicted = f"{row['predicted_peak_gib']:.2f} GiB"
    if row.get("to_full") is not None:
        time += f" ({row['to_full']:.3f} of full checkpoint, by turns)"
    return [row["way"], predicted, peak, f"{row['predicted_ratio']:.3f}", time, f"{row['out_gb']:.1f}"]


def _share(row: Row) -> str:
    return "" if row["of_plain"] is None else f", {row['of_plain']:.1%}"


def _largest(rows: list[Row], table: Callable[[list[str], list[list[str]]], str]) -> str:
    lines = [
        [row["model"].removesuffix(" largest"), f"{row['budget_gib']:.2f} GiB", f"{row['plain_n']} x {row['unit']}", f"{row['n']} x {row['unit']}",
         f"{row['peak_gib']:.2f} GiB", f"{row['time_per_unit_ratio']:.3f}", f"{row['next_n']}: {row['next']}"]
        if "n" in row
        else [row["model"], row.get("skipped") or row["error"].partition("\n")[0], "", "", "", "", ""]
        for row in rows
    ]  # fmt: skip
    head = ["model", "memory", "plain", "under a plan", "peak", "time per unit, to plain", "the next size"]
    return table(head, lines)
