"""A block that leaves its thread as it found it, whatever ends it.

`with` takes away what it has put on a stack of PyTorch's, but for one case: Ctrl-C comes between any two instructions of Python, and so also in
an `__enter__` that has pushed already, or in an `__exit__` that has not popped yet. What stays then (no gradients, a mode that records, hooks on saved
tensors) is in force for all that the process does afterwards. So what a region needs is put there by `with` blocks as ever, and around all of
them is one more, which has changed nothing itself: it has noted what was there, and when an exception passes, makes it so again.

>>> with left_as_found():
...     with torch.no_grad(), saved_tensors_hooks(pack, unpack):  # doctest: +SKIP
...         ...
"""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._device as default_device
import torch.utils._python_dispatch as dispatch
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode

from hyper_parallel._base.put_back import PutBack, put_back_on_error
from hyper_parallel.platform.torch.regions.leaving import forget_waiting
from hyper_parallel.platform.torch.regions.random_state import drawing
from hyper_parallel.platform.torch.regions.surroundings import num_replays, set_num_replays

# What PyTorch notes beside the stack of dispatch modes, as far as this version has it.
_FLAGS = [
    name
    for name in (
        "_is_in_torch_dispatch_mode",
        "_is_in_non_infra_torch_dispatch_mode",
        "_is_in_any_mode_without_ignore_compile_internals",
    )
    if hasattr(dispatch, name)
]
_num_dispatch_modes = torch._C._len_torch_dispatch_stack
_num_function_modes = torch._C._len_torch_function_stack


class left_as_found(put_back_on_error):  # noqa: N801 - used like a function
    """See the head of the file. `changes`: what else blocks inside of this one change and put back."""

    __slots__ = ()

    def __init__(self, *changes: Any) -> None:
        super().__init__(
            *changes, ThreadState()
        )  # which is put back first: under a mode that is left nothing else can be


class ThreadState(PutBack):
    """What PyTorch and regions keep of a thread, now; `put_back` makes it so again, and may be called twice."""

    __slots__ = ("_device", "_dispatch_modes", "_draws", "_flags", "_function_modes", "_grad", "_hooks", "_replays")

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        self._dispatch_modes = _dispatch_modes()
        self._flags = [getattr(dispatch, name) for name in _FLAGS]
        self._function_modes = _get_current_function_mode_stack() if _num_function_modes() else []
        self._device = default_device.CURRENT_DEVICE
        self._replays = num_replays()
        self._draws = drawing.is_mine()

    def put_back(self) -> None:
        """What came on top of a stack is taken from it, and what is missing there put on it."""
        forget_waiting()
        set_num_replays(self._replays)
        if not self._draws:
            drawing.let_go()
        self._put_modes_back()
        self._put_hooks_back()
        torch._C._set_grad_enabled(self._grad)

    def _put_modes_back(self) -> None:
        now, then = _dispatch_modes(), self._dispatch_modes
        num_common = _num_common(now, then)
        for _ in now[num_common:]:
            dispatch._pop_mode()
        for mode in then[num_common:]:
            dispatch._push_mode(mode)
        for name, flag in zip(_FLAGS, self._flags, strict=True):
            if getattr(dispatch, name) is not flag:
                setattr(dispatch, name, flag)
                if name == _FLAGS[-1] and hasattr(dispatch, "set_is_in_mode_without_ignore_compile_internals"):
                    dispatch.set_is_in_mode_without_ignore_compile_internals(flag)
        now, then = _get_current_function_mode_stack(), self._function_modes
        num_common = _num_common(now, then)
        for _ in now[num_common:]:
            _pop_mode()
        for mode in then[num_common:]:
            _push_mode(mode)
        default_device.CURRENT_DEVICE = self._device

    def _put_hooks_back(self) -> None:
        top, pop = (
            torch._C._autograd._top_saved_tensors_default_hooks,
            torch._C._autograd._pop_saved_tensors_default_hooks,
        )
        while (hooks := top(True)) is not None and not _are_same(hooks, self._hooks):
            pop()
        if hooks is None and self._hooks is not None:
            torch._C._autograd._push_saved_tensors_default_hooks(*self._hooks)


def _dispatch_modes() -> list[Any]:
    return [torch._C._get_dispatch_stack_at(index) for index in range(_num_dispatch_modes())]


def _num_common(now: list[Any], then: list[Any]) -> int:
    num = 0
    while num < min(len(now), len(then)) and now[num] is then[num]:
        num += 1
    return num


def _are_same(hooks: Any, others: Any) -> bool:
    return others is not None and hooks[0] is others[0] and hooks[1] is others[1]
