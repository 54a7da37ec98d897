"""What MindSpore adds to the dispatcher: its tensors, its table of primitives, and its way with operators that have no rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import Tensor

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard import registry
from hyper_parallel.core.shard._op_dispatch import _OP_DISPATCHER, Prepared, are_unknown_ops_replicated
from hyper_parallel.core.shard.local_parts import mesh_coordinate
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.core.shard.table import ask, on_whole_tensors, prepared
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
            if not are_unknown_ops_replicated():
                return None
            return on_whole_tensors(self, name, args, kwargs, name.startswith(("Inplace", "Assign")))
        if entry.takes_attributes:
            kwargs = {**kwargs, "attributes": func.attributes}
        asked = ask(entry, name, args, kwargs)
        return prepared(entry, asked, local_call(asked.decision, asked.inputs, name))


DTensor._glue = MindSporeGlue()
_OP_DISPATCHER.add_dtensor(DTensor, DTensor._glue)
registry.names_taken(set(TABLE))
