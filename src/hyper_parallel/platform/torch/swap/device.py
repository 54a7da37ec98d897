"""PyTorch's side of the swap engine: streams, events, memory and copies of one accelerator, and of the CPU.

A buffer of the engine is a flat uint8 tensor over a whole storage. The classes here have the methods that
`core/swap/device.py` names; they inherit nothing, since the platform does not import the core.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from typing import Any

import torch

from hyper_parallel._base.errors import ArgumentTypeError, describe
from hyper_parallel._base.put_back import PutBack, put_back_on_error
from hyper_parallel.core.swap.disk_stream import DiskStream, HostComputeStream

_CUDA_SUCCESS = 0
_NOTHING = contextlib.nullcontext()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole storage of a tensor as bytes; no copy, no way back to the autograd graph."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def shown(what: str) -> Any:
    """Show a range in the framework's profiler, while one runs: "hyper_parallel: offload".

    Where no profiler runs it costs next to nothing.
    """
    if torch.autograd._profiler_enabled():
        return torch.profiler.record_function(f"hyper_parallel: {what}")
    return _NOTHING


class AcceleratorStream:
    """A stream of the framework, with events that the engine can ask and join."""

    __slots__ = ("_event", "raw")

    def __init__(self, raw: Any, event_type: type) -> None:
        self.raw = raw
        self._event = event_type

    def record_event(self) -> Any:
        event = self._event()
        event.record(self.raw)
        return event

    def wait_event(self, event: Any) -> None:
        self.raw.wait_event(event)

    def record_time(self) -> Any:
        moment = self._event(enable_timing=True)  # the others carry no time, which makes them cheaper
        moment.record(self.raw)
        return moment

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AcceleratorStream) and bool(self.raw == other.raw)

    def __hash__(self) -> int:
        return hash(self.raw)


class OnStream(PutBack):
    """A block whose kernels and copies are launched on a stream."""

    def __init__(self, handle: Any, stream: Any) -> None:
        self._handle = handle
        self._stream = stream
        here = handle.current_stream()
        self._before = [here] if here.device == stream.device else [handle.current_stream(stream.device), here]

    def change(self) -> None:
        self._handle.set_stream(self._stream)

    def put_back(self) -> None:
        for stream in self._before:
            self._handle.set_stream(stream)


class AcceleratorDevice:
    """One accelerator (`cuda:0`); its offload and load streams are made here and live as long as the process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._handle = getattr(torch, device.type)
        self._event = _event_type(self._handle)
        # As a nested dict: `memory_allocated` writes all numbers of the allocator into a flat one first, ten times as
        # slow.
        self._memory_stats = getattr(self._handle, "memory_stats_as_nested_dict", None)
        self._memory_allocated = getattr(self._handle, "memory_allocated", None)
        with self._handle.device(device):
            # One stream per direction: the two directions of the link are independent, and in one stream a load would
            # queue behind offloads.
            self._offload = AcceleratorStream(self._handle.Stream(), self._event)
            self._load = AcceleratorStream(self._handle.Stream(), self._event)

    def current_stream(self) -> AcceleratorStream:
        return AcceleratorStream(self._handle.current_stream(self.device), self._event)

    def offload_stream(self) -> AcceleratorStream:
        return self._offload

    def load_stream(self) -> AcceleratorStream:
        return self._load

    def bytes_in_use(self) -> int | None:
        if self._memory_stats is not None:
            return int(self._memory_stats(self.device)["allocated_bytes"]["all"]["current"])
        return None if self._memory_allocated is None else int(self._memory_allocated(self.device))

    def allocate(self, num_bytes: int, stream: Any) -> torch.Tensor:
        # In the pool of the stream that will use it: no other stream's allocations can take the memory over early.
        on = OnStream(self._handle, stream.raw)
        with put_back_on_error(on), on:
            try:
                return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            except torch.OutOfMemoryError as error:
                raise MemoryError(str(error)) from error

    def launch_offload(self, block: Any, source: torch.Tensor, stream: Any) -> None:
        on = OnStream(self._handle, stream.raw)
        with put_back_on_error(on), on, shown("offload"):
            for host, part in _parts(block, source):
                host.copy_(part, non_blocking=True)

    def launch_load(self, buffer: torch.Tensor, block: Any, stream: Any) -> None:
        on = OnStream(self._handle, stream.raw)
        with put_back_on_error(on), on, shown("load"):
            for host, part in _parts(block, buffer):
                part.copy_(host, non_blocking=True)

    def stream_of(self, stream: object) -> AcceleratorStream:
        """Return a stream of the user's as the engine takes it, for copies by hand."""
        if not isinstance(stream, self._handle.Stream) or stream.device != self.device:
            raise ArgumentTypeError(
                "`copy_stream` is no stream of the tensor's device.",
                expected=f"a torch.{self.device.type}.Stream of {self.device}, or None",
                got=describe(stream),
            )
        return AcceleratorStream(stream, self._event)


