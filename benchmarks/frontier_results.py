"""What `frontier.py` has measured: a file, a table, and whether it is what was promised."""

from __future__ import annotations

import datetime
import json
import math
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from results_state import ROOT, WATCHED, digest, earlier_results

import hyper_parallel as hp
from activation import commit

Row: TypeAlias = dict[str, Any]

FULL = "PyTorch full checkpoint"
# Plans are made by the planner: it belongs to what is measured.
SOURCES = (*WATCHED, "src/hyper_parallel/core/planner", "src/hyper_parallel/platform/torch/planner")
_NOISE = 1.01  # of times: clocks drift by about a hundredth
_COLUMNS = (
    "model", "way", "predicted peak", "peak GiB", "of plain", "predicted time", "step ms", "to plain", "to full", "solve + prove s", "solved",
    "swapped GB", "stall in / out ms", "fallbacks",
)  # fmt: skip


class Results:
    """Rows, and a file that is written anew after each: what was measured stays, whatever happens to the rest."""

    def __init__(self, device: str, *, commit: str | None, out: Path | None, measured_now: Sequence[str]) -> None:
        self._device = device
        self._commit = commit
        self._out = out
        self._measured_now = frozenset(measured_now)
        self._digest = digest(watched=SOURCES) if Path(hp.__file__).resolve().is_relative_to(ROOT) else None
        self.rows: list[Row] = []
        self.settings: dict[str, Any] = {}
        self.largest: list[Row] = []
        self.measured = {name: self._when() for name in measured_now}  # by model: when, and with which sources
        self.num_failures = 0

    def keep(self, path: Path) -> None:
        """Rows of an earlier file, but for the models that are measured now; `measured` says which sources they are of."""
        data = earlier_results(path, self._head(), ("device", "torch"))
        own = {name: data[name] for name in ("date", "commit", "digest")}
        for model in {row["model"] for row in (*data["rows"], *data["largest"])} - self._measured_now:
            self.measured[model] = data.get("measured", {}).get(model, own)
        self.rows += [row for row in data["rows"] if row["model"] not in self._measured_now]
        self.largest += [row for row in data["largest"] if row["model"] not in self._measured_now]
        self.settings |= {name: each for name, each in data["setting"].items() if name not in self._measured_now}

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(line(row), flush=True)
        self._write()

    def add_largest(self, row: Row) -> None:
        self.largest.append(row)
        print(largest_line(row), flush=True)
        self._write()

    def as_dict(self) -> dict[str, Any]:
        models = dict.fromkeys(row["model"] for row in self.rows)
        return {
            **self._head(), "measured": self.measured, "setting": self.settings, "rows": self.rows, "largest": self.largest,
            "checks": {model: checks([row for row in self.rows if row["model"] == model]) for model in models},
        }  # fmt: skip

    def _head(self) -> dict[str, Any]:
        return {
            **self._when(), "watched": list(SOURCES),
            "device": torch.cuda.get_device_name() if self._device == "cuda" else platform.machine(), "torch": torch.__version__,
        }  # fmt: skip

    def _when(self) -> dict[str, Any]:
        return {
            "date": datetime.date.today().isoformat(), "commit": self._commit or commit(), "digest": self._digest,
        }  # fmt: skip

    def _write(self) -> None:
        if self._out is not None:
            self._out.write_text(json.dumps(self.as_dict(), indent=1) + "\n")


# -- what is promised ------------------------------------------------------------------------------------------------------


