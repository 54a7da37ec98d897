"""MindSpore's side of the dispatcher: its tensors, its table of primitives, and what to do where there is no rule.

Importing this registers MindSpore's DTensor with `_OP_DISPATCHER`.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from mindspore import Tensor, mint, ops

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard import registry
from hyper_parallel.core.shard._op_dispatch import _OP_DISPATCHER, NoRuleError, PreparedOp, are_unknown_ops_replicated
from hyper_parallel.core.shard.local_parts import mesh_coordinate
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.core.shard.table import on_whole_tensors, prepare
from hyper_parallel.platform.mindspore.dtensor.function_table import TABLE
from hyper_parallel.platform.mindspore.dtensor.local_calls import local_call
from hyper_parallel.platform.mindspore.dtensor.movement import anchored
from hyper_parallel.platform.mindspore.dtensor.tensor import DTensor, moved, wrapped

__all__ = ["MindSporeDispatchBackend"]


class MindSporeDispatchBackend:
    """What the dispatcher asks of MindSpore: `DispatchBackend` of `core/shard/_op_dispatch.py`."""

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, Tensor)

    def is_plain_scalar(self, value: Any) -> bool:
        return value.ndim == 0 and not value._requires_grad

    def op_name(self, func: Any) -> str:
        return str(func.name)

    def coordinate(self, layout: Layout) -> tuple[int, ...]:
        return mesh_coordinate(layout.mesh)

    def wrap(self, local: object, spec: Spec) -> Any:
        return wrapped(local, spec)

    def redistribute(self, tensor: Any, layout: Layout) -> Any:
        return moved(tensor, layout)

    def anchored(self, result: object, locals_: Sequence[Any]) -> Any:
        return anchored(result, locals_)

    def prepare(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> PreparedOp | None:
        name = self.op_name(func)
        entry = TABLE.get(name)
        if entry is None:
            if not are_unknown_ops_replicated():
                if name.startswith("Inplace"):
                    raise NoRuleError(
                        "MindSpore's CPU does not change a distributed tensor in place.",
                        expected="`assign`, `assign_add`, `assign_sub` or `copy_`",
                        got=f"`{name}`, which `x += y`, `x.add_(y)` and their kin call",
                        do="Write `x = x + y`; or `x.assign_add(y)`, where it has to be the same tensor.",
                    )
                return None
            return on_whole_tensors(self, name, args, kwargs, name.startswith(("Inplace", "Assign")))
        if entry.takes_attributes:
            kwargs = {**kwargs, "attributes": func.attributes}
        prepared = prepare(entry, name, args, kwargs)
        return prepared._replace(local=local_call(prepared.answer, prepared.inputs, name))


def _given_to_hook(primitive: type[Any], call: Callable[[Any, Sequence[Any]], Any]) -> None:
    """Hand DTensors in a list, with which an older primitive passes the hook by, to a call that has the hook (rule H2).

    MindSpore asks a primitive's `check_elim` first whether its result is there without running it, so that is where
    they are caught.
    """
    original = primitive.check_elim

    def check_elim(self: object, *args: Any) -> tuple[bool, Any]:
        tensors = args[0] if args else None
        if isinstance(tensors, (list, tuple)) and any(isinstance(tensor, DTensor) for tensor in tensors):
            return True, call(self, tensors)
        return original(self, *args)

    primitive.check_elim = check_elim


_given_to_hook(ops.Stack, lambda primitive, tensors: mint.stack(list(tensors), primitive.axis))
_given_to_hook(ops.AddN, lambda primitive, tensors: functools.reduce(operator.add, tensors))

DTensor._backend = MindSporeDispatchBackend()
_OP_DISPATCHER.add_dtensor(DTensor, DTensor._backend)
registry.names_taken(set(TABLE))
