"""How much memory is in use, and how long things take, between the marks of one step.

A meter is told of a mark (`"forward 3"`) and gives a reading for each span from one mark to the next.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from hyper_parallel._base.errors import StateError
from hyper_parallel.core.planner.model.measured_span import MeasuredSpan


class MemoryMeter(Protocol):
    def mark(self, name: str) -> None: ...

    def spans(self) -> list[MeasuredSpan]: ...


class CpuMemory:
    """Measures memory by the profiler's allocator events, which count every byte of the CPU's allocator."""

    _PREFIX = "hyper_parallel mark "

    def __init__(self) -> None:
        self._names: list[str] = []
        self._profile: Any = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        if torch.autograd._profiler_enabled():  # PyTorch would end it without a word, and its profile would be empty
            raise StateError(
                "Memory cannot be measured while a profiler runs.",
                expected="no profiler: on a CPU memory is measured with PyTorch's own, of which there is one at a time",
                got="one that runs",
                do="Plan before `torch.profiler.profile` begins, or after it has ended.",
            )
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it tells the terminal when it starts and stops
        # Without `torch.profiler.profile` around it, which makes a Python object of every op: that took ten times as
        # long as the step.
        with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as self._profile:
            module: Any = torch.autograd.profiler
            prepare = module._prepare_profiler
            try:
                module._prepare_profiler = self._refuse_another
                yield
            finally:
                module._prepare_profiler = prepare

    def _refuse_another(self, *_given: Any, **_named: Any) -> None:
        """Raise before PyTorch ends this profiler for another one, without a word.

        Where that one begins in backward, the process would end with it.
        """
        raise StateError(
            "The model's step begins a profiler while memory is measured with one.",
            expected="no profiler: on a CPU memory is measured with PyTorch's own, of which there is one at a time",
            got="another one",
            where="backward" if "turn" in self._names else "forward",
            do="Switch the model's own profiler off while planning.",
        )

    def mark(self, name: str) -> None:
        with torch.profiler.record_function(f"{self._PREFIX}{len(self._names)}"):
            self._names.append(name)

    def spans(self) -> list[MeasuredSpan]:
        spans: list[MeasuredSpan] = []
        level = peak = first = 0
        for _, is_mark, number in sorted(self._events()):
            if not is_mark:
                level += number
                peak = max(peak, level)
                continue
            if number == 0:
                first = level
            else:
                spans[-1] = spans[-1]._replace(peak_bytes=peak - first)
            spans.append(MeasuredSpan(self._names[number], level - first, level - first))
            peak = level
        if spans:
            spans[-1] = spans[-1]._replace(peak_bytes=peak - first)
        return spans

    def _events(self) -> Iterator[tuple[int, bool, int]]:
        """Go through the events: time, whether it is a mark, and bytes or the mark's number."""
        cpu = torch.autograd.DeviceType.CPU
        for event in self._profile.kineto_results.events():
            name = event.name()
            if name == "[memory]":
                if event.device_type() == cpu:
                    yield event.start_ns(), False, event.nbytes()
            elif name.startswith(self._PREFIX):
                yield event.start_ns(), True, int(name.removeprefix(self._PREFIX))


class DeviceMemory:
    """Measures memory by the counters of an accelerator's allocator.

    It counts in the order of the host, as the allocator itself does.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._handle = getattr(torch, device.type)
        self._spans: list[MeasuredSpan] = []
        self._first = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        yield
        self._close()

    def mark(self, name: str) -> None:
        self._close()
        level = int(self._handle.memory_allocated(self._device))
        if not self._spans:
            self._first = level
        self._handle.reset_peak_memory_stats(self._device)
        self._spans.append(MeasuredSpan(name, level - self._first, level - self._first))

    def _close(self) -> None:
        if self._spans:
            peak = int(self._handle.max_memory_allocated(self._device))
            self._spans[-1] = self._spans[-1]._replace(peak_bytes=peak - self._first)

    def spans(self) -> list[MeasuredSpan]:
        return self._spans


def memory_meter(device: torch.device) -> CpuMemory | DeviceMemory:
    return CpuMemory() if device.type == "cpu" else DeviceMemory(device)


class Clock:
    """Measures milliseconds between marks: by events of an accelerator's stream, or by the host's time."""

    def __init__(self, device: torch.device) -> None:
        self._handle = None if device.type == "cpu" else getattr(torch, device.type)
        self._marks: list[tuple[str, Any]] = []

    def mark(self, name: str) -> None:
        self._marks.append((name, self.now()))

    def now(self) -> Any:
        if self._handle is None:
            return time.perf_counter()
        event = self._handle.Event(enable_timing=True)
        event.record()
        return event

    def between(self, begin: Any, end: Any) -> float:
        return (end - begin) * 1e3 if self._handle is None else float(begin.elapsed_time(end))

    def spans(self) -> dict[str, float]:
        """List the milliseconds from each mark to the next, by the name of the first."""
        if self._handle is not None:
            self._handle.synchronize()
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return {name: self.between(begin, end) for (name, begin), (_, end) in pairs}
