"""The bytes of tensors, for NumPy: parts of parameters are moved as bytes, so that their dtypes do not matter.

For the CPU alone, and while nothing computes: an operation has finished there when its call returns.
"""

from __future__ import annotations

import ctypes
import math
import zlib
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, mint
from mindspore.common import dtype as mstype

from hyper_parallel.core.parallel.sharding.cutting import Cut

__all__ = ["Numbers", "boxes", "bytes_of", "checksum", "numbers_of", "numpy_dtype", "resize", "tensor_of"]

Numbers = np.ndarray[Any, Any]


def bytes_of(tensor: Tensor) -> Numbers:
    """Return the bytes of a contiguous tensor. It is not kept alive by them."""
    if tensor.nbytes == 0:
        return np.empty(0, np.uint8)
    return np.frombuffer((ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr()), np.uint8)


def boxes(tensor: Tensor, part: Cut) -> list[Numbers]:
    """Return the bytes of each rank's part of a whole tensor, as views into its memory."""
    values = bytes_of(tensor).reshape(*part.shape, tensor.itemsize)
    return parts_of(values, part)


def parts_of(values: Numbers, part: Cut) -> list[Numbers]:
    """Cut an array into the parts of all ranks, as views. It may have more dims than what is cut."""
    if part.dim is None:
        return [values] * part.num_ranks
    found = []
    for rank in range(part.num_ranks):
        start, size = part.range_of(rank)
        found.append(values[(slice(None),) * part.dim + (slice(start, start + size),)])
    return found


def checksum(array: Numbers, before: int = 0) -> int:
    """Return another number for other bytes. A change of one number in them is always seen."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).data, before)


def resize(tensor: Tensor, num_bytes: int) -> None:
    """Give a tensor, and all that share its memory, memory of this size; 0: let go of it."""
    if math.prod(tensor.shape):
        tensor.untyped_storage().resize_(num_bytes)


# -- numbers -----------------------------------------------------------------------------------------------------------


def numpy_dtype(dtype: Any) -> Any:
    """In which dtype NumPy adds such numbers up: small ones in float32, complex ones as pairs."""
    if dtype in (mindspore.bfloat16, mindspore.float16):
        return np.dtype(np.float32)
    if dtype in (mindspore.complex64, mindspore.complex128):
        return np.dtype(np.float32 if dtype == mindspore.complex64 else np.float64)
    return np.dtype(mstype._dtype_to_nptype(dtype))


def numbers_of(tensor: Tensor) -> Numbers:
    """Return the numbers of a tensor in the dtype of `numpy_dtype`; those of a complex one have one dim more."""
    if tensor.dtype in (mindspore.bfloat16, mindspore.float16):
        tensor = tensor.to(mindspore.float32)
    values: Numbers = np.ascontiguousarray(tensor.asnumpy()).reshape(tensor.shape)
    if values.dtype.kind == "c":
        values = values.view(numpy_dtype(tensor.dtype)).reshape(*values.shape, 2)
    return values


def tensor_of(values: Numbers, shape: tuple[int, ...], dtype: Any) -> Tensor:
    """Make a tensor of numbers as `numbers_of` gives them."""
    if math.prod(shape) == 0:
        return mint.empty(shape, dtype=dtype)
    if dtype == mindspore.bfloat16:
        return Tensor(np.ascontiguousarray(values).reshape(shape)).to(dtype)
    wanted = np.dtype(mstype._dtype_to_nptype(dtype))
    if wanted.kind == "c":
        return Tensor(np.ascontiguousarray(values, numpy_dtype(dtype)).view(wanted).reshape(shape))
    return Tensor(np.ascontiguousarray(values, wanted).reshape(shape))
