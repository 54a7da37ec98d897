"""What MindSpore keeps per thread: whether operations are recorded for gradients, and the stream.

It does not tell which dispatch modes and which hooks on saved tensors a thread has. A mode would see one of the two
threads only, so it is refused. Hooks on saved tensors stay with their thread: a backward saves nothing, except where it
records itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from mindspore._c_expression import _DispatchGuardStack
from mindspore.graph.api import _pynative_executor

from hyper_parallel._base.errors import StateError
from hyper_parallel.core.parallel.pipeline.thread_state import FrameworkState, Generators
from hyper_parallel.platform.interface import PlatformType
from hyper_parallel.platform.mindspore.devices import Devices


class MindSporeThreadState(FrameworkState):
    platform_type = PlatformType.MINDSPORE
    # hazard: MindSpore 2.10 on the CPU ends with a segmentation fault when two threads run operations, with or without
    # gradients.
    one_thread_at_a_time = True

    def __init__(self) -> None:
        if _DispatchGuardStack.depth():
            raise StateError(
                "A dispatch mode of MindSpore cannot be carried over into another thread.",
                expected="no dispatch mode around the call",
                got=f"{_DispatchGuardStack.depth()} of them",
                do="Enter the mode inside the functions that shall be seen.",
            )
        self._grad_flag = _pynative_executor.grad_flag()
        self._enable_grad = _pynative_executor.enable_grad()
        self._stream = Devices.get_device_handle().current_stream()

    @contextmanager
    def applied(self) -> Iterator[None]:
        flag, enabled = _pynative_executor.grad_flag(), _pynative_executor.enable_grad()
        _pynative_executor.set_grad_flag(self._grad_flag)
        _pynative_executor.set_enable_grad(self._enable_grad)
        try:
            with Devices.get_device_handle().stream(self._stream):
                yield
        finally:
            _pynative_executor.set_grad_flag(flag)
            _pynative_executor.set_enable_grad(enabled)

    def as_a_side(self, *, is_caller: bool) -> AbstractContextManager[None]:
        return nullcontext()  # a backward always stays; numbers are brought back when the turn changes

    def generators(self) -> Generators | None:
        # Without a seed every op draws one from the system, and regions keep what was drawn.
        return None if Devices.is_unseeded() else MindSporeGenerators()


class MindSporeGenerators(Generators):
    def __init__(self) -> None:
        self._state = Devices.get_rng_state()

    def restore(self) -> None:
        Devices.set_rng_state(self._state)


BACKEND = MindSporeThreadState
