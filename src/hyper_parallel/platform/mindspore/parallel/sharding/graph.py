"""The two nodes that a unit has in the graph of each forward, and what backward does when it comes to them.

    inputs, shards -> Entry -> inputs, whole parameters -> the cell -> outputs -> Exit -> outputs

Backward comes to `Exit` first: the unit is made whole. It comes to `Entry` when all gradients of the inputs and of the
whole parameters are there: they are sent, and this rank's sums are the gradients of the shards. So whoever asks for
gradients of the shards finds them where they always are, and all that MindSpore differentiates with works:
`value_and_grad`, `grad`, and the tape. A tensor goes from `Entry` to `Exit` past the cell, so that backward comes to
`Entry` wherever it has come to `Exit`, on all ranks, whatever the cell has used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import Tensor, mint, ops
from mindspore.common._grad_function import _Function
from mindspore.graph.api import _no_grad, _pynative_executor

from hyper_parallel.core.parallel.sharding.order import ORDER
from hyper_parallel.core.parallel.sharding.unit import Call, CallState, Unit
from hyper_parallel.platform.mindspore.parallel.sharding.memory import MindSporeUnitMemory
from hyper_parallel.platform.mindspore.parallel.sharding.parameters import UnitParameter

__all__ = ["Passage", "pass_id"]

_NO_PASS = -1  # what MindSpore gives as the number of the backward outside of one


def pass_id() -> int | None:
    """The number of the backward that runs in this thread, None if none does."""
    found: int = _pynative_executor.get_current_autodiff_engine_id()
    return None if found == _NO_PASS else found


class Passage:
    """The way of one forward through a unit, which has both nodes. The graph holds it, and by it the call.

    Attributes:
        call: the forward, once it has ended.
        of: for each whole parameter that is trained, whose memory it is.
    """

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.call: Call | None = None
        self.of: list[tuple[MindSporeUnitMemory, UnitParameter]] = []
        self._past: Tensor | None = None

    def enter(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Record the beginning; have cells compute with whole parameters of this forward. Return the inputs."""
        for unit in (self.unit, *self.unit.borrowed):
            memory: Any = unit.memory
            self.of += [(memory, parameter) for parameter in memory.trained()]
        if not inputs and not self.of:
            return []
        aliases = [parameter.whole.data for _, parameter in self.of]
        shards = [parameter.local for _, parameter in self.of]
        past, *rest = _Entry.apply(self, len(inputs), aliases, *inputs, *shards)
        self._past = past
        for (_, parameter), alias in zip(self.of, rest[len(inputs) :], strict=True):
            parameter.show_alias(parameter.as_parameter(alias))
        return list(rest[: len(inputs)])

    def leave(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Record the end, and return the outputs."""
        past, self._past = self._past, None  # a node's own outputs would keep its graph
        found = _Exit.apply(self, past, *outputs)
        return list(found) if isinstance(found, tuple) else [found]

    def begin_backward(self) -> None:
        call, now = self.call, pass_id()
        if call is not None and now is not None:
            ORDER.before_backward(call, now)

    def end_backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Take the gradients of whole parameters, and return those of the shards."""
        call, now = self.call, pass_id()
        if call is None or now is None:
            return [None] * len(self.of)
        if call.state is CallState.WAITING:  # the cell's outputs were not seen
            ORDER.before_backward(call, now)
        for (memory, parameter), gradient in zip(self.of, gradients, strict=True):
            if gradient is not None:
                memory.leave(parameter, gradient)
        units = (self.unit, *self.unit.borrowed)
        memories: list[Any] = [unit.memory for unit in units]
        for memory in memories:
            memory.is_taken = True
        try:
            ORDER.after_backward(call, now)
            ORDER.reduce_at_once(units, now)
        finally:
            for memory in memories:
                memory.is_taken = False
        given = {id(memory): memory.take_given() for memory in memories}
        return [given[id(memory)].get(parameter.name) for memory, parameter in self.of]


class _Entry(_Function):
    @staticmethod
    def forward(ctx: Any, passage: Passage, num_inputs: int, aliases: list[Tensor], *tensors: Tensor) -> Any:
        ctx.passage, ctx.num_inputs = passage, num_inputs
        ctx.set_materialize_grads(False)
        return (mint.empty((1,)), *tensors[:num_inputs], *aliases)

    @staticmethod
    def backward(ctx: Any, past: object, *gradients: Tensor | None) -> Any:
        num = ctx.num_inputs
        with _no_grad():
            found = ctx.passage.end_backward(gradients[num:])
        return (None, None, None, *gradients[:num], *found)


class _Exit(_Function):
    @staticmethod
    def forward(ctx: Any, passage: Passage, past: Tensor | None, *outputs: Tensor) -> Any:
        ctx.passage, ctx.has_past = passage, past is not None
        ctx.set_materialize_grads(False)
        return outputs if len(outputs) > 1 else outputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        with _no_grad():
            ctx.passage.begin_backward()
            past = ops.zeros((1,)) if ctx.has_past else None
        return (None, past, *gradients)
