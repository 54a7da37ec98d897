"""A framework's table of operators: an entry per operator, and how a call becomes a `PreparedOp` by it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard._op_dispatch import ArgumentSlot, DispatchBackend, PreparedOp, type_of_sequence
from hyper_parallel.core.shard.rule_answer import RuleAnswer
from hyper_parallel.core.shard.spec import Spec

__all__ = ["Entry", "entry_of", "on_whole_tensors", "prepare"]


class Entry(NamedTuple):
    """An operator's line in the table.

    Its adaptor has the operator's own parameters, is called with a `Spec` in the place of each DTensor, and asks the
    rule. The tensors of the answer are in the order of the adaptor's parameters.
    """

    adaptor: Callable[..., RuleAnswer]
    signature: inspect.Signature
    is_sequence: bool  # the result is a list or tuple, also where it has one member
    is_in_place: bool
    takes_attributes: bool  # the adaptor wants the primitive's attributes, as the keyword `attributes`


def entry_of(adaptor: Callable[..., RuleAnswer], is_sequence: bool = False, is_in_place: bool = False) -> Entry:
    signature = inspect.signature(adaptor)
    return Entry(adaptor, signature, is_sequence, is_in_place, "attributes" in signature.parameters)


def prepare(entry: Entry, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> PreparedOp:
    """Ask the rule of an entry about a call whose DTensors are `ArgumentSlot`s.

    The local implementation is not chosen yet.

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
    answer = entry.adaptor(*bound.args, **bound.kwargs)
    is_in_place = entry.is_in_place or answer.facts.get("in_place")
    return PreparedOp(
        answer,
        order,
        inputs,
        returns_argument=order[0] if is_in_place else None,
        is_sequence=entry.is_sequence or len(answer.outputs) > 1,
    )


def on_whole_tensors(
    backend: DispatchBackend, name: str, args: Sequence[Any], kwargs: dict[str, Any], works_in_place: bool
) -> PreparedOp:
    """Prepare an operator without a rule: it runs on whole tensors, and what comes out is replicated.

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
        if backend.is_tensor(result):
            shape = tuple(result.shape)
            return backend.wrap(result, Spec(Layout(mesh, ((),) * len(shape)), shape))
        if isinstance(result, (list, tuple)):
            return type_of_sequence(result)(wrapped(value) for value in result)
        return result

    def call(func: Any, local_args: Sequence[Any], local_kwargs: dict[str, Any]) -> Any:
        return wrapped(func(*local_args, **local_kwargs))

    whole = tuple(Layout(mesh, ((),) * spec.ndim) for spec in inputs)
    return PreparedOp(RuleAnswer(whole, ()), order, local=call, is_raw=True, is_kept=False)


def _as_specs(value: Any, order: list[int], inputs: list[Spec]) -> Any:
    """Put specs in the places of slots, and note these in the order in which they stand."""
    if isinstance(value, ArgumentSlot):
        order.append(value.index)
        inputs.append(value.spec)
        return value.spec
    if type(value) in (list, tuple):
        return type(value)(_as_specs(item, order, inputs) for item in value)
    if type(value) is dict:
        return {key: _as_specs(item, order, inputs) for key, item in value.items()}
    return value
