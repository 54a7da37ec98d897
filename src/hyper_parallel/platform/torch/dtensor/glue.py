"""What PyTorch adds to the dispatcher: its tensors, its table of functions, and its way with operators that have no rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard import registry
from hyper_parallel.core.shard._op_dispatch import _OP_DISPATCHER, Prepared, Slot, are_unknown_ops_replicated
from hyper_parallel.core.shard.decision import Decision
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.platform.torch.dtensor.function_table import TABLE, Entry, bound_arguments, names
from hyper_parallel.platform.torch.dtensor.local_calls import local_call
from hyper_parallel.platform.torch.dtensor.movement import anchored, coordinate_on
from hyper_parallel.platform.torch.dtensor.optimizer_steps import decide_for_lists
from hyper_parallel.platform.torch.dtensor.tensor import DTensor, moved, wrapped

__all__ = ["TorchGlue"]


class TorchGlue:
    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    def is_plain_scalar(self, value: Any) -> bool:
        return value.ndim == 0 and not value.requires_grad

    def op_name(self, func: Any) -> str:
        from hyper_parallel.platform import get_platform

        if getattr(func, "__name__", "") == "__get__":
            return str(func.__self__.__name__)  # a property, such as `T`
        return str(get_platform().get_op_name(func))

    def coordinate(self, layout: Layout) -> tuple[int, ...]:
        return coordinate_on(layout)

    def wrap(self, local: Any, spec: Spec) -> Any:
        return wrapped(local, spec)

    def redistribute(self, tensor: Any, layout: Layout) -> Any:
        return moved(tensor, layout)

    def anchored(self, result: Any, locals_: Sequence[Any]) -> Any:
        return anchored(result, locals_)

    def decide(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Prepared | None:
        name = self.op_name(func)
        entry = TABLE.get(func)
        if kwargs.get("out") is not None:
            raise ArgumentError(
                f"`{name}` of distributed tensors has no `out`: where arguments are moved, a copy of it would be filled.",
                do="Take the result, or copy it: `target.copy_(result)`.",
            )
        if entry is None:
            if name.startswith(("_foreach_", "_fused_")):
                return decide_for_lists(name, args, kwargs)
            return self._replicated(name, args, kwargs) if are_unknown_ops_replicated() else None
        bound = bound_arguments(entry, name, args, kwargs)
        order: list[int] = []
        inputs: list[Spec] = []
        given = {key: _as_specs(value, order, inputs) for key, value in bound.arguments.items()}
        bound.arguments.update(given)
        decision = entry.adaptor(*bound.args, **bound.kwargs)
        return _prepared(entry, decision, order, inputs, name)

    def _replicated(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Prepared:
        """On whole tensors, whatever comes out."""
        order: list[int] = []
        inputs: list[Spec] = []
        _as_specs((args, kwargs), order, inputs)
        if _works_in_place(name) and not inputs[0].layout.is_replicated:
            raise ArgumentError(
                f"`{name}` has no rule, and works in place: on a whole copy it would change nothing.",
                got=repr(inputs[0]),
                do="Use the form that returns a new tensor, or redistribute the tensor first.",
            )
        whole = tuple(Layout(spec.layout.mesh, ((),) * spec.ndim) for spec in inputs)
        decision = Decision(whole, ())

        def call(func: Any, local_args: Sequence[Any], local_kwargs: dict[str, Any]) -> Any:
            return _all_wrapped(func(*local_args, **local_kwargs), inputs[0].layout)

        return Prepared(decision, order, call, None, is_raw=True, is_kept=False)


def _works_in_place(name: str) -> bool:
    if name.endswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name != "__invert__")
    return name.endswith("_")


def _all_wrapped(result: Any, like: Layout) -> Any:
    if isinstance(result, torch.Tensor):
        return wrapped(result, Spec(Layout(like.mesh, ((),) * result.ndim), tuple(result.shape)))
    if isinstance(result, (list, tuple)):
        parts = [_all_wrapped(each, like) for each in result]
        return type(result)(parts) if type(result) in (list, tuple) else type(result)(tuple(parts))
    return result


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


def _prepared(entry: Entry, decision: Decision, order: list[int], inputs: list[Spec], name: str) -> Prepared:
    return Prepared(
        decision,
        order,
        local_call(decision, inputs, name),
        order[0] if entry.is_in_place or decision.facts.get("in_place") else None,
        entry.is_sequence or len(decision.outputs) > 1,
    )


_OP_DISPATCHER.add_dtensor(DTensor, TorchGlue())
registry.names_taken(names())
