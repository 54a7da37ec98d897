"""Which rank has which stage.

loop, 4 stages on 2 ranks     0 -> 1 -> 0 -> 1        stage s is on rank s % p
V, 4 stages on 2 ranks        0 -> 1 -> 1 -> 0        there and back: the first and the last stage are on rank 0
two ways, 2 stages on 2       0 -> 1 and 1 -> 0       each stage twice: half of the microbatches goes the other way
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from hyper_parallel._base.errors import ArgumentError, describe

__all__ = ["Placement", "in_a_loop", "in_a_v", "two_ways"]


@dataclass(frozen=True)
class Placement:
    """The way of every microbatch through the ranks.

    Attributes:
        routes: `routes[k][s]` is the rank of stage s for the microbatches of route k.
        route_of: the route of each microbatch.

    Example:
        >>> two_ways(2, 4)
        Placement(routes=((0, 1), (1, 0)), route_of=(0, 0, 1, 1))
        >>> two_ways(2, 4).rank_of(stage=0, microbatch=3)
        1
    """

    routes: tuple[tuple[int, ...], ...]
    route_of: tuple[int, ...]

    def __post_init__(self) -> None:
        lengths = {len(route) for route in self.routes}
        if (
            len(lengths) != 1
            or 0 in lengths
            or not self.route_of
            or not set(self.route_of) <= set(range(len(self.routes)))
        ):
            raise ArgumentError(
                "These are no routes of microbatches through stages.",
                expected="routes with a rank for each stage, and for each microbatch the number of its route",
                got=describe((self.routes, self.route_of)),
            )

    @property
    def num_stages(self) -> int:
        return len(self.routes[0])

    @property
    def num_microbatches(self) -> int:
        return len(self.route_of)

    @cached_property
    def num_ranks(self) -> int:
        return max(rank for route in self.routes for rank in route) + 1

    def rank_of(self, stage: int, microbatch: int) -> int:
        """The rank at which this stage has this microbatch."""
        return self.routes[self.route_of[microbatch]][stage]

    def stages_on(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in order."""
        return tuple(stage for stage, ranks in enumerate(zip(*self.routes, strict=True)) if rank in ranks)


def in_a_loop(num_ranks: int, num_chunks: int, num_microbatches: int) -> Placement:
    route = tuple(stage % num_ranks for stage in range(num_ranks * num_chunks))
    return Placement((route,), (0,) * num_microbatches)


def in_a_v(num_ranks: int, num_microbatches: int) -> Placement:
    there = tuple(range(num_ranks))
    return Placement((there + there[::-1],), (0,) * num_microbatches)


def two_ways(num_ranks: int, num_microbatches: int) -> Placement:
    """The first half of the microbatches begins at rank 0, the second half at the last rank."""
    there, half = tuple(range(num_ranks)), num_microbatches // 2
    return Placement((there, there[::-1]), (0,) * half + (1,) * half)


def found_in(
    homes: Mapping[tuple[int, int], int], stages: Iterable[tuple[int, int]], num_microbatches: int
) -> Placement:
    """Find the placement that lists of actions have.

    Args:
        homes: the rank that has the forward of (stage, microbatch). Some may be missing: what is not there is for the
            check to say.
        stages: the stages that occur at each rank, as (stage, rank).
    """
    anywhere: dict[int, int] = {}
    for stage, rank in stages:
        anywhere.setdefault(stage, rank)
    if set(anywhere) != set(range(len(anywhere))):
        missing = min(set(range(len(anywhere))) - set(anywhere))
        raise ArgumentError(
            "A stage occurs nowhere in this schedule.",
            expected=f"stages 0 to {max(anywhere)}, each at some rank",
            got=f"no action of stage {missing}",
        )
    for (stage, _), rank in homes.items():
        anywhere[stage] = rank
    num_stages = len(anywhere)
    routes: dict[tuple[int, ...], int] = {}
    route_of = []
    for microbatch in range(num_microbatches):
        route = tuple(homes.get((stage, microbatch), anywhere[stage]) for stage in range(num_stages))
        route_of.append(routes.setdefault(route, len(routes)))
    return Placement(tuple(routes), tuple(route_of))
