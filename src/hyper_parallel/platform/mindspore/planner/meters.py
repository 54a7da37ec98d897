"""How much memory is in use, and how long things take, between the marks of one step.

A meter is told of a mark (`"forward 3"`) and gives a reading for each span from one mark to the next.

MindSpore's allocator on the CPU tells nothing (`memory_allocated` is 0), and tensors do not tell when their memory
goes. What is known exactly is what is held for backward, and what an op reads and makes: so that is what is counted, at
each op of forward and backward.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import mindspore
import numpy as np
from mindspore import MsDispatchMode, Tensor, saved_tensors_hooks

from hyper_parallel.core.planner.model.measured_span import MeasuredSpan
from hyper_parallel.platform.mindspore.regions.recording import Call
from hyper_parallel.platform.mindspore.regions.saved_tensors import Kept
from hyper_parallel.platform.mindspore.swap.storages import (
    set_watcher,
    storage_address,
    storage_bytes,
)
from hyper_parallel.platform.trees import leaves


class HeldMemory:
    """Counts the bytes of the storages that somebody holds, each once; and their peak, with what an op reads and makes.

    Invariant: `_holders[address] > 0` and `_bytes[address]` for every storage that is held; `held_bytes ==
    sum(_bytes.values())`. While a storage is held no other one has its address.
    """

    def __init__(self, outside: Iterable[Tensor] = ()) -> None:
        """Start with nothing held. `outside`: tensors that are alive before and after; they do not count."""
        self.held_bytes = 0
        self.peak_bytes = 0
        self._outside = {storage_address(tensor) for tensor in outside}
        self._holders: dict[int, int] = {}
        self._bytes: dict[int, int] = {}

    def holds(self, memory: Tensor | np.ndarray[Any, Any]) -> None:
        """Count the memory of this object as held for as long as the object is there."""
        if isinstance(memory, Tensor):
            address, num_bytes = storage_address(memory), storage_bytes(memory)
        else:
            address, num_bytes = memory.ctypes.data, memory.nbytes
        if num_bytes == 0 or address in self._outside:
            return
        if address not in self._holders:
            self._holders[address] = 0
            self._bytes[address] = num_bytes
            self.held_bytes += num_bytes
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        self._holders[address] += 1
        weakref.finalize(memory, self._let_go, address).atexit = False

    def _let_go(self, address: int) -> None:
        self._holders[address] -= 1
        if self._holders[address] == 0:
            del self._holders[address]
            self.held_bytes -= self._bytes.pop(address)

    def ran(self, tensors: Iterable[Tensor], result: object) -> None:
        """Count what an op had at hand that has run on these tensors."""
        results = [leaf for leaf in leaves(result) if isinstance(leaf, Tensor)]
        at_hand = {storage_address(tensor): storage_bytes(tensor) for tensor in (*tensors, *results)}
        more = sum(
            num_bytes
            for address, num_bytes in at_hand.items()
            if address not in self._holders and address not in self._outside
        )
        self.peak_bytes = max(self.peak_bytes, self.held_bytes + more)


class _Ops(MsDispatchMode):
    """Sees the ops outside of regions, and those of backward.

    A region tells of its own (`set_watcher`).
    """

    def __init__(self, memory: HeldMemory) -> None:
        self._memory = memory

    def __ms_dispatch__(self, func: object, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        call = Call.of(func, args, kwargs)
        result = call.run()
        self._memory.ran(call.sorted()[0], result)
        return result


class MemoryMeter(Protocol):
    def running(self) -> contextlib.AbstractContextManager[None]: ...

    def mark(self, name: str) -> None: ...

    def spans(self) -> list[MeasuredSpan]: ...


class CpuMemory:
    """Measures what is held for backward, and what ops have at hand.

    What autograd saves outside of regions is kept by hooks that tell of it.
    """

    def __init__(self, outside: Iterable[Tensor]) -> None:
        self._memory = HeldMemory(outside)
        self._spans: list[MeasuredSpan] = []

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        set_watcher(self._memory)
        try:
            with saved_tensors_hooks(Kept, Kept.tensor), _Ops(self._memory):
                yield
                self._close()
        finally:
            set_watcher(None)

    def mark(self, name: str) -> None:
        self._close()
        level = self._memory.peak_bytes = self._memory.held_bytes
        self._spans.append(MeasuredSpan(name, level, level))

    def _close(self) -> None:
        if self._spans:
            self._spans[-1] = self._spans[-1]._replace(peak_bytes=self._memory.peak_bytes)

    def spans(self) -> list[MeasuredSpan]:
        return self._spans


class DeviceMemory:
    """Measures memory by the statistics of an accelerator's allocator.

    It was never run: no such device was at hand.
    """

    def __init__(self) -> None:
        self._spans: list[MeasuredSpan] = []
        self._first = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        yield
        self._close()

    def mark(self, name: str) -> None:
        self._close()
        level = int(mindspore.runtime.memory_allocated())
        if not self._spans:
            self._first = level
        mindspore.runtime.reset_max_memory_allocated()
        self._spans.append(MeasuredSpan(name, level - self._first, level - self._first))

    def _close(self) -> None:
        if self._spans:
            peak = int(mindspore.runtime.max_memory_allocated())
            self._spans[-1] = self._spans[-1]._replace(peak_bytes=peak - self._first)

    def spans(self) -> list[MeasuredSpan]:
        return self._spans


def memory_meter(device: str, outside: Iterable[Tensor] = ()) -> MemoryMeter:
    """Make the meter of a device. `outside`: tensors that are alive before and after a step."""
    return CpuMemory(outside) if is_cpu(device) else DeviceMemory()


def is_cpu(device: str) -> bool:
    return device.startswith("CPU")


class Clock:
    """Measures milliseconds between marks, by the host's clock.

    On an accelerator all that was launched is waited for.
    """

    def __init__(self, device: str) -> None:
        self._is_cpu = is_cpu(device)
        self._marks: list[tuple[str, float]] = []

    def mark(self, name: str) -> None:
        if not self._is_cpu:
            mindspore.runtime.synchronize()
        self._marks.append((name, time.perf_counter()))

    def spans(self) -> dict[str, float]:
        """List the milliseconds from each mark to the next, by the name of the first."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return {name: (end - begin) * 1e3 for (name, begin), (_, end) in pairs}
