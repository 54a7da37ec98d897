"""What is said where no plan fits: with which blocks, what takes the memory, and what helps against that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.planner.model.problem import Peak
from hyper_parallel.core.planner.model.profile import StepProfile
from hyper_parallel.core.swap.sizes import format_size

_BETWEEN = "between forward and backward (the loss)"
_SMALLER = "make the batch or the sequence smaller"
Suggest = Callable[..., list[str]]  # patterns of other blocks: inside of the one that is named, or outside of all


class BudgetError(ArgumentError):
    """No decision fits into the budget.

    `smallest_bytes` is the smallest budget that can be met with these blocks; 0 where that is not known. `peak`: what
    that one is made of, where that is known.
    """

    def __init__(self, what: str, *, smallest_bytes: int = 0, peak: Peak | None = None, **parts: Any) -> None:
        super().__init__(what, **parts)
        self.smallest_bytes = smallest_bytes
        self.peak = peak

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, (cls, what, parts) = super().__reduce__()
        return rebuild, (cls, what, {**parts, "smallest_bytes": self.smallest_bytes, "peak": self.peak})


def budget_error(profile: StepProfile, budget_bytes: int, peak: Peak) -> BudgetError:
    """Make the error that says that even the smallest peak of all decisions is above the budget."""
    return BudgetError(
        "No choice of what to save, swap and recompute fits into the budget.",
        expected=f"at least {peak.num_bytes} bytes ({format_size(peak.num_bytes)})",
        got=f"{budget_bytes} ({format_size(budget_bytes)})",
        where=made_of(profile, peak),
        do=f"Raise the budget, or {_SMALLER}.",
        smallest_bytes=peak.num_bytes,
        peak=peak,
    )


def made_of(profile: StepProfile, peak: Peak) -> str:
    """Say in words when the peak is, and what is alive then; the largest first."""
    where = _BETWEEN if peak.region is None else f"{peak.moment} of {profile.regions[peak.region].path}"
    parts = {
        "alive when forward begins": peak.base_bytes,
        "kept outside of all blocks": peak.outside_bytes,
        "kept by the blocks before": peak.kept_bytes,
        "by itself": peak.own_bytes,
        "saved or swapped to cut recomputation short": peak.extra_bytes,
        "for copies in flight": peak.in_flight_bytes,
        "of margin": peak.margin_bytes,
    }
    largest = sorted(((num, name) for name, num in parts.items() if num), key=lambda part: -part[0])
    return f"{where}: " + ", ".join(f"{format_size(num)} {name}" for num, name in largest)


def blocks_words(profile: StepProfile) -> str:
    """Say which blocks are planned: "8 blocks are planned: layers.0 to layers.7"."""
    paths = list(dict.fromkeys(region.path for region in profile.regions))
    if len(paths) == 1:
        return f"one block is planned: {paths[0]}"
    named = ", ".join(paths) if len(paths) <= 3 else f"{paths[0]} to {paths[-1]}"
    return f"{len(paths)} blocks are planned: {named}"


def advice(profile: StepProfile, budget_bytes: int, peak: Peak | None, suggest: Suggest | None) -> str:
    """Say one thing to do about what takes most of the memory."""
    paths = {region.path for region in profile.regions}
    if peak is not None and peak.base_bytes >= budget_bytes:
        return (
            f"Raise the budget: {format_size(peak.base_bytes)} are parameters, gradients, optimizer state and batch, "
            "which no plan makes smaller. "
            "Or use an optimizer with less state, or train fewer parameters."
        )
    if len(paths) == 1:
        (path,) = paths
        patterns = (suggest(path) if suggest is not None else []) or ["encoder.layer.*"]
        return (
            f"Raise the budget, or name smaller blocks, such as {_regions(patterns)}: "
            f"{path} is the only one, and is planned as a whole."
        )
    if peak is None:
        return f"Raise the budget, or {_SMALLER}."
    parts = {
        "outside": peak.outside_bytes,
        "kept": peak.kept_bytes,
        "own": peak.own_bytes + peak.extra_bytes,
        "copies": peak.in_flight_bytes,
    }
    largest = max(parts, key=lambda name: parts[name])
    in_blocks = sum(region.residual_bytes for region in profile.regions)
    if largest == "outside" or (largest == "own" and 2 * in_blocks < profile.activation_peak_bytes):
        lists = [
            pattern
            for pattern in (suggest() if suggest is not None else [])
            if pattern.endswith(".*") or peak.region is not None
        ]
        if lists:
            return (
                f"Most is kept outside of the blocks. Name what holds it: {_regions(lists)}. "
                f"Or raise the budget, or {_SMALLER}."
            )
    if largest == "own" and peak.region is not None:
        patterns = suggest(profile.regions[peak.region].path) if suggest is not None else []
        if patterns:
            return f"Smaller blocks may need less: {_regions(patterns)}. Or raise the budget, or {_SMALLER}."
    if largest in ("own", "outside") and peak.region is None:
        return (
            f"Most is taken {_BETWEEN}, where nothing is planned: "
            f"{_SMALLER}, compute the loss in parts, or raise the budget."
        )
    if profile.link is None and (largest == "kept" or peak.kept_bytes >= peak.num_bytes - budget_bytes):
        kept = f"{format_size(peak.kept_bytes)} are what blocks keep of their inputs"
        return f"{kept}, which can be swapped: `hp.configure_swap(disk_dir=...)`. Or raise the budget, or {_SMALLER}."
    return f"Raise the budget, or {_SMALLER}."


def _regions(patterns: Sequence[str]) -> str:
    return "regions=[" + ", ".join(f'"{pattern}"' for pattern in patterns) + "]"