def checks(rows: Sequence[Row]) -> dict[str, bool | None]:
    """What is promised of one model's plans; None: nothing was measured that could show it."""
    asked = [row for row in rows if row["kind"] == "plan" and "skipped" not in row]
    plans = [row for row in asked if "peak_gib" in row]
    by_way = {row["way"]: row for row in rows if "peak_gib" in row}
    full = by_way.get(FULL)
    rivals = [(row, by_way[row["against"]]) for row in plans if row.get("against") in by_way]
    fastest = {
        rival["way"]: min((row for row, other in rivals if other is rival), key=lambda row: row["ratio"] or math.inf)
        for _, rival in rivals
    }
    return {
        "nothing failed": not any("traceback" in row for row in rows),
        "every plan keeps its budget": _all(row["peak_gib"] <= row["budget_gib"] for row in plans),
        "no plan is slower than full checkpoint": _all(
            _is_not_slower(row, full) if row.get("to_full") is None else row["to_full"] <= _NOISE
            for row in plans
            if full is not None and row["budget_gib"] >= full["peak_gib"]
        ),
        "a plan for the memory of full checkpoint is not larger": _all(
            full is not None and "peak_gib" in row and row["peak_gib"] <= full["peak_gib"]
            for row in asked
            if row["budget"] == "min"
        ),
        "no plan is slower than torch.compile with as much memory": _all(_is_not_slower(*pair) for pair in rivals),
        "the fastest plan in the memory of each budget of torch.compile is not slower": _all(
            _is_not_slower(row, by_way[name]) for name, row in fastest.items()
        ),
        "predicted peaks are within 2 % or 128 MiB": _all(is_near(row) for row in plans),
        "predicted times are within 5 %": _all(
            abs(row["time_deviation"]) <= 0.05 for row in plans if row["time_deviation"] is not None
        ),
    }


def _all(found: Iterable[bool]) -> bool | None:
    known = list(found)
    return all(known) if known else None


def _is_not_slower(row: Row, other: Row) -> bool:
    if row["ratio"] is None or other["ratio"] is None:
        return False
    return bool(row["ratio"] <= other["ratio"] * _NOISE)


def is_near(row: Row) -> bool:
    """Whether the peak was predicted as closely as is promised."""
    return bool(abs(row["peak_deviation_gib"]) <= max(0.02 * row["peak_gib"], 1 / 8))


# -- as a table ------------------------------------------------------------------------------------------------------------


def header() -> str:
    return f"{_cells(_COLUMNS)}\n|{'---|' * len(_COLUMNS)}"


def line(row: Row) -> str:
    if "peak_gib" not in row:
        cells = [row["model"], row["way"], why_not(row)]
        return _cells([*cells, *[""] * (len(_COLUMNS) - len(cells))])
    is_plan = row["kind"] == "plan"
    measured = [f"{row['peak_gib']:.3f}", _number(row["of_plain"], ".1%")]
    timed = [f"{row['step_ms']:.1f}", _number(row["ratio"], ".3f")]
    if not is_plan:
        return _cells([row["model"], row["way"], "", *measured, "", *timed, *[""] * 6])
    return _cells(
        [row["model"], row["way"], f"{row['predicted_peak_gib']:.3f}", *measured, f"{row['predicted_ratio']:.3f}", *timed,
         _number(row.get("to_full"), ".3f"), f"{row['seconds']:.1f}", str(row["num_solved"]), f"{row['out_gb']:.2f}", f"{row['load_stall_ms']:.1f} / {row['offload_stall_ms']:.1f}",
         str(row["num_fallbacks"])]
    )  # fmt: skip


def why_not(row: Row) -> str:
    """Why a row has no figures."""
    said: str = row.get("skipped") or row["error"].partition("\n")[0]
    return f"{said} (smallest: {row['smallest_gib']:.3f} GiB)" if "smallest_gib" in row else said


def largest_line(row: Row) -> str:
    if "n" not in row:
        return f"{row['model']}: {why_not(row)}"
    return (
        f"{row['model']}: in {row['budget_gib']:.2f} GiB a plain step has {row['plain_n']} x {row['unit']}, a planned one {row['n']} "
        f"({row['peak_gib']:.2f} GiB, {row['times_plain']:.1f} times as many, time per unit {row['time_per_unit_ratio']:.3f} of plain); "
        f"{row['next_n']}: {row['next']} ({row['seconds']:.0f} s)"
    )


def checks_text(result: dict[str, Any]) -> str:
    words = {True: "yes", False: "NO", None: "not measured"}
    return "\n".join(
        f"{model}: {name}: {words[found]}" for model, each in result["checks"].items() for name, found in each.items()
    )


def _cells(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
