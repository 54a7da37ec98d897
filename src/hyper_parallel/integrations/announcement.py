"""What a trainer's callback says of its plan: one line, from the first rank."""

from __future__ import annotations

import sys

from hyper_parallel.core.planner.plan.plan import MemoryPlan
from hyper_parallel.core.swap.sizes import format_size

__all__ = ["announce"]


def announce(plan: MemoryPlan) -> None:
    """Budget, peak and step time, on standard error, where progress bars are."""
    peak, step = plan.predicted.peak_bytes, f"a step takes {plan.predicted.step_ms:.0f} ms"
    done = "nothing is changed" if plan.is_empty else f"{plan.predicted_to_plain:.2f} of the plain step's time"
    sys.stderr.write(
        f"hyper_parallel: planned to fit in {format_size(plan.budget_bytes)}: predicted peak {format_size(peak)}, {step}, {done}"
        " (print(callback.plan) shows the table)\n"
    )
