"""`RuleAnswer`: what a rule answers for one call, before any tensor is touched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.core.shard.strategies import Strategy, choose

__all__ = ["RuleAnswer", "LocalCall", "answered", "tied_axes"]


LocalCall = Callable[[Any, Sequence[Any], dict[str, Any]], Any]  # takes the operator and its arguments, all local


class RuleAnswer(NamedTuple):
    """Says how the tensors of one call must lie, what comes out, and which local call makes it.

    Example: `matmul` of `Spec[8, 6] Layout(-, tp)` and `Spec[6, 4] Layout(tp, -)` is answered by `inputs` as they are,
    and one output `Spec[8, 4] Layout(-, -; partial sum over tp)`.
    """

    inputs: tuple[Layout, ...]  # one per tensor argument, in the order of the rule's own arguments
    outputs: tuple[Spec, ...]
    how: str | None = None  # names a local implementation; None: the operator itself, on local tensors
    facts: Mapping[str, Any] = {}  # what that implementation has to know: `mean` the global count
    is_view: bool = False  # the output shares the input's memory


def answered(
    tensors: Sequence[Spec],
    strategies: Sequence[Strategy],
    *shapes: Sequence[int],
    pinned: Sequence[int] = (),
    how: str | None = None,
    **facts: Any,
) -> RuleAnswer:
    """Answer by one-axis strategies; `shapes` are the global ones of the outputs, `facts` are kept in the answer."""
    chosen = choose(tensors, strategies, [len(shape) for shape in shapes], pinned)
    outputs = tuple(Spec(layout, shape) for layout, shape in zip(chosen.outputs, shapes, strict=True))
    return RuleAnswer(chosen.inputs, outputs, how, facts)


def tied_axes(layout: Layout, outputs: Sequence[Spec | None]) -> tuple[str, ...]:
    """Return the axes on which an input of this layout gets a partial gradient (T1).

    It is replicated there, and an output varies.
    """
    varying = {axis for spec in outputs if spec is not None for axis in spec.layout.varying_axes}
    return tuple(axis for axis in layout.replicated_axes if axis in varying)
