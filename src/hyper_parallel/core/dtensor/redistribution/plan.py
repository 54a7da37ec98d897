"""Plans of redistributions: a pure function of two layouts, a shape and an item size. The same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from hyper_parallel._base.errors import ArgumentError, HyperParallelError
from hyper_parallel.core.dtensor.boxes import check_shape
from hyper_parallel.core.dtensor.layout import Layout, check_same_mesh
from hyper_parallel.core.dtensor.redistribution.cost import CostModel, WayCost, cost_of, looked_at
from hyper_parallel.core.dtensor.redistribution.paths import ways
from hyper_parallel.core.dtensor.redistribution.steps import Step

__all__ = ["PeakMemoryError", "Plan", "plan_redistribution"]

# R2: a way is taken for its time only among those that receive nearly the fewest bytes.
_MEAN_BYTES_OVER_LEAST = 1.2
_MOST_BYTES_OVER_LEAST = 2.0

_DEFAULT_MODEL = CostModel()


class PeakMemoryError(HyperParallelError, MemoryError):
    """No way between two layouts stays below the memory that was allowed."""


@dataclass(frozen=True, eq=False)
class Plan:
    """The steps from one layout to another, for all ranks. `redistribute` executes it on one.

    Attributes:
        received_bytes: by the rank that receives most; of a mesh of more than 16 ranks only some are looked at
        peak_bytes: local tensors before and after a step and what is under way, on the rank that needs most
        time_us: by the cost model, an estimate to choose with
    """

    source: Layout
    target: Layout
    shape: tuple[int, ...]
    itemsize: int
    steps: tuple[Step, ...]
    received_bytes: float
    peak_bytes: int
    time_us: float

    @property
    def is_local(self) -> bool:
        """Say whether nothing is communicated."""
        return all(step.is_local for step in self.steps)

    def __repr__(self) -> str:
        steps = "".join(f"\n  {step}" for step in self.steps)
        what = f"{self.source} -> {self.target} of {list(self.shape)}"
        return f"Plan({what}, {self.received_bytes:.0f} bytes received){steps}"


def plan_redistribution(
    source: Layout,
    target: Layout,
    shape: Sequence[int],
    itemsize: int = 4,
    *,
    max_peak_bytes: int | None = None,
    model: CostModel = _DEFAULT_MODEL,
) -> Plan:
    """Plan the steps that lead from one layout to another of the same mesh; cached.

    Args:
        source: how the tensor lies.
        target: how it shall lie.
        shape: of the global tensor.
        itemsize: bytes of one element.
        max_peak_bytes: what a rank may need at the peak, local tensors included; no limit without.
        model: latency and bandwidth to choose with.

    Raises:
        ValueError: layouts of different meshes or numbers of dims, or a shape that does not fit them.
        MemoryError: every way needs more than `max_peak_bytes`.

    Example:
        >>> from hyper_parallel import init_device_mesh
        >>> mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        >>> plan_redistribution(mesh.layout("tp", None), mesh.layout(None, "tp"), (8, 8))
        Plan(Layout(tp, -) -> Layout(-, tp) of [8, 8], 48 bytes received)
          all-to-all over tp: Layout(tp, -) -> Layout(-, tp)
    """
    return _plan(source, target, shape if type(shape) is tuple else tuple(shape), itemsize, max_peak_bytes, model)


@lru_cache(maxsize=16384)
def _plan(
    source: Layout, target: Layout, shape: tuple[int, ...], itemsize: int, max_peak_bytes: int | None, model: CostModel
) -> Plan:
    check_same_mesh(source, target)
    check_shape(source, shape)
    check_shape(target, shape)
    if itemsize < 1:
        raise ArgumentError("An element has a size.", expected="1 byte or more", got=str(itemsize))
    coordinates = looked_at(source.mesh)
    candidates = [(cost_of(way, itemsize, model, coordinates), way) for way in ways(source, target, shape)]
    cost, steps = _chosen(_within(candidates, max_peak_bytes, source, target, shape))
    return Plan(source, target, shape, itemsize, steps, cost.received_bytes, cost.peak_bytes, cost.time_us)


def _within(
    candidates: list[tuple[WayCost, tuple[Step, ...]]],
    max_peak_bytes: int | None,
    source: Layout,
    target: Layout,
    shape: tuple[int, ...],
) -> list[tuple[WayCost, tuple[Step, ...]]]:
    if max_peak_bytes is None:
        return candidates
    found = [candidate for candidate in candidates if candidate[0].peak_bytes <= max_peak_bytes]
    if not found:
        raise PeakMemoryError(
            "No way to redistribute the tensor needs as little memory.",
            expected=f"at most {max_peak_bytes} bytes",
            got=f"{min(cost.peak_bytes for cost, _ in candidates)} for the smallest",
            where=f"{source} -> {target} of {list(shape)}",
            do="Raise `max_peak_bytes`, or redistribute the tensor in parts.",
        )
    return found


def _chosen(candidates: list[tuple[WayCost, tuple[Step, ...]]]) -> tuple[WayCost, tuple[Step, ...]]:
    least_mean = min(cost.mean_received_bytes for cost, _ in candidates)
    least_most = min(cost.received_bytes for cost, _ in candidates)
    frugal = [
        (cost, way)
        for cost, way in candidates
        if cost.mean_received_bytes <= _MEAN_BYTES_OVER_LEAST * least_mean
        and cost.received_bytes <= _MOST_BYTES_OVER_LEAST * least_most
    ]
    # The way of the fewest bytes on average may be one whose busiest rank receives too much, and the other way round.
    return min(frugal or candidates, key=lambda candidate: (candidate[0].time_us, len(candidate[1])))
