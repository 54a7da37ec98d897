"""What tells a unit that its modules run: hooks of PyTorch's around forward, on outputs, and on inputs.

The hook on an output says that backward has come to the unit. The one on an input says that it has left it: autograd
runs what was recorded last first, and the input was made before anything of the unit was. So all of the unit's
gradients are there then. An input that is a leaf says nothing: its own gradient may be done long before.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from hyper_parallel._base.errors import StateError
from hyper_parallel.core.parallel.sharding.order import ORDER
from hyper_parallel.core.parallel.sharding.precision import MixedPrecision
from hyper_parallel.core.parallel.sharding.unit import Call, Unit
from hyper_parallel.platform.torch.dtypes import to_dtype
from hyper_parallel.platform.trees import leaves, map_leaves

__all__ = ["UnitHooks", "pass_id", "units_in"]

_NO_TREES = (bool, int, float, str, type(None))


def pass_id() -> int | None:
    """The number of the backward that runs in this thread, None if none does."""
    found: int = torch._C._current_graph_task_id()
    return None if found == -1 else found


class UnitHooks:
    """The hooks of one unit, on each of its modules. A copy of a module has copies of them, which only raise."""

    def __init__(self, unit: Unit, modules: Sequence[nn.Module], precision: MixedPrecision) -> None:
        self.unit: Unit | None = unit
        self._input_dtype = None if precision.param is None else to_dtype(precision.param)
        self._output_dtype = None if precision.output is None else to_dtype(precision.output)
        self._thread = _InThread()
        for module in modules:
            module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self.after_forward, always_call=True)

    def __deepcopy__(self, memo: object) -> UnitHooks:
        made = object.__new__(UnitHooks)
        made.unit = None
        return made

    def __reduce__(self) -> Any:
        return _detached_hooks, ()

    # -- forward -------------------------------------------------------------------------------------------------------

    def before_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        unit = self.unit
        if unit is None:
            raise StateError(
                "This module is a copy of one that is sharded: it has shards, and nothing that gathers them.",
                where=type(module).__name__,
                do="Call `hp.fully_shard(copy, mesh=...)` on it as well.",
            )
        now = pass_id()
        earlier = self._thread.running
        if earlier and not earlier[-1].is_active():  # Ctrl-C
            earlier.clear()
        with _unseen():
            ORDER.before_forward(unit, now, is_within=bool(earlier))
        running = _Forward(module, sys.exc_info()[1], now)
        earlier.append(running)
        if self._input_dtype is not None:
            args, kwargs = map_leaves(self._cast_input, (args, kwargs))
        if torch.is_grad_enabled():
            running.inputs = [value for value in _tensors((args, kwargs)) if value.requires_grad]
        return args, kwargs

    def after_forward(self, module: nn.Module, args: object, output: Any) -> Any:
        unit = self.unit
        if unit is None:
            return None
        stack = self._thread.running
        if not stack or stack[-1].module is not module:  # gathering raised: this forward never began
            return None
        running = stack.pop()
        if output is None and sys.exc_info()[1] is not running.error:
            with _unseen():
                ORDER.after_forward(unit, None, running.pass_id)
            return None
        if self._output_dtype is not None:
            output = map_leaves(self._cast_output, output)
        if not torch.is_grad_enabled():
            with _unseen():
                ORDER.after_forward(unit, None, running.pass_id)
            return output
        known = {id(value) for value in running.inputs}
        outputs = [value for value in _tensors(output) if value.requires_grad and id(value) not in known]
        call = unit.add_call() if outputs or unit.memory.is_trained else None
        if call is not None:
            for value in outputs:
                value.register_hook(_BeforeBackward(call))
            for value in running.inputs:
                if value.grad_fn is not None:
                    value.register_hook(_AfterBackward(call))
            if not outputs:
                _follow_gradients(unit)
        with _unseen():
            ORDER.after_forward(unit, call, running.pass_id, is_seen=bool(outputs))
        return output

    def _cast_input(self, value: Any) -> Any:
        return value.to(self._input_dtype) if _is_floating(value) else value

    def _cast_output(self, value: Any) -> Any:
        return value.to(self._output_dtype) if _is_floating(value) else value


class _InThread(threading.local):
    def __init__(self) -> None:
        self.running: list[_Forward] = []


class _Forward:
    """A forward of a unit's module that has begun."""

    def __init__(self, module: nn.Module, error: BaseException | None, in_pass: int | None) -> None:
        self.module = module
        self.error = error  # what is handled around this forward: it is none of this forward's own
        self.pass_id = in_pass
        self.inputs: list[torch.Tensor] = []
        self._frame = sys._getframe(2)  # of PyTorch, which calls the module

    def is_active(self) -> bool:
        """Whether it has not ended, and this runs within it: a module that calls itself."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None


class _BeforeBackward:
    """Hook of an output. The graph holds it, and by it the call."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def __call__(self, grad: torch.Tensor) -> None:
        now = pass_id()
        if now is not None:
            ORDER.before_backward(self._call, now)


class _AfterBackward:
    """Hook of an input. The graph of the input may outlive the call's, so it holds the call weakly."""

    def __init__(self, call: Call) -> None:
        self._call = weakref.ref(call)

    def __call__(self, grad: torch.Tensor) -> None:
        call, now = self._call(), pass_id()
        if call is not None and now is not None:
            ORDER.after_backward(call, now)


def _unseen() -> AbstractContextManager[object]:
    """Around what is no work of the module: regions that record it must not see it, nor who counts its operations."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    """Give the tensors of a tree. speed: most trees are a tensor, or a tuple and a dict of some."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif type(tree) is tuple:
        for value in tree:
            yield from _tensors(value)
    elif type(tree) not in _NO_TREES:
        yield from (value for value in leaves(tree) if isinstance(value, torch.Tensor))


def _follow_gradients(unit: Unit) -> None:
    """Have a unit whose outputs are not known told of each gradient."""
    memory: Any = unit.memory
    known = weakref.ref(unit)

    def came(_: torch.Tensor) -> None:
        unit, now = known(), pass_id()
        if unit is not None and now is not None:
            ORDER.gradient_came(unit, now)

    for parameter in memory.parameters:
        if parameter.whole.requires_grad and not parameter.is_followed:
            parameter.is_followed = True
            parameter.whole_local.register_post_accumulate_grad_hook(came)


def _is_floating(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _detached_hooks() -> UnitHooks:
    made = object.__new__(UnitHooks)
    made.unit = None
    return made


def units_in(module: nn.Module) -> list[Unit]:
    """List the units of a module and of those in it, the outer ones first."""
    found: dict[Unit, None] = {}
    for inner in module.modules():
        for hook in inner._forward_pre_hooks.values():
            hooks = getattr(hook, "__self__", None)
            if isinstance(hooks, UnitHooks) and hooks.unit is not None:
                found[hooks.unit] = None
    return list(found)
