"""A framework's table of operators: which adaptor asks which rule, and how its answer becomes a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hyper_parallel._base.errors import ArgumentTypeError
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard._op_dispatch import Slot
from hyper_parallel.core.shard.decision import Decision
from hyper_parallel.core.shard.spec import Spec

__all__ = ["Asked", "Entry", "as_specs", "ask", "entry_of", "replicated"]


class Entry(NamedTuple):
    """An adaptor has the operator's own parameters and answers a decision; a `Spec` stands for each DTensor.

    The tensors of its decision are in the order of its parameters.
    """

    adaptor: Callable[..., Decision]
    signature: inspect.Signature
    is_sequence: bool  # the result is a list or tuple, also where it has one member
    is_in_place: bool
    takes_attributes: bool  # of the primitive, as the keyword `attributes`


class Asked(NamedTuple):
    """A rule's answer."""

    decision: Decision
    order: list[int]  # for each tensor of the decision, its index among the DTensors of the call
    inputs: list[Spec]


def entry_of(adaptor: Callable[..., Decision], is_sequence: bool = False, is_in_place: bool = False) -> Entry:
    signature = inspect.signature(adaptor)
    return Entry(adaptor, signature, is_sequence, is_in_place, "attributes" in signature.parameters)


def ask(entry: Entry, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Asked:
    """The decision for a call, with slots in the places of its DTensors.

    Raises:
        TypeError: the rule knows no such argument.
    """
    try:
        bound = entry.signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentTypeError(
            f"`{name}` of distributed tensors does not take these arguments.",
            expected=f"{name}{entry.signature}",
            got=str(error),
        ) from None
    order: list[int] = []
    inputs: list[Spec] = []
    bound.arguments.update({key: as_specs(value, order, inputs) for key, value in bound.arguments.items()})
    return Asked(entry.adaptor(*bound.args, **bound.kwargs), order, inputs)


def replicated(args: Sequence[Any], kwargs: dict[str, Any]) -> Asked:
    """All tensors whole; what comes out is not known."""
    order: list[int] = []
    inputs: list[Spec] = []
    as_specs((tuple(args), kwargs), order, inputs)
    whole = tuple(Layout(spec.layout.mesh, ((),) * spec.ndim) for spec in inputs)
    return Asked(Decision(whole, ()), order, inputs)


def as_specs(value: Any, order: list[int], inputs: list[Spec]) -> Any:
    """The arguments with specs in the places of slots, which are noted in the order in which they stand."""
    if isinstance(value, Slot):
        order.append(value.index)
        inputs.append(value.spec)
        return value.spec
    if type(value) in (list, tuple):
        return type(value)(as_specs(each, order, inputs) for each in value)
    if type(value) is dict:
        return {key: as_specs(each, order, inputs) for key, each in value.items()}
    return value
