"""A framework's table of operators: which adaptor asks which rule, and how its answer becomes a call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard._op_dispatch import Glue, Prepared, Slot, type_of_sequence
from hyper_parallel.core.shard.decision import Decision, LocalCall
from hyper_parallel.core.shard.spec import Spec

__all__ = ["Asked", "Entry", "ask", "entry_of", "on_whole_tensors", "prepared"]


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
    bound.arguments.update({key: _as_specs(value, order, inputs) for key, value in bound.arguments.items()})
    return Asked(entry.adaptor(*bound.args, **bound.kwargs), order, inputs)


def prepared(entry: Entry, asked: Asked, local: LocalCall | None) -> Prepared:
    """A rule's answer as a call; `local` is the local implementation, None for the operator itself."""
    decision, order, _ = asked
    is_in_place = entry.is_in_place or decision.facts.get("in_place")
    return Prepared(
        decision, order, local, order[0] if is_in_place else None, entry.is_sequence or len(decision.outputs) > 1
    )


def on_whole_tensors(
    glue: Glue, name: str, args: Sequence[Any], kwargs: dict[str, Any], works_in_place: bool
) -> Prepared:
    """An operator without a rule, on whole tensors, whatever comes out.

    Raises:
        ValueError: it works in place, on a tensor that is not whole.
    """
    order: list[int] = []
    inputs: list[Spec] = []
    _as_specs((tuple(args), kwargs), order, inputs)
    if works_in_place and not inputs[0].layout.is_replicated:
        raise ArgumentError(
            f"`{name}` has no rule, and works in place: on a whole copy it would change nothing.",
            got=repr(inputs[0]),
            do="Use the form that returns a new tensor, or redistribute the tensor first.",
        )
    mesh = inputs[0].layout.mesh

    def wrapped(result: Any) -> Any:
        if glue.is_tensor(result):
            shape = tuple(result.shape)
            return glue.wrap(result, Spec(Layout(mesh, ((),) * len(shape)), shape))
        if isinstance(result, (list, tuple)):
            return type_of_sequence(result)(wrapped(each) for each in result)
        return result

    def call(func: Any, local_args: Sequence[Any], local_kwargs: dict[str, Any]) -> Any:
        return wrapped(func(*local_args, **local_kwargs))

    whole = tuple(Layout(mesh, ((),) * spec.ndim) for spec in inputs)
    return Prepared(Decision(whole, ()), order, call, None, is_raw=True, is_kept=False)


def _as_specs(value: Any, order: list[int], inputs: list[Spec]) -> Any:
    """The arguments with specs in the places of slots, which are noted in the order in which they stand."""
    if isinstance(value, Slot):
        order.append(value.index)
        inputs.append(value.spec)
        return value.spec
    if type(value) in (list, tuple):
        return type(value)(_as_specs(each, order, inputs) for each in value)
    if type(value) is dict:
        return {key: _as_specs(each, order, inputs) for key, each in value.items()}
    return value
