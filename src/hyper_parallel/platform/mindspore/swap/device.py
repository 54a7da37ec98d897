"""MindSpore's side of the swap engine: streams, events, memory and copies of one accelerator, and of the CPU.

The classes here have the methods that `core/swap/device.py` names; they inherit nothing, since the platform does not
import the core. On the CPU a buffer of the engine is `HostMemory`, on an accelerator a flat uint8 tensor over a whole
storage.

The accelerator's half uses MindSpore's own streams (`mindspore.runtime`) the way PyTorch's half uses PyTorch's. It was
written without such a device at hand and has not been run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, mint
from mindspore.graph.api import _no_grad

from hyper_parallel._base.errors import ArgumentTypeError, describe
from hyper_parallel.core.swap.disk_stream import DiskStream, HostComputeStream
from hyper_parallel.platform.mindspore.swap.storages import HostMemory, Look, unseen, watcher, whole


class CpuDevice:
    """The CPU, whose slower memory is a disk: compute runs in the calling thread, copies in two other threads.

    Those threads touch host memory through NumPy alone: two threads that run operators of MindSpore at once crash the
    process.
    """

    def __init__(self) -> None:
        self._compute = HostComputeStream()
        self._offload = DiskStream("offload")
        self._load = DiskStream("load")

    def current_stream(self) -> Any:
        return self._compute

    def offload_stream(self) -> Any:
        return self._offload

    def load_stream(self) -> Any:
        return self._load

    def bytes_in_use(self) -> None:
        """Return None: nobody counts the memory of the CPU."""

    def allocate(self, num_bytes: int, stream: Any) -> HostMemory:
        array = np.empty(num_bytes, np.uint8)
        watching = watcher()
        if watching is not None:
            watching.holds(array)
        return HostMemory(array)

    def stream_of(self, stream: Any) -> None:
        """Return None: the CPU has no other stream for copies than the engine's own."""

    def launch_offload(self, block: Any, source: HostMemory, stream: Any) -> None:
        array = source.array
        stream.launch_write(block, lambda: array.data)

    def launch_load(self, buffer: HostMemory, block: Any, stream: Any) -> None:
        array = buffer.array
        stream.launch_read(block, lambda: array.data)


class AcceleratorEvent:
    """An event of the framework, in the words of the engine."""

    __slots__ = ("raw",)
    error = None  # a copy on a device stream cannot fail by halves

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def query(self) -> bool:
        return bool(self.raw.query())

    def join(self) -> None:
        self.raw.synchronize()

    def ms_since(self, earlier: AcceleratorEvent) -> float:
        return float(earlier.raw.elapsed_time(self.raw))


class AcceleratorStream:
    """A stream of the framework, with events that the engine can ask and join."""

    __slots__ = ("raw",)

    def __init__(self, raw: Any) -> None:
        self.raw = raw

    def record_event(self) -> AcceleratorEvent:
        return self._record(mindspore.runtime.Event())

    def record_time(self) -> AcceleratorEvent:
        return self._record(mindspore.runtime.Event(enable_timing=True))

    def _record(self, event: Any) -> AcceleratorEvent:
        event.record(self.raw)
        return AcceleratorEvent(event)

    def wait_event(self, event: AcceleratorEvent) -> None:
        self.raw.wait_event(event.raw)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AcceleratorStream) and bool(self.raw == other.raw)

    def __hash__(self) -> int:
        return hash(self.raw.id)


class AcceleratorDevice:
    """The accelerator of this process; its offload and load streams are made here and live as long as the process."""

    def __init__(self) -> None:
        # One stream per direction: the two directions of the link are independent, and in one stream a load would queue
        # behind offloads.
        self._offload = AcceleratorStream(mindspore.runtime.Stream())
        self._load = AcceleratorStream(mindspore.runtime.Stream())

    def current_stream(self) -> AcceleratorStream:
        return AcceleratorStream(mindspore.runtime.current_stream())

    def offload_stream(self) -> AcceleratorStream:
        return self._offload

    def load_stream(self) -> AcceleratorStream:
        return self._load

    def bytes_in_use(self) -> int:
        return int(mindspore.runtime.memory_allocated())

    def allocate(self, num_bytes: int, stream: Any) -> Tensor:
        # In the pool of the stream that will use it: no other stream's allocations can take the memory over early.
        with mindspore.runtime.StreamCtx(stream.raw), unseen(), _no_grad():
            try:
                return mint.empty((num_bytes,), dtype=mindspore.uint8)
            except RuntimeError as error:
                raise MemoryError(str(error)) from error

    def launch_offload(self, block: Any, source: Tensor, stream: Any) -> None:
        with mindspore.runtime.StreamCtx(stream.raw), unseen(), _no_grad():
            for host, part in _parts(block, source):
                host.copy_(part, non_blocking=True)

    def launch_load(self, buffer: Tensor, block: Any, stream: Any) -> None:
        with mindspore.runtime.StreamCtx(stream.raw), unseen(), _no_grad():
            for host, part in _parts(block, buffer):
                part.copy_(host, non_blocking=True)

    def stream_of(self, stream: Any) -> AcceleratorStream:
        """Return a stream of the user's as the engine takes it, for copies by hand."""
        if not isinstance(stream, mindspore.runtime.Stream):
            raise ArgumentTypeError(
                "`copy_stream` is no stream of the tensor's device.",
                expected="a mindspore.runtime.Stream, or None",
                got=describe(stream),
            )
        return AcceleratorStream(stream)


def _parts(block: Any, memory: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Go through the parts of a pinned block, with the parts of device memory they are copied from or to."""
    begin = 0
    for part in block.parts:
        host = Look(mindspore.uint8, (part.num_bytes,), (1,), part.offset).on(part.slab.tensor)
        yield host, Look(mindspore.uint8, (part.num_bytes,), (1,), begin).on(memory)
        begin += part.num_bytes


class PinnedSlab:
    """Pinned host memory, from the framework's own allocator."""

    def __init__(self, num_bytes: int) -> None:
        try:
            self.tensor = mint.empty((num_bytes,), dtype=mindspore.uint8, device="CPU", pin_memory=True)
        except RuntimeError as error:
            raise MemoryError(str(error)) from error

    def free(self) -> None:
        """Return the memory; no copy may be under way."""
        self.tensor = mint.empty((0,), dtype=mindspore.uint8, device="CPU")


def memory_of(block: Any) -> memoryview:
    """Return the bytes of a pinned block of one part, for the disk."""
    return memoryview(block.slab.tensor.asnumpy())[block.offset : block.offset + block.num_bytes]


def flat(tensor: Tensor) -> Any:
    """Return the whole storage of a tensor as a buffer of the engine; no copy, no way to the graph."""
    if is_on_host(tensor):
        return HostMemory.of(tensor)
    return whole(tensor)


def tensor_on(buffer: object, look: Look) -> Tensor:
    """Make a tensor that looks this way at a buffer of the engine."""
    return buffer.seen_as(look) if isinstance(buffer, HostMemory) else look.on(buffer)


def is_on_host(tensor: Tensor) -> bool:
    return str(tensor.device).startswith("CPU")
