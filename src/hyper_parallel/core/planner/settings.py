"""How much memory a plan gives to copies in flight: the windows it tries."""

from __future__ import annotations

from typing import NamedTuple

from hyper_parallel.core.planner.profile import StepProfile

MIB = 1024**2


class Setting(NamedTuple):
    """Of the swap engine, while a plan is applied."""

    window_bytes: int
    prefetch_bytes: int


def candidates(profile: StepProfile) -> list[Setting]:
    """From small to large. No window is smaller than the largest storage that may be swapped: that one passes in any case."""
    sizes = [
        value.num_bytes for region in profile.regions for op in region.ops if "swap" in op.choices for value in op.makes
    ]
    sizes += [each.value.num_bytes for region in profile.regions for each in region.inputs if each.may_swap]
    if not sizes or profile.link is None:
        return [Setting(MIB, MIB)]
    largest = max(sizes)
    small = sorted({size for size in sizes if size <= largest})[len(set(sizes)) // 2]  # a storage of the middle size
    found = {
        Setting(max(largest, factor * small), max(largest, prefetch * small))
        for factor in (1, 2)
        for prefetch in (1, 2, 4)
    }
    found.add(Setting(largest, largest))
    return sorted(found)
