"""The cost of a way: bytes, time by a latency and a bandwidth, and memory at the peak."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.redistribution.steps import Kind, Step

__all__ = ["CostModel", "WayCost", "cost_of", "looked_at", "received_elements"]

_MOST_RANKS_LOOKED_AT = 16


@dataclass(frozen=True)
class CostModel:
    """Latency and bandwidth. The defaults are round numbers of one node; only their ratios choose between ways.

    Attributes:
        launch_us: of each collective
        peer_us: of each further rank that takes part in it
        bytes_per_us: that a rank receives
        exchange_efficiency: the share of that bandwidth which an all-to-all-v reaches
        copy_bytes_per_us: of local copies
    """

    launch_us: float = 20.0
    peer_us: float = 1.0
    bytes_per_us: float = 50_000.0
    exchange_efficiency: float = 0.8
    copy_bytes_per_us: float = 1_000_000.0

    def __post_init__(self) -> None:
        for name in ("bytes_per_us", "exchange_efficiency", "copy_bytes_per_us"):
            if not getattr(self, name) > 0:
                raise ArgumentError(f"`{name}` is not positive.", expected="above 0", got=str(getattr(self, name)))
        for name in ("launch_us", "peer_us"):
            if not getattr(self, name) >= 0:
                raise ArgumentError(f"`{name}` is negative.", expected="0 or more", got=str(getattr(self, name)))


class WayCost(NamedTuple):
    time_us: float
    received_bytes: float  # those of the rank that receives most, among the ranks looked at
    mean_received_bytes: float
    peak_bytes: int  # what one rank holds at most: local tensors before and after a step, and what is under way


def looked_at(mesh: DeviceMesh) -> list[tuple[int, ...]]:
    """Return coordinates that stand for all ranks.

    Of a large mesh these are its corners and middles, where uneven chunks are largest, smallest and between.
    """
    if len(mesh.ranks) <= _MOST_RANKS_LOOKED_AT:
        return [mesh.coordinate_of(rank) for rank in mesh.ranks]
    few = (sorted({0, size // 2, size - 1}) for size in mesh.shape)
    return list(itertools.islice(itertools.product(*few), _MOST_RANKS_LOOKED_AT))


def received_elements(step: Step, coordinate: tuple[int, ...]) -> float:
    """Count the elements that the rank at a coordinate receives.

    Reductions are counted as rings: (n-1)/n of what goes in, twice that for an all-reduce.
    """
    if step.is_local:
        return 0.0
    after = step.box_after(coordinate)
    num = after.num_elements
    if step.kind is Kind.ALL_REDUCE:
        return 2.0 * num * (step.group_size - 1) / step.group_size
    if step.kind is Kind.REDUCE_SCATTER:
        return num * (step.group_size - 1.0)
    both = after.intersection(step.box_before(coordinate))
    had = 0 if both is None else both.num_elements
    num_summands = 1
    for axis in step.reduced_axes:
        num_summands *= step.source.mesh.size(axis)
    return float(num * num_summands - had)


def cost_of(way: tuple[Step, ...], itemsize: int, model: CostModel, coordinates: Iterable[tuple[int, ...]]) -> WayCost:
    coordinates = list(coordinates)
    total = [0.0] * len(coordinates)
    time_us = 0.0
    peak = 0
    for step in way:
        received = [itemsize * received_elements(step, at) for at in coordinates]
        total = [before + more for before, more in zip(total, received, strict=True)]
        most = max(received)
        before = itemsize * max(step.box_before(at).num_elements for at in coordinates)
        after = itemsize * max(step.box_after(at).num_elements for at in coordinates)
        # Only rows of the first dim lie together in memory: other pieces are put together, or taken apart, by a copy.
        copies = {
            Kind.SLICE: after,
            Kind.PLACE: after,
            Kind.FILL: 0,
            Kind.ALL_REDUCE: 0,
            Kind.ALL_GATHER: after if step.dim else 0,
            Kind.REDUCE_SCATTER: before if step.dim else 0,
            Kind.ALL_TO_ALL: (before if step.split_dim else 0) + (after if step.dim else 0),
            Kind.ALL_TO_ALL_V: 2 * int(most),  # a guess: about as much is sent as received
        }[step.kind]
        peak = max(peak, before + after + (0 if step.is_local else copies))
        time_us += copies / model.copy_bytes_per_us
        if not step.is_local:
            efficiency = model.exchange_efficiency if step.kind is Kind.ALL_TO_ALL_V else 1.0
            rounds = step.group_size - 1
            time_us += model.launch_us + model.peer_us * rounds + most / (model.bytes_per_us * efficiency)
    return WayCost(time_us, max(total), sum(total) / len(total), peak)
