"""What a trainer's callback says of its plan, on standard error.

One line from the first rank when training begins, and one when it ends if plans were made anew.
"""

from __future__ import annotations

import sys

from hyper_parallel.core.planner.plan.plan import MemoryPlan
from hyper_parallel.core.swap.sizes import format_size

__all__ = ["announce", "announce_replans"]


def announce(plan: MemoryPlan) -> None:
    """Print budget, peak and step time, each as predicted and as measured, on standard error, where progress
    bars are.
    """
    peak, step = (
        f"predicted peak {format_size(plan.predicted.peak_bytes)}",
        f"predicted step {plan.predicted.step_ms:.0f} ms",
    )
    to_plain = f"predicted {plan.predicted_to_plain:.2f} of the plain step's time"
    if plan.measured is not None:
        peak += f" (measured {format_size(plan.measured.peak_bytes)})"
        if plan.measured.step_ms is not None:
            step += f" (measured {plan.measured.step_ms:.0f} ms)"
        if plan.measured_to_plain is not None:
            to_plain += f" (measured {plan.measured_to_plain:.2f})"
    sys.stderr.write(
        f"hyper_parallel: planned to fit in {format_size(plan.budget_bytes)}: {peak}, {step}, "
        f"{'nothing is changed' if plan.is_empty else to_plain}; print(callback.plan) shows the table\n"
    )


def announce_replans(stats: dict[str, int]) -> None:
    """Print how often a plan was made anew, if it was. Only a rank that trains alone makes one."""
    if num_replans := stats.get("plans made anew"):
        sys.stderr.write(
            f"hyper_parallel: in training plans were made anew, {num_replans} in all: "
            "batches were larger than the planned one, or memory ran out\n"
        )
