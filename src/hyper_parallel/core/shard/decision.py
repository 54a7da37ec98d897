"""`Decision`: what a rule answers for one call, before any tensor is touched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.core.shard.strategies import Strategy, choose

__all__ = ["Decision", "LocalCall", "decided", "tied_axes"]


LocalCall = Callable[[Any, Sequence[Any], dict[str, Any]], Any]  # of an operator and its arguments, all local


class Decision(NamedTuple):
    """How the tensors of one call must lie, what comes out, and how the local call differs from the global one."""

    inputs: tuple[Layout, ...]  # one per tensor argument, in the order of the rule's own arguments
    outputs: tuple[Spec, ...]
    how: str | None = None  # the name of a local implementation that is not the operator itself
    facts: Mapping[str, Any] = {}  # for it
    is_view: bool = False  # the output looks at the input's memory


def decided(
    tensors: Sequence[Spec],
    strategies: Sequence[Strategy],
    *shapes: Sequence[int],
    pinned: Sequence[int] = (),
    how: str | None = None,
    **facts: Any,
) -> Decision:
    """The decision by one-axis strategies; `shapes` are those of the outputs."""
    chosen = choose(tensors, strategies, [len(shape) for shape in shapes], pinned)
    outputs = tuple(Spec(layout, shape) for layout, shape in zip(chosen.outputs, shapes, strict=True))
    return Decision(chosen.inputs, outputs, how, facts)


def tied_axes(layout: Layout, outputs: Sequence[Spec | None]) -> tuple[str, ...]:
    """The axes on which an input of this layout gets a partial gradient: replicated there while an output varies. See rule G5."""
    varying = {axis for spec in outputs if spec is not None for axis in spec.layout.varying_axes}
    return tuple(axis for axis in layout.replicated_axes if axis in varying)
