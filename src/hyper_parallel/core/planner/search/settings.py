"""How much memory a plan gives to copies in flight: the windows it tries."""

from __future__ import annotations

from typing import Any, NamedTuple

from hyper_parallel.core.planner.model.choices import SWAP
from hyper_parallel.core.planner.model.profile import StepProfile, check_kind

MIB = 1024**2


class Setting(NamedTuple):
    """Of the swap engine, while a plan is applied.

    `ahead_bytes`: for each region, what may be loaded for others during its backward. It is at least `prefetch_bytes`,
    and more where the region leaves more room. Empty: the same for all, as the engine decides.
    """

    window_bytes: int
    prefetch_bytes: int
    ahead_bytes: tuple[int, ...] = ()

    @classmethod
    def from_dict(cls, data: dict[str, Any], *, num_regions: int) -> Setting:
        """What `_asdict` gave, from a file.

        Raises:
            TypeError, ValueError: it is not that, or for another number of regions.
        """
        found = cls(data["window_bytes"], data["prefetch_bytes"], tuple(data.get("ahead_bytes", ())))
        for name, kind in (("window_bytes", "int"), ("prefetch_bytes", "int"), ("ahead_bytes", "tuple[int, ...]")):
            check_kind(getattr(found, name), kind, f"`{name}`")
        if len(found.ahead_bytes) not in (0, num_regions):
            raise ValueError(f"`ahead_bytes` has {len(found.ahead_bytes)} numbers, for {num_regions} regions")
        return found

    @property
    def in_flight_bytes(self) -> int:
        return self.window_bytes + self.prefetch_bytes


def swapped_sizes(profile: StepProfile) -> set[int]:
    """The sizes of storages that may be swapped."""
    sizes = {
        value.num_bytes for region in profile.regions for op in region.ops if SWAP in op.choices for value in op.makes
    }
    sizes |= {each.value.num_bytes for region in profile.regions for each in region.inputs if each.may_swap}
    return sizes - {0}


def candidates(profile: StepProfile) -> list[Setting]:
    """From large to small.

    What is made in a burst wants room in the window for more than one. Where memory is short, small windows leave more
    of it, and the largest storages stay where they are: one that is larger than the window would pass alone in any
    case.
    """
    sizes = swapped_sizes(profile)
    if not sizes or profile.link is None:
        return [Setting(MIB, MIB)]
    largest = max(sizes)
    found = [Setting(2 * largest, largest), Setting(largest, largest)]
    smaller = max((size for size in sizes if size <= largest // 2), default=0)
    if smaller:
        found.append(Setting(min(2 * smaller, largest), smaller))
    return found
