"""Tensors: what they are, making them, taking them apart."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, mint, ops
from mindspore.common import dtype as mstype
from mindspore.common._grad_function import _Function
from mindspore.graph.api import _no_grad

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel.platform import slicing, trees
from hyper_parallel.platform.arguments import check_flag, check_size, check_tensor, check_tensors, in_our_words
from hyper_parallel.platform.mindspore.devices import Devices, to_device_or_none
from hyper_parallel.platform.mindspore.dtypes import check_computable, to_dtype, to_dtype_or


class Tensors:
    @staticmethod
    def get_tensor_transform() -> Any:
        """Return the module that plans and carries out redistributions.

        `plan_redistribution(source, target, shape)` gives the steps from one layout to another, `redistribute` carries
        them out.
        """
        from hyper_parallel.core.dtensor import redistribution

        return redistribution

    @staticmethod
    def is_tensor(obj: object) -> bool:
        return isinstance(obj, Tensor)

    @staticmethod
    def get_element_size(tensor: Tensor) -> int:
        return check_tensor(tensor, Tensor, "get_element_size").itemsize

    @staticmethod
    def get_tensor_storage_size(tensor: Tensor) -> int:
        check_tensor(tensor, Tensor, "get_tensor_storage_size")
        return tensor.numel() * tensor.itemsize

    @staticmethod
    def tensor_type_cast(input_data: Tensor, cast_type: object) -> Tensor:
        return _cast(check_tensor(input_data, Tensor, "tensor_type_cast"), to_dtype(cast_type), "tensor_type_cast")

    def cast_fp_tensor(self, dtype: object, x: object) -> Any:
        dtype = to_dtype(dtype)
        if isinstance(x, Tensor) and x.dtype in mstype.float_type:
            return _cast(x, dtype, "cast_fp_tensor")
        return x

    def apply_to_tensors(self, fn: Callable[[Any], Any], container: object) -> Any:
        if not callable(fn):
            raise ArgumentTypeError("The function to apply comes first.", expected="a callable", got=describe(fn))
        return trees.map_leaves(lambda leaf: fn(leaf) if isinstance(leaf, Tensor) else leaf, container)

    def tree_map(self, fn: Callable[[Any], Any], tree: object) -> Any:
        return trees.map_leaves(fn, tree)

    @staticmethod
    def chunk(data: Tensor, split_dim: int, split_size: int, index: int) -> Tensor:
        """Return the index-th of `split_size` chunks (a number, despite its name); past the last one, an empty
        tensor.
        """
        check_tensor(data, Tensor, "chunk")
        dim = slicing.check_dim(split_dim, data.ndim)
        start, stop = slicing.chunk_bounds(data.shape[dim], split_size, index)
        return mint.narrow(data, dim, start, stop - start)

    @staticmethod
    def cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
        parts = check_tensors(tensors, Tensor, "cat")
        with in_our_words("cat", tensors=parts, dim=dim):
            return Tensors._cat(parts, dim)

    @staticmethod
    def _cat(parts: list[Tensor], dim: int) -> Tensor:
        if any(part.dtype != parts[0].dtype for part in parts):
            dtype = functools.reduce(_common_dtype, [part.dtype for part in parts])
            parts = [_cast(part, dtype, "cat") for part in parts]
        return mint.cat(parts, dim)

    @staticmethod
    def construct_strided_slice(
        x: Tensor, begin: Sequence[int | None], end: Sequence[int | None], stride: Sequence[int | None]
    ) -> Tensor:
        check_tensor(x, Tensor, "construct_strided_slice")
        return _take_ranges(x, slicing.slice_ranges(x.shape, begin, end, stride))

    @staticmethod
    def arange(
        start: object, end: object = None, step: object = 1, dtype: object = None, device: object = None
    ) -> Tensor:
        if end is None:
            start, end = 0, start
        with in_our_words("arange", start=start, end=end, step=step):
            return _arange(start, end, step, to_dtype_or(dtype, mindspore.int64), to_device_or_none(device))

    @staticmethod
    def zeros(size: Sequence[int], dtype: object = None, device: object = None) -> Tensor:
        return filled(check_size(size), 0, to_dtype_or(dtype, mindspore.float32), to_device_or_none(device), "zeros")

    @staticmethod
    def ones(size: Sequence[int], dtype: object = None, device: object = None) -> Tensor:
        """Make ones of a size, float32 unless told."""
        return filled(check_size(size), 1, to_dtype_or(dtype, mindspore.float32), to_device_or_none(device), "ones")

    @staticmethod
    def full(size: Sequence[int], fill_value: object, dtype: object = None, device: object = None) -> Tensor:
        """Make a tensor of a size filled with one value, float32 unless told."""
        dtype = to_dtype_or(dtype, mindspore.float32)
        with in_our_words("full", size=size, fill_value=fill_value):
            return filled(check_size(size), fill_value, dtype, to_device_or_none(device), "full")

    @staticmethod
    def empty(size: Sequence[int], dtype: object = None, device: object = None) -> Tensor:
        """Make an uninitialised tensor of a size, float32 unless told."""
        dtype = to_dtype_or(dtype, mindspore.float32)
        return mint.empty(check_size(size), dtype=dtype, device=to_device_or_none(device))

    @staticmethod
    def full_like(tensor: Tensor, fill_value: object, dtype: object = None) -> Tensor:
        check_tensor(tensor, Tensor, "full_like")
        device = "meta" if tensor.is_meta else None
        with in_our_words("full_like", fill_value=fill_value):
            return filled(tensor.shape, fill_value, to_dtype_or(dtype, tensor.dtype), device, "full_like")

    @staticmethod
    def empty_like(tensor: Tensor, *, dtype: object = None, device: object = None, pin_memory: bool = False) -> Tensor:
        check_tensor(tensor, Tensor, "empty_like")
        dtype = to_dtype_or(dtype, tensor.dtype)
        target = to_device_or_none(device)
        check_flag(pin_memory, "pin_memory")
        # Pinned memory is host memory that an accelerator reads directly: without one there is nothing to pin for.
        if pin_memory and target == "CPU" and Devices.device_type() != "cpu":
            return mint.empty_like(tensor, dtype=dtype, device=target, pin_memory=True)
        return mint.empty_like(tensor, dtype=dtype, device=target)

    @staticmethod
    def new_tensor(tensor_shape: Sequence[int], tensor_type: object, device: object) -> Tensor:
        size = check_size(tensor_shape, "tensor_shape")
        return mint.empty(size, dtype=to_dtype(tensor_type), device=to_device_or_none(device))

    @staticmethod
    def set_tensor_requires_grad(input_tensor: Tensor) -> Tensor:
        check_tensor(input_tensor, Tensor, "set_tensor_requires_grad")
        if input_tensor.dtype not in mstype.float_type + mstype.complex_type:  # MindSpore itself would say nothing
            raise ArgumentError(
                "Only numbers with a fraction have gradients.", expected="a floating dtype", got=describe(input_tensor)
            )
        input_tensor.requires_grad_()
        return input_tensor

    @staticmethod
    def tensor_to_numpy(tensor: Tensor) -> np.ndarray:
        check_tensor(tensor, Tensor, "tensor_to_numpy")
        if tensor.dtype in _NOT_IN_NUMPY:
            with _no_grad():
                tensor = _cast(tensor, mindspore.float32, "tensor_to_numpy")
        return tensor.asnumpy()

    def str_to_dtype(self, dtype_str: str) -> Any:
        return to_dtype(dtype_str)

    def list_to_size(self, size_list: Sequence[int]) -> tuple[int, ...]:
        return check_size(size_list, "size_list")

    @staticmethod
    def get_op_name(func: object) -> str:
        return _op_name(func)


_NOT_IN_NUMPY = {mindspore.bfloat16, mindspore.float8_e4m3fn, mindspore.float8_e5m2, mindspore.hifloat8}


def is_whole(tensor: Tensor) -> bool:
    """Say whether a tensor is all of its memory, in order: no view.

    The CPU writes in place only into such a tensor.
    """
    return (
        tensor.is_contiguous() and tensor.storage_offset() == 0 and tensor.untyped_storage().nbytes() == tensor.nbytes
    )


class _CastOfNothing(_Function):
    """A cast of a tensor without elements; the framework's own warns on the CPU, forward and backward."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dtype: Any) -> Tensor:
        ctx.dtype = tensor.dtype
        return mint.empty(tensor.shape, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return mint.empty(grad.shape, dtype=ctx.dtype), None


def _cast(tensor: Tensor, dtype: object, call: str) -> Tensor:
    if tensor.dtype == dtype:
        return tensor
    check_computable(call, tensor.dtype, dtype)
    if tensor.numel() == 0 and not tensor.is_meta:
        return _CastOfNothing.apply(tensor, dtype)
    return tensor.to(dtype)


def _common_dtype(left: object, right: object) -> Any:
    """Find the dtype in which MindSpore would add the two."""
    if left == right:
        return left
    return (mint.zeros((), dtype=left) + mint.zeros((), dtype=right)).dtype


def _take_ranges(x: Tensor, ranges: Sequence[slicing.SliceRange]) -> Tensor:
    lengths = [len(range(bounds.start, bounds.stop, bounds.step)) for bounds in ranges]
    # `narrow` is a view whose gradient works for every dtype and without elements; the gradient of `x[a:b]` knows
    # neither bfloat16 on the CPU nor an empty slice. So indexing is left to what cannot be narrowed.
    if 0 in lengths or all(bounds.step == 1 for bounds in ranges):
        for dim, (bounds, length) in enumerate(zip(ranges, lengths, strict=True)):
            if length != x.shape[dim]:
                x = mint.narrow(x, dim, bounds.start, length)
        steps = None
    else:
        steps = tuple(slice(bounds.start, bounds.stop, bounds.step) for bounds in ranges)
    backwards = [] if 0 in lengths else [dim for dim, bounds in enumerate(ranges) if bounds.is_reversed]
    if x.dtype == mindspore.bfloat16 and (steps or backwards) and Devices.device_type() == "cpu":
        # The CPU's kernels for both lack bfloat16; float32 holds every bfloat16 exactly, also in the gradient.
        return _pick(x.to(mindspore.float32), steps, backwards).to(mindspore.bfloat16)
    return _pick(x, steps, backwards)


def _pick(x: Tensor, steps: tuple[slice, ...] | None, backwards: list[int]) -> Tensor:
    picked = x if steps is None else x[steps]
    return mint.flip(picked, backwards) if backwards else picked


def filled(size: tuple[int, ...], value: object, dtype: object, device: str | None, call: str) -> Tensor:
    if device == "meta" or math.prod(size) == 0:  # nothing to fill, and no kernel that could warn about it
        return mint.empty(size, dtype=dtype, device=device)
    check_computable(call, dtype)
    if Devices.device_type() != "cpu":
        filled = mint.full(size, value, dtype=dtype)
        return filled if device is None else filled.to(device)
    if dtype == mindspore.bfloat16:  # which the CPU casts and does not fill
        return ops.full(size, value, dtype=mindspore.float32).to(dtype)
    return ops.full(size, value, dtype=dtype)


def _arange(start: Any, end: Any, step: Any, dtype: Any, device: str | None) -> Tensor:
    is_float = dtype in mstype.float_type
    first, last, by = (float(number) if is_float else int(number) for number in (start, end, step))
    if by == 0 or (last - first) / by < 0:
        raise ArgumentError(
            "A range goes from its start towards its end.",
            expected="a step other than 0 that leads from start to end",
            got=f"start {start}, end {end}, step {step}",
        )
    length = math.ceil((last - first) / by)
    if device == "meta" or length == 0:
        return mint.empty((length,), dtype=dtype, device=device)
    check_computable("arange", dtype)
    if Devices.device_type() != "cpu":
        made = mint.arange(first, last, by, dtype=dtype)
        return made if device is None else made.to(device)
    if is_float:
        # On the host: the CPU's operator counts in float32 whatever the dtype.
        return Tensor(first + by * np.arange(length)).to(dtype)
    return ops.arange(first, last, by, dtype=dtype)


def _op_name(func: object) -> str:
    if isinstance(func, functools.partial):
        return _op_name(func.func)
    for attribute in ("name", "__name__"):  # a primitive's `name` first: it is the key under which rules are kept
        name = getattr(func, attribute, None)
        if callable(func) and isinstance(name, str):
            return name
    raise ArgumentTypeError("Operators have a name.", expected="a function, method or operator", got=describe(func))
