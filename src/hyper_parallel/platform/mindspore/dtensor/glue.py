"""What MindSpore adds to the dispatcher: its tensors, its table of primitives, and its way with operators that have no rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import Tensor

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard import registry
from hyper_parallel.core.shard._op_dispatch import _OP_DISPATCHER, Prepared, are_unknown_ops_replicated
from hyper_parallel.core.shard.local_parts import mesh_coordinate
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.core.shard.table import ask, replicated
from hyper_parallel.platform.mindspore.dtensor.function_table import TABLE
from hyper_parallel.platform.mindspore.dtensor.local_calls import local_call
from hyper_parallel.platform.mindspore.dtensor.movement import anchored
from hyper_parallel.platform.mindspore.dtensor.tensor import DTensor, moved, wrapped

__all__ = ["MindSporeGlue"]


class MindSporeGlue:
    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, Tensor)

    def is_plain_scalar(self, value: Any) -> bool:
        return value.ndim == 0 and not value._requires_grad

    def op_name(self, func: Any) -> str:
        return str(func.name)

    def coordinate(self, layout: Layout) -> tuple[int, ...]:
        return mesh_coordinate(layout.mesh)

    def wrap(self, local: Any, spec: Spec) -> Any:
        return wrapped(local, spec)

    def redistribute(self, tensor: Any, layout: Layout) -> Any:
        return moved(tensor, layout)

    def anchored(self, result: Any, locals_: Sequence[Any]) -> Any:
        return anchored(result, locals_)

    def decide(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Prepared | None:
        name = self.op_name(func)
        entry = TABLE.get(name)
        if entry is None:
            return self._on_whole_tensors(name, args, kwargs) if are_unknown_ops_replicated() else None
        if entry.takes_attributes:
            kwargs = {**kwargs, "attributes": func.attributes}
        decision, order, inputs = ask(entry, name, args, kwargs)
        return Prepared(
            decision,
            order,
            local_call(decision, inputs, name),
            order[0] if entry.is_in_place else None,
            entry.is_sequence or len(decision.outputs) > 1,
        )

    def _on_whole_tensors(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Prepared:
        """Whatever comes out."""
        decision, order, inputs = replicated(args, kwargs)
        if name.startswith(("Inplace", "Assign")) and not inputs[0].layout.is_replicated:
            raise ArgumentError(
                f"`{name}` has no rule, and works in place: on a whole copy it would change nothing.",
                got=repr(inputs[0]),
                do="Use the form that returns a new tensor, or redistribute the tensor first.",
            )

        def call(func: Any, local_args: Sequence[Any], local_kwargs: dict[str, Any]) -> Any:
            return _all_wrapped(func(*local_args, **local_kwargs), inputs[0].layout)

        return Prepared(decision, order, call, None, is_raw=True, is_kept=False)


def _all_wrapped(result: Any, like: Layout) -> Any:
    if isinstance(result, Tensor):
        return wrapped(result, Spec(Layout(like.mesh, ((),) * result.ndim), tuple(result.shape)))
    if isinstance(result, (list, tuple)):
        return type(result)(_all_wrapped(each, like) for each in result)
    return result


DTensor._glue = MindSporeGlue()
_OP_DISPATCHER.add_dtensor(DTensor, DTensor._glue)
registry.names_taken(set(TABLE))
