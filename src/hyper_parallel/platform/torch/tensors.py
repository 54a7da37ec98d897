"""Tensors: what they are, making them, taking them apart."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel.platform import slicing, trees
from hyper_parallel.platform.arguments import check_flag, check_size, check_tensor, check_tensors, in_our_words
from hyper_parallel.platform.torch.dtypes import to_dtype, to_dtype_or


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
        return isinstance(obj, torch.Tensor)

    @staticmethod
    def get_element_size(tensor: torch.Tensor) -> int:
        return check_tensor(tensor, torch.Tensor, "get_element_size").element_size()

    @staticmethod
    def get_tensor_storage_size(tensor: torch.Tensor) -> int:
        check_tensor(tensor, torch.Tensor, "get_tensor_storage_size")
        return tensor.numel() * tensor.element_size()

    @staticmethod
    def tensor_type_cast(input_data: torch.Tensor, cast_type: object) -> torch.Tensor:
        return check_tensor(input_data, torch.Tensor, "tensor_type_cast").to(to_dtype(cast_type))

    def cast_fp_tensor(self, dtype: object, x: object) -> Any:
        dtype = to_dtype(dtype)
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            return x.to(dtype)
        return x

    def apply_to_tensors(self, fn: Callable[[Any], Any], container: object) -> Any:
        if not callable(fn):
            raise ArgumentTypeError("The function to apply comes first.", expected="a callable", got=describe(fn))
        return trees.map_leaves(lambda leaf: fn(leaf) if isinstance(leaf, torch.Tensor) else leaf, container)

    def tree_map(self, fn: Callable[[Any], Any], tree: object) -> Any:
        return trees.map_leaves(fn, tree)

    @staticmethod
    def chunk(data: torch.Tensor, split_dim: int, split_size: int, index: int) -> torch.Tensor:
        """Return the index-th of `split_size` chunks (a number, despite its name); past the last one, an empty
        tensor.
        """
        check_tensor(data, torch.Tensor, "chunk")
        dim = slicing.check_dim(split_dim, data.dim())
        start, stop = slicing.chunk_bounds(data.shape[dim], split_size, index)
        return data.narrow(dim, start, stop - start)

    @staticmethod
    def cat(tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        parts = check_tensors(tensors, torch.Tensor, "cat")
        with in_our_words("cat", tensors=parts, dim=dim):
            return torch.cat(parts, dim)

    @staticmethod
    def construct_strided_slice(
        x: torch.Tensor, begin: Sequence[int | None], end: Sequence[int | None], stride: Sequence[int | None]
    ) -> torch.Tensor:
        check_tensor(x, torch.Tensor, "construct_strided_slice")
        ranges = slicing.slice_ranges(x.shape, begin, end, stride)
        picked = x[tuple(slice(bounds.start, bounds.stop, bounds.step) for bounds in ranges)] if ranges else x
        backwards = [dim for dim, bounds in enumerate(ranges) if bounds.is_reversed]
        return picked.flip(backwards) if backwards else picked  # PyTorch's own slices know no negative step

    @staticmethod
    def arange(
        start: object, end: object = None, step: object = 1, dtype: object = None, device: object = None
    ) -> torch.Tensor:
        if end is None:
            start, end = 0, start
        with in_our_words("arange", start=start, end=end, step=step, device=device):
            return torch.arange(start, end, step, dtype=to_dtype_or(dtype, torch.int64), device=device)

    @staticmethod
    def zeros(size: Sequence[int], dtype: object = None, device: object = None) -> torch.Tensor:
        with in_our_words("zeros", size=size, device=device):
            return torch.zeros(check_size(size), dtype=to_dtype_or(dtype, torch.float32), device=device)

    @staticmethod
    def ones(size: Sequence[int], dtype: object = None, device: object = None) -> torch.Tensor:
        """Make ones of a size, float32 unless told."""
        with in_our_words("ones", size=size, device=device):
            return torch.ones(check_size(size), dtype=to_dtype_or(dtype, torch.float32), device=device)

    @staticmethod
    def full(size: Sequence[int], fill_value: object, dtype: object = None, device: object = None) -> torch.Tensor:
        """Make a tensor of a size filled with one value, float32 unless told."""
        with in_our_words("full", size=size, fill_value=fill_value, device=device):
            return torch.full(check_size(size), fill_value, dtype=to_dtype_or(dtype, torch.float32), device=device)

    @staticmethod
    def empty(size: Sequence[int], dtype: object = None, device: object = None) -> torch.Tensor:
        """Make an uninitialised tensor of a size, float32 unless told."""
        with in_our_words("empty", size=size, device=device):
            return torch.empty(check_size(size), dtype=to_dtype_or(dtype, torch.float32), device=device)

    @staticmethod
    def full_like(tensor: torch.Tensor, fill_value: object, dtype: object = None) -> torch.Tensor:
        check_tensor(tensor, torch.Tensor, "full_like")
        with in_our_words("full_like", fill_value=fill_value):
            return torch.full_like(tensor, fill_value, dtype=to_dtype_or(dtype, tensor.dtype))

    @staticmethod
    def empty_like(
        tensor: torch.Tensor, *, dtype: object = None, device: object = None, pin_memory: bool = False
    ) -> torch.Tensor:
        check_tensor(tensor, torch.Tensor, "empty_like")
        check_flag(pin_memory, "pin_memory")
        with in_our_words("empty_like", device=device):
            target = tensor.device if device is None else torch.device(device)
        # Pinned memory is host memory that an accelerator reads directly: without one there is nothing to pin for.
        can_pin = pin_memory and target.type == "cpu" and torch.accelerator.is_available()
        return torch.empty_like(tensor, dtype=to_dtype_or(dtype, tensor.dtype), device=target, pin_memory=can_pin)

    @staticmethod
    def new_tensor(tensor_shape: Sequence[int], tensor_type: object, device: object) -> torch.Tensor:
        with in_our_words("new_tensor", tensor_shape=tensor_shape, device=device):
            return torch.empty(check_size(tensor_shape, "tensor_shape"), dtype=to_dtype(tensor_type), device=device)

    @staticmethod
    def new_zero_parameter(
        param_shape: Sequence[int], param_type: object, requires_grad: bool, device: object
    ) -> torch.nn.Parameter:
        check_flag(requires_grad, "requires_grad")
        with in_our_words("new_zero_parameter", param_shape=param_shape, device=device):
            zeros = torch.zeros(check_size(param_shape, "param_shape"), dtype=to_dtype(param_type), device=device)
            return torch.nn.Parameter(zeros, requires_grad=requires_grad)

    @staticmethod
    def set_tensor_requires_grad(input_tensor: torch.Tensor) -> torch.Tensor:
        check_tensor(input_tensor, torch.Tensor, "set_tensor_requires_grad")
        if not (input_tensor.is_floating_point() or input_tensor.is_complex()):
            raise ArgumentError(
                "Only numbers with a fraction have gradients.", expected="a floating dtype", got=describe(input_tensor)
            )
        return input_tensor.requires_grad_()

    @staticmethod
    def tensor_to_numpy(tensor: torch.Tensor) -> np.ndarray:
        host = check_tensor(tensor, torch.Tensor, "tensor_to_numpy").detach().cpu().resolve_conj().resolve_neg()
        if host.dtype in _NOT_IN_NUMPY:
            host = host.float()
        return host.numpy()

    def str_to_dtype(self, dtype_str: str) -> torch.dtype:
        return to_dtype(dtype_str)

    def list_to_size(self, size_list: Sequence[int]) -> torch.Size:
        return torch.Size(check_size(size_list, "size_list"))

    @staticmethod
    def get_op_name(func: object) -> str:
        return _op_name(func)


_NOT_IN_NUMPY = {torch.bfloat16} | {value for name, value in vars(torch).items() if name.startswith("float8")}


def _op_name(func: object) -> str:
    if isinstance(func, torch._ops.OpOverload):
        return func.overloadpacket.__name__
    if isinstance(func, functools.partial):
        return _op_name(func.func)
    name = getattr(func, "__name__", None) or getattr(func, "name", None)
    if not isinstance(name, str):
        raise ArgumentTypeError("Operators have a name.", expected="a function, method or operator", got=describe(func))
    return name
