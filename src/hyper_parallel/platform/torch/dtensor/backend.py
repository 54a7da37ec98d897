"""PyTorch's side of the dispatcher: its tensors, its table of functions, and what to do where there is no rule.

Importing this registers PyTorch's DTensor with `_OP_DISPATCHER`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard import registry
from hyper_parallel.core.shard._op_dispatch import _OP_DISPATCHER, PreparedOp, are_unknown_ops_replicated
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.core.shard.table import on_whole_tensors, prepare
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.torch.dtensor.function_table import TABLE, names
from hyper_parallel.platform.torch.dtensor.local_calls import local_call
from hyper_parallel.platform.torch.dtensor.movement import anchored, coordinate_on
from hyper_parallel.platform.torch.dtensor.optimizer_steps import UNSCALE, prepare_for_lists
from hyper_parallel.platform.torch.dtensor.tensor import DTensor, moved, wrapped

__all__ = ["TorchDispatchBackend"]


class TorchDispatchBackend:
    """What the dispatcher asks of PyTorch: `DispatchBackend` of `core/shard/_op_dispatch.py`."""

    def is_tensor(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor)

    def is_plain_scalar(self, value: Any) -> bool:
        return value.ndim == 0 and not value.requires_grad

    def op_name(self, func: Any) -> str:
        if getattr(func, "__name__", "") == "__get__":
            return str(func.__self__.__name__)  # a property, such as `T`
        return str(get_platform().get_op_name(func))

    def coordinate(self, layout: Layout) -> tuple[int, ...]:
        return coordinate_on(layout)

    def wrap(self, local: object, spec: Spec) -> Any:
        return wrapped(local, spec)

    def redistribute(self, tensor: Any, layout: Layout) -> Any:
        return moved(tensor, layout)

    def anchored(self, result: object, locals_: Sequence[Any]) -> Any:
        return anchored(result, locals_)

    def prepare(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> PreparedOp | None:
        name = self.op_name(func)
        entry = TABLE.get(func)
        if kwargs.get("out") is not None:
            raise ArgumentError(
                f"`{name}` of distributed tensors has no `out`: where arguments are moved, a copy of it would be "
                "filled.",
                do="Take the result, or copy it: `target.copy_(result)`.",
            )
        if entry is None:
            if name.startswith(("_foreach_", "_fused_", UNSCALE)):
                return prepare_for_lists(name, args, kwargs)
            if not are_unknown_ops_replicated():
                return None
            return on_whole_tensors(self, name, args, kwargs, _works_in_place(name))
        prepared = prepare(entry, name, args, kwargs)
        return prepared._replace(local=local_call(prepared.answer, prepared.inputs, name))


def _works_in_place(name: str) -> bool:
    if name.endswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name != "__invert__")
    return name.endswith("_")


_OP_DISPATCHER.add_dtensor(DTensor, TorchDispatchBackend())
registry.names_taken(names())