def _event_type(handle: Any) -> type:
    class SwapEvent(handle.Event):
        error = None  # a copy on a device stream cannot fail by halves

        def join(self) -> None:
            self.synchronize()

        def ms_since(self, earlier: Any) -> float:
            return float(earlier.elapsed_time(self))

    return SwapEvent


class CpuDevice:
    """The CPU, whose slower memory is a disk: compute runs in the calling thread, copies in two other threads."""

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

    def allocate(self, num_bytes: int, stream: object) -> torch.Tensor:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        except RuntimeError as error:  # what PyTorch's allocator of the CPU raises
            raise MemoryError(str(error)) from error

    def stream_of(self, stream: object) -> None:
        """Return None: the CPU has no other stream for copies than the engine's own."""

    def launch_offload(self, block: Any, source: torch.Tensor, stream: Any) -> None:
        with shown("offload"):
            stream.launch_write(block, lambda: memoryview(source.numpy()))

    def launch_load(self, buffer: torch.Tensor, block: Any, stream: Any) -> None:
        with shown("load"):
            stream.launch_read(block, lambda: memoryview(buffer.numpy()))


def _parts(block: Any, memory: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Go through the parts of a pinned block, with the parts of device memory they are copied from or to."""
    begin = 0
    for part in block.parts:
        host = part.slab.tensor[part.offset : part.offset + part.num_bytes]
        yield host, memory if part.num_bytes == memory.numel() else memory[begin : begin + part.num_bytes]
        begin += part.num_bytes


def memory_of(block: Any) -> memoryview:
    """Return the bytes of a pinned block of one part, for the disk."""
    return memoryview(block.slab.tensor.numpy())[block.offset : block.offset + block.num_bytes]


class PinnedSlab:
    """Pinned host memory of an exact size.

    The framework's own pinned allocator rounds up to powers of two. So the memory is mapped here and registered with
    the driver; where the framework offers no such call (other accelerators than CUDA), its allocator has to do.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._mapping: mmap.mmap | None = None
        self._cudart: Any = None
        if device.type != "cuda" or torch.version.hip is not None:
            self.tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            return
        self._mapping = mmap.mmap(-1, num_bytes)
        self.tensor = torch.frombuffer(self._mapping, dtype=torch.uint8)
        cudart, address, code = torch.cuda.cudart(), self.tensor.data_ptr(), _CUDA_SUCCESS
        try:
            self._cudart = cudart
            code = int(cudart.cudaHostRegister(address, num_bytes, 0))
        except BaseException:
            self.free()  # Ctrl-C came after the driver's answer
            raise
        if code != _CUDA_SUCCESS:
            self._cudart = None
            raise MemoryError(f"the driver could not pin {num_bytes} bytes of host memory (CUDA error {code})")

    def free(self) -> None:
        """Return the memory; no copy may be under way."""
        if self._cudart is not None:
            self._cudart.cudaHostUnregister(self.tensor.data_ptr())
            self._cudart = None
        self.tensor = torch.empty(0, dtype=torch.uint8)
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None
