"""What tells a unit that its cells run: MindSpore's hooks around `construct`, and nodes in the graph (`graph.py`)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

from mindspore import Tensor, nn
from mindspore.common import dtype as mstype
from mindspore.common.recompute import _RecomputeCell

from hyper_parallel._base.errors import StateError
from hyper_parallel.core.parallel.sharding.order import ORDER
from hyper_parallel.core.parallel.sharding.precision import MixedPrecision
from hyper_parallel.core.parallel.sharding.unit import Unit
from hyper_parallel.platform.mindspore.dtensor import DTensor
from hyper_parallel.platform.mindspore.dtensor.movement import is_grad_enabled
from hyper_parallel.platform.mindspore.dtensor.tensor import wrapped
from hyper_parallel.platform.mindspore.dtypes import to_dtype
from hyper_parallel.platform.mindspore.parallel.sharding.graph import Passage, pass_id
from hyper_parallel.platform.mindspore.parallel.sharding.parameters import check_not_recomputed, recomputed
from hyper_parallel.platform.mindspore.regions.graph_mode import refusal
from hyper_parallel.platform.trees import leaves, map_leaves

__all__ = ["UnitHooks", "units_in"]


class UnitHooks:
    """The hooks of one unit, on each of its cells. A copy of a cell has copies of them, which only raise."""

    def __init__(self, unit: Unit, cells: Sequence[nn.Cell], precision: MixedPrecision) -> None:
        self.unit: Unit | None = unit
        self._input_dtype = None if precision.param is None else to_dtype(precision.param)
        self._output_dtype = None if precision.output is None else to_dtype(precision.output)
        self._thread = _InThread()
        for cell in cells:
            cell.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
            cell.register_forward_hook(self.after_forward, always_call=True)

    def __deepcopy__(self, memo: object) -> UnitHooks:
        return _detached_hooks()

    def __reduce__(self) -> Any:
        return _detached_hooks, ()

    @property
    def runs_in_python(self) -> bool:
        """Return True. What compiles a cell to a graph reads it where the hooks do, while it compiles, and is refused.

        Raises:
            StateError: it is read by such a reader.
        """
        if sys._getframe(1).f_globals.get("__name__", "").startswith("mindspore.graph._parse"):
            raise refusal("A sharded cell", "its parameters come and go while Python runs")
        return True

    def before_forward(self, cell: nn.Cell, args: Any, kwargs: Any) -> Any:
        if not self.runs_in_python:
            return None
        unit = self.unit
        if unit is None:
            raise StateError(
                "This cell is a copy of one that is sharded: it has shards, and nothing that gathers them.",
                where=type(cell).__name__,
                do="Copy the model before it is sharded, and shard the copy as well.",
            )
        now, is_recorded = pass_id(), is_grad_enabled()
        check_not_recomputed(cell, type(cell).__name__, with_inner=True)
        if now is not None or not is_recorded:
            _check_around(cell)
        earlier = self._thread.running
        if earlier and not earlier[-1].is_active():  # Ctrl-C
            earlier.clear()
        frame = _frame_of_call()
        ORDER.before_forward(unit, now, frame)
        running = _Forward(cell, sys.exc_info()[1], now, frame)
        earlier.append(running)
        if self._input_dtype is not None:
            args, kwargs = map_leaves(self._cast_input, (args, kwargs))
        if is_recorded:
            running.passage = Passage(unit)
            inputs = {
                id(value): value for value in leaves((args, kwargs)) if _has_graph(value) and type(value) is not DTensor
            }
            entered = dict(zip(inputs, running.passage.enter(list(inputs.values())), strict=True))
            if entered:
                args, kwargs = map_leaves(lambda value: entered.get(id(value), value), (args, kwargs))
        return args, kwargs

    def after_forward(self, cell: nn.Cell, args: object, output: Any) -> Any:
        if not self.runs_in_python:
            return None
        unit, stack = self.unit, self._thread_stack()
        if unit is None or not stack or stack[-1].cell is not cell:  # gathering raised: this forward never began
            return None
        running = stack.pop()
        is_failed = output is None and sys.exc_info()[1] is not running.error
        passage, is_seen = running.passage, True
        if not is_failed and self._output_dtype is not None:
            output = map_leaves(self._cast_output, output)
        if not is_failed and passage is not None:
            output, is_seen = self._left(unit, passage, output, is_rerun=running.pass_id is not None)
        call = None if is_failed or passage is None else passage.call
        ORDER.after_forward(unit, call, running.pass_id, is_seen=is_seen)
        return output

    def _thread_stack(self) -> list[_Forward]:
        return [] if self.unit is None else self._thread.running

    def _left(self, unit: Unit, passage: Passage, output: Any, *, is_rerun: bool) -> tuple[Any, bool]:
        """Record the end of a forward. Return its output, and whether there is one that backward begins at."""
        outputs = {id(value): value for value in leaves(output) if _has_graph(value)}
        if not outputs and passage.of:
            # They depend on no weight on this rank. On another one they may: backward has to pass here as well.
            outputs = {id(value): value for value in leaves(output) if _is_floating(value) and not _is_ours(value)}
        if outputs or passage.of:
            passage.call = unit.add_call(is_rerun=is_rerun)
        if not outputs:
            return output, False
        left = passage.leave([value._local if _is_ours(value) else value for value in outputs.values()])
        seen = {
            key: wrapped(new, old._spec) if _is_ours(old) else new
            for (key, old), new in zip(outputs.items(), left, strict=True)
        }
        return map_leaves(lambda value: seen.get(id(value), value), output), True

    def _cast_input(self, value: Any) -> Any:
        return value.to(self._input_dtype) if _is_floating(value) else value

    def _cast_output(self, value: Any) -> Any:
        return value.to(self._output_dtype) if _is_floating(value) else value


_OF_REENTRANT = (_RecomputeCell.construct.__code__, _RecomputeCell.bprop.__code__)


def _frame_of_call() -> FrameType | None:
    """Find the frame of MindSpore that runs as long as the cell's call."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not nn.Cell.__call__.__code__:
        frame = frame.f_back
    return frame


