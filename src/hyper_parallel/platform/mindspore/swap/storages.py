"""Tensors as memory: their storage, how they look at it, and the same memory without the graph."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import mindspore
import numpy as np
from mindspore import Tensor, mint
from mindspore._c_expression import _DisableMsDispatchMode
from mindspore.common import dtype as mstype
from mindspore.graph.api import _no_grad

# What is done here must not be taken for an op by a region around it.
unseen = _DisableMsDispatchMode


class Watcher(Protocol):
    """Somebody who wants to know what memory this package holds: the planner's meter."""

    def ran(self, tensors: Iterable[Tensor], result: object) -> None:
        """Note that an op of a region has run, on these tensors. Dispatch modes around a region do not see its ops."""

    def holds(self, memory: Tensor | np.ndarray[Any, Any]) -> None:
        """Note that the memory of this object is held as long as the object is there."""


_watcher: Watcher | None = None


def watcher() -> Watcher | None:
    """Return whoever watches now."""
    return _watcher


def set_watcher(new: Watcher | None) -> None:
    global _watcher
    _watcher = new


def storage_bytes(tensor: Tensor) -> int:
    """Return the bytes of the whole storage, whatever part of it the tensor looks at; 0 if it has no memory."""
    if tensor.is_meta:
        return 0
    try:
        return int(tensor.untyped_storage().nbytes())
    except (RuntimeError, ValueError):
        return 0  # sparse, or memory that nobody has asked for yet


def storage_address(tensor: Tensor) -> int:
    """Return where the storage begins; 0 without memory.

    Two living tensors have the same address if and only if they share a storage.
    """
    if tensor.is_meta:
        return 0
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, ValueError):
        return 0


def whole(tensor: Tensor) -> Tensor:
    """Return the whole storage of a tensor as bytes; no copy, no way to the graph."""
    storage = tensor.untyped_storage()
    num_bytes = int(storage.nbytes())
    with unseen(), _no_grad():
        # First in its own dtype, which `set_` insists on for a storage; from a tensor it takes any.
        typed = mint.empty((0,), dtype=tensor.dtype).set_(storage, 0, (num_bytes // tensor.itemsize,), (1,))
        return mint.empty((0,), dtype=mindspore.uint8).set_(typed, 0, (num_bytes,), (1,))


def aliased(tensor: Tensor) -> Tensor:
    """Make a tensor of the same memory that has no way to the graph.

    Not by `stop_gradient`: dispatch modes see it even where they are disabled.
    """
    alias: Tensor = tensor.data
    if _watcher is not None:
        _watcher.holds(alias)
    return alias


class Look(NamedTuple):
    """How a tensor looks at its storage."""

    dtype: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> Look:
        return cls(tensor.dtype, tensor.shape, tuple(tensor.stride()), int(tensor.storage_offset()))

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for length, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if length != 1 and stride != expected:
                return False
            expected *= length
        return True

    def on(self, memory: Tensor) -> Tensor:
        """Make a tensor that looks this way at other memory of the same size, given as bytes.

        `memory` begins where its storage does: MindSpore counts the offset from there, and does not look whether it
        leads outside. Kernels make a copy of what `set_` gives, each time: `on_host` has no such cost.
        """
        with unseen(), _no_grad():
            tensor: Tensor = mint.empty((0,), dtype=self.dtype).set_(memory, self.offset, self.shape, self.stride)
        if _watcher is not None:
            _watcher.holds(tensor)
        return tensor

    def on_host(self, memory: np.ndarray[Any, Any]) -> Tensor:
        """Make such a tensor over bytes on the CPU."""
        if not self.is_contiguous:
            with unseen(), _no_grad():
                return self.on(Tensor.from_numpy(memory))
        kind = np.dtype(mstype._dtype_to_nptype(self.dtype))
        begin = self.offset * kind.itemsize
        end = begin + math.prod(self.shape) * kind.itemsize
        with unseen(), _no_grad():
            return Tensor.from_numpy(memory[begin:end].view(kind).reshape(self.shape))

    def __str__(self) -> str:
        return f"{str(self.dtype).lower()}{list(self.shape)}"


def looking(tensor: Tensor, look: Look) -> Tensor:
    """Return a tensor as `look` sees it: a view of one value is made from another."""
    now = Look.of(tensor)
    if now == look:
        return tensor
    if now.is_contiguous and look.is_contiguous and now.offset == look.offset and tensor.size == math.prod(look.shape):
        with unseen(), _no_grad():
            view: Tensor = tensor.view(look.shape)
        if _watcher is not None:
            _watcher.holds(view)
        return view
    return look.on(whole(tensor))


class HostMemory:
    """The bytes of a storage on the CPU.

    Threads of the disk get `array` alone, which owns nothing where `owner` is a tensor: a tensor must not die in a
    thread while another runs operators.
    """

    __slots__ = ("array", "owner")

    def __init__(self, array: np.ndarray[Any, Any], owner: Tensor | None = None) -> None:
        self.array = array
        self.owner = owner

    @classmethod
    def of(cls, tensor: Tensor) -> HostMemory:
        """Take the whole storage of a tensor, whatever part of it the tensor looks at; no copy, no way to the graph."""
        num_bytes = storage_bytes(tensor)
        memory = (ctypes.c_uint8 * num_bytes).from_address(storage_address(tensor))
        return cls(np.ctypeslib.as_array(memory), aliased(tensor))

    def seen_as(self, look: Look) -> Tensor:
        """Make a tensor that shares these bytes and keeps them alive."""
        return look.on_host(self.array) if self.owner is None else looking(self.owner, look)


def copied(tensor: Tensor) -> Tensor:
    """Make a tensor of the same values in memory of its own."""
    with unseen(), _no_grad():
        copy: Tensor = tensor.data.copy()
    if _watcher is not None:
        _watcher.holds(copy)
    return copy
