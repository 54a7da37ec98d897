"""One-axis strategies, and how the engine extends them to all axes of a mesh.

A *strategy* says for ONE mesh axis how each input has to lie, and how the outputs lie then: matmul on an axis is
`(S(0), R -> S(0))`, `(R, S(1) -> S(1))`, `(S(1), S(0) -> P())`, or `(R, R -> R)`. An operator's rule is the list of
those that are right whatever the other axes do. For every axis of the mesh the engine takes the strategy that moves the
fewest bytes of what is there; ties go to the one that leaves less to reduce, then to the one that changes fewer inputs,
then to the first in the list.

Where several axes split one dim, their order counts: inputs that are split alike must be split in the same order. So
one order of all axes is chosen per call (that of the largest input wins), and every dim of every input and output uses
it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, Union

from hyper_parallel._base.errors import StateError
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.shard.spec import Spec

__all__ = ["Chosen", "P", "R", "S", "Strategy", "choose", "place_on"]


class S(NamedTuple):
    """The tensor is split along a dim."""

    dim: int


class P(NamedTuple):
    """The tensor is partial: its value is the reduction of what the ranks hold."""

    op: str = "sum"


class _Replicated(NamedTuple):
    pass


R = _Replicated()
Place = Union[S, P, _Replicated]  # noqa: UP007 - evaluated at run time on Python 3.10


class Strategy(NamedTuple):
    """One way in which inputs and outputs may lie on one axis."""

    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]


class Chosen(NamedTuple):
    """The layouts that a call needs and makes."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]


_FREE, _NEVER = 0.0, float("inf")


def choose(
    inputs: Sequence[Spec], strategies: Sequence[Strategy], output_ndims: Sequence[int], pinned: Sequence[int] = ()
) -> Chosen:
    """Choose the layouts that move the fewest bytes.

    Inputs whose index is `pinned` keep theirs (the target of an op in place).
    """
    mesh = inputs[0].layout.mesh
    picked: dict[str, Strategy] = {}
    for axis in mesh.axis_names:
        picked[axis] = _best(axis, inputs, strategies, pinned)
    order = _axis_order(mesh, inputs, picked)
    targets = tuple(
        _layout(mesh, spec.ndim, [(axis, picked[axis].inputs[i]) for axis in order]) for i, spec in enumerate(inputs)
    )
    outputs = tuple(
        _layout(mesh, ndim, [(axis, picked[axis].outputs[i]) for axis in order]) for i, ndim in enumerate(output_ndims)
    )
    return Chosen(targets, outputs)


def place_on(layout: Layout, axis: str) -> Place:
    """Return how a tensor of this layout lies on an axis."""
    dim = layout.dim_of(axis)
    if dim is not None:
        return S(dim)
    op = layout.partial_op(axis)
    return R if op is None else P(op)


def _best(axis: str, inputs: Sequence[Spec], strategies: Sequence[Strategy], pinned: Sequence[int]) -> Strategy:
    places = [place_on(spec.layout, axis) for spec in inputs]
    size = inputs[0].layout.mesh.size(axis)
    best: Strategy | None = None
    best_cost: tuple[float, ...] = (_NEVER,)
    for index, strategy in enumerate(strategies):
        if any(strategy.inputs[i] != places[i] for i in pinned):
            continue
        moved = sum(
            _moved(place, wanted, _elements_on(axis, spec), size)
            for place, wanted, spec in zip(places, strategy.inputs, inputs, strict=True)
        )
        had_partial = any(isinstance(place, P) for place in places)
        left = sum(isinstance(place, P) for place in strategy.outputs) if not had_partial else 0
        changed = sum(place != wanted for place, wanted in zip(places, strategy.inputs, strict=True))
        cost = (moved, left, changed, index)
        if cost < best_cost:
            best, best_cost = strategy, cost
    if best is None or best_cost[0] == _NEVER:
        raise StateError(
            "No strategy of this operator fits, and none can be reached.",
            expected="one of " + "; ".join(map(_text, strategies)),
            got=", ".join(map(_place_text, places)),
            where=f"mesh axis {axis!r}",
            do="Redistribute the arguments first.",
        )
    return best


def _elements_on(axis: str, spec: Spec) -> float:
    """Count the elements that the ranks of one axis hold together."""
    others = 1
    for names in spec.layout.axes_per_dim:
        for name in names:
            if name != axis:
                others *= spec.layout.mesh.size(name)
    return spec.num_elements / others


def _moved(place: Place, wanted: Place, elements: float, size: int) -> float:
    """Estimate the elements that a rank receives; what can be done without communication is free."""
    if place == wanted or size == 1:
        return _FREE
    share = elements * (size - 1) / size
    if isinstance(place, _Replicated):
        return _FREE if isinstance(wanted, S) or wanted == P("sum") else _NEVER
    if isinstance(place, S):
        # Zeros around what is there need no communication, but the memory of the whole: a last resort, and so dear.
        padded = 3 * share if wanted == P("sum") else _NEVER
        return share if isinstance(wanted, _Replicated) else share / size if isinstance(wanted, S) else padded
    return 2 * share if isinstance(wanted, _Replicated) else share if isinstance(wanted, S) else _NEVER


def _axis_order(mesh: DeviceMesh, inputs: Sequence[Spec], picked: dict[str, Strategy]) -> list[str]:
    """Choose one order of the axes in which every dim is split: if possible that of the inputs, the largest first."""
    before: dict[str, set[str]] = {axis: set() for axis in mesh.axis_names}  # axis -> those that must come earlier

    def comes_before(first: str, second: str) -> bool:
        return first in before[second] or any(comes_before(first, middle) for middle in before[second])

    ranked = sorted(range(len(inputs)), key=lambda i: -inputs[i].num_elements)
    for i in ranked:
        for dim, names in enumerate(inputs[i].layout.axes_per_dim):
            kept = [axis for axis in names if picked[axis].inputs[i] == S(dim)]
            for first, second in itertools.pairwise(kept):
                if not comes_before(second, first):
                    before[second].add(first)
    order: list[str] = []
    rest = list(mesh.axis_names)
    while rest:
        ready = next(axis for axis in rest if before[axis] <= set(order))
        order.append(ready)
        rest.remove(ready)
    return order


def _layout(mesh: DeviceMesh, ndim: int, places: Sequence[tuple[str, Place]]) -> Layout:
    axes: list[tuple[str, ...]] = [()] * ndim
    partial = []
    for axis, place in places:
        if isinstance(place, S):
            axes[place.dim] = (*axes[place.dim], axis)
        elif isinstance(place, P):
            partial.append((axis, place.op))
    return Layout(mesh, axes, tuple(partial))


def _text(strategy: Strategy) -> str:
    return f"({', '.join(map(_place_text, strategy.inputs))} -> {', '.join(map(_place_text, strategy.outputs))})"


def _place_text(place: Place) -> str:
    return f"S({place.dim})" if isinstance(place, S) else f"P({place.op})" if isinstance(place, P) else "R"
