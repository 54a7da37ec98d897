"""Ours beside PyTorch's own ways to use less memory: peak, time and equal gradients of one small transformer."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Protocol

from rich.console import Console
from rich.table import Table

from hyper_parallel.cli.build import check_budget_option, users_stdout
from hyper_parallel.cli.demo import DemoTrainer
from hyper_parallel.core.planner.plan.plan import MemoryPlan
from hyper_parallel.core.planner.planning import plan_memory
from hyper_parallel.core.swap.config import configure_swap
from hyper_parallel.core.swap.sizes import format_size
from hyper_parallel.platform import get_torch_platform
from hyper_parallel.platform.selection import backend


class Row(NamedTuple):
    name: str
    peak_bytes: int  # above what is alive when forward begins
    of_plain: float
    step_ms: float
    to_plain: float
    is_equal: bool  # gradients are those of the plain step, bit for bit

    def as_dict(self) -> dict[str, Any]:
        return self._asdict()


class Baseline(Protocol):
    """One model of the comparison, trained in one way; it lives until `end`."""

    def measured(self) -> tuple[int, list[Any]]:
        """Run one step; return its highest point above its beginning, and its gradients."""

    def step_ms(self) -> float: ...

    def end(self) -> None: ...


class BenchBackend(Protocol):
    """What the benchmark asks of a framework."""

    folder: ClassVar[str] = "demo.baselines"

    def is_cpu(self) -> bool: ...

    def trainer(self) -> DemoTrainer: ...

    def baselines(self, plan: MemoryPlan) -> Mapping[str, Baseline]:
        """Make what is compared, by the name that the table shows; the plain model comes first."""

    def are_equal(self, left: list[Any], right: list[Any]) -> bool: ...


def run_bench(console: Console, num_rounds: int, budget: str) -> list[Row]:
    """Measure every baseline. Each takes one step per round, in turn; the median of its steps counts."""
    check_budget_option(budget)
    bench = backend(get_torch_platform(), BenchBackend, "hyper-parallel bench")
    with tempfile.TemporaryDirectory(prefix="hyper-parallel-bench-") as directory:
        # On a CPU activations are swapped to files, so that swapping is real there, too.
        setting = configure_swap(disk_dir=directory) if bench.is_cpu() else None
        try:
            with console.status("planning …"), users_stdout():
                trainer = bench.trainer()
                plan = plan_memory(trainer.model, trainer.batch(), budget=budget, progress=False)
            baselines = bench.baselines(plan)
            times: dict[str, list[float]] = {name: [] for name in baselines}
            peaks, gradients = {}, {}
            for number in range(num_rounds + 1):
                for name, baseline in baselines.items():
                    with console.status(f"{name}, step {number} of {num_rounds} …"):
                        if number == 0:
                            peaks[name], gradients[name] = baseline.measured()
                        else:
                            times[name].append(baseline.step_ms())
            for baseline in baselines.values():
                baseline.end()
        finally:
            if setting is not None:
                setting.undo()
    plain = next(iter(baselines))
    middle = {name: statistics.median(taken) for name, taken in times.items()}
    return [
        Row(
            name,
            peaks[name],
            peaks[name] / max(peaks[plain], 1),
            middle[name],
            middle[name] / middle[plain],
            bench.are_equal(gradients[name], gradients[plain]),
        )
        for name in baselines
    ]


def show_bench(console: Console, rows: list[Row]) -> None:
    table = Table(title="One training step, side by side", title_justify="left")
    for name in ("", "activation peak", "of plain", "step", "to plain", "gradients"):
        table.add_column(name, justify="left" if not name else "right")
    for row in rows:
        table.add_row(
            row.name,
            format_size(row.peak_bytes),
            f"{row.of_plain:.0%}",
            f"{row.step_ms:.0f} ms",
            f"{row.to_plain:.2f}",
            "equal" if row.is_equal else "[red]differ[/]",
        )
    console.print(table)
    console.print(
        "On a CPU swapping goes to files, and copies share the cores with compute. For a GPU see docs/performance.md."
    )