def _check_around(cell: nn.Cell) -> None:
    """Raise inside of a cell that MindSpore runs again in a backward of its own, which would lose gradients."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_code in _OF_REENTRANT:
            raise recomputed(type(cell).__name__)
        frame = frame.f_back


class _InThread(threading.local):
    def __init__(self) -> None:
        self.running: list[_Forward] = []


class _Forward:
    """A forward of a unit's cell that has begun."""

    def __init__(
        self, cell: nn.Cell, error: BaseException | None, in_pass: int | None, frame: FrameType | None
    ) -> None:
        self.cell = cell
        self.error = error  # what is handled around this forward: it is none of this forward's own
        self.pass_id = in_pass
        self.passage: Passage | None = None  # None where nothing is recorded
        self._frame = frame

    def is_active(self) -> bool:
        """Whether it has not ended, and this runs within it: a cell that calls itself."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None


def _is_ours(value: object) -> bool:
    return isinstance(value, DTensor)


def _is_floating(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype in mstype.float_type


def _has_graph(value: object) -> bool:
    return isinstance(value, Tensor) and bool(value._requires_grad)


def _detached_hooks() -> UnitHooks:
    made = object.__new__(UnitHooks)
    made.unit = None
    return made


def hooks_of(cell: nn.Cell) -> list[UnitHooks]:
    """List the hooks of units on this very cell."""
    if cell._lazy_forward_pre_hook is None:  # asking for the hooks of a cell without any would make it a table
        return []
    found = (getattr(hook, "__self__", None) for hook in cell._forward_pre_hook.values())
    return [hooks for hooks in found if isinstance(hooks, UnitHooks) and hooks.unit is not None]


def units_in(cell: nn.Cell) -> list[Unit]:
    """List the units of a cell and of those in it, the outer ones first."""
    found: dict[Unit, None] = {}
    for _, inner in cell.cells_and_names():
        for hooks in hooks_of(inner):
            if hooks.unit is not None:
                found[hooks.unit] = None
    return list(found)
