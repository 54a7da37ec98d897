"""Arguments of one step, split into micro batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel._base.whole_numbers import as_int
from hyper_parallel.platform import trees

# (tensor, dim, start, length) -> that part of the tensor, differentiable
Narrow = Callable[[Any, int, int, int], Any]


class MicroBatch:
    """Splits `(args, kwargs)` into lists of args and of kwargs, one entry per micro batch.

    Called with a function it decorates it: the function then runs once per micro batch and returns the list of results.
    Tensors are split along the dim given for their argument, also inside containers; other values are repeated.
    """

    def __init__(
        self,
        num: int,
        args_batch_dim: Sequence[int | None] | None,
        kwargs_batch_dim: Mapping[str, int | None] | None,
        tensor_type: type,
        narrow: Narrow,
    ) -> None:
        whole = as_int(num)
        if whole is None or whole < 1:
            raise ArgumentError("The number of micro batches counts.", expected="at least 1", got=describe(num))
        if args_batch_dim is not None and not isinstance(args_batch_dim, (list, tuple)):
            raise ArgumentTypeError(
                "`args_batch_dim` has one entry per argument.", expected="a list or None", got=describe(args_batch_dim)
            )
        if kwargs_batch_dim is not None and not isinstance(kwargs_batch_dim, Mapping):
            raise ArgumentTypeError(
                "`kwargs_batch_dim` has one entry per keyword.",
                expected="a dict or None",
                got=describe(kwargs_batch_dim),
            )
        for dim in [*(args_batch_dim or ()), *(kwargs_batch_dim or {}).values()]:
            whole_dim = as_int(dim)
            if dim is not None and (whole_dim is None or whole_dim < -1):
                raise ArgumentError(
                    "A batch dim counts from 0.",
                    expected="0, 1, …; None or -1 for a value that is not split",
                    got=describe(dim),
                )
        self.num = whole
        self.args_batch_dim = None if args_batch_dim is None else [as_int(dim) for dim in args_batch_dim]
        self.kwargs_batch_dim = (
            None if kwargs_batch_dim is None else {k: as_int(d) for k, d in kwargs_batch_dim.items()}
        )
        self._tensor_type = tensor_type
        self._narrow = narrow

    def __call__(self, *call_args: Any, **call_kwargs: Any) -> Any:
        if len(call_args) == 1 and not call_kwargs and callable(call_args[0]):
            return self._decorate(call_args[0])
        return self.split(*call_args, **call_kwargs)

    def split(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> tuple[list[Any], list[Any]]:
        """Return the arguments of every micro batch: the list of args, and the list of kwargs."""
        if not isinstance(args, (list, tuple)):
            raise ArgumentTypeError(
                "Positional arguments come as one list or tuple.", expected="a list", got=describe(args)
            )
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise ArgumentTypeError(
                "Keyword arguments come as one dict.", expected="a dict or None", got=describe(kwargs)
            )
        kwargs = {} if kwargs is None else kwargs
        dims = self._dims_of_args(args)
        key_dims = self._dims_of_kwargs(kwargs)
        split_args = [
            self._parts(value, dim, f"argument {i}") for i, (value, dim) in enumerate(zip(args, dims, strict=True))
        ]
        split_kwargs = {key: self._parts(value, key_dims[key], f"`{key}`") for key, value in kwargs.items()}
        return (
            [[parts[i] for parts in split_args] for i in range(self.num)],
            [{key: parts[i] for key, parts in split_kwargs.items()} for i in range(self.num)],
        )

    def _decorate(self, function: Callable[..., Any]) -> Callable[..., list[Any]]:
        @functools.wraps(function)
        def run_each(*args: Any, **kwargs: Any) -> list[Any]:
            many_args, many_kwargs = self.split(args, kwargs)
            return [function(*a, **k) for a, k in zip(many_args, many_kwargs, strict=True)]

        return run_each

    def _dims_of_args(self, args: Sequence[Any]) -> Sequence[int | None]:
        if self.args_batch_dim is None:
            return [0] * len(args)
        if len(self.args_batch_dim) != len(args):
            raise ArgumentError(
                "`args_batch_dim` has one entry per argument.",
                expected=f"{len(self.args_batch_dim)} arguments",
                got=str(len(args)),
            )
        return self.args_batch_dim

    def _dims_of_kwargs(self, kwargs: Mapping[str, Any]) -> dict[str, int | None]:
        given = self.kwargs_batch_dim or {}
        unknown = [key for key in given if key not in kwargs]
        if unknown:
            raise ArgumentError(
                "`kwargs_batch_dim` names a keyword that was not given.",
                expected="one of " + (", ".join(sorted(kwargs)) or "none"),
                got=", ".join(sorted(unknown)),
            )
        return {key: given.get(key, 0) for key in kwargs}

    def _parts(self, value: object, dim: int | None, where: str) -> list[Any]:
        if dim is None or dim == -1:
            return [value] * self.num

        def part(index: int) -> Any:
            def of_leaf(leaf: object) -> Any:
                if not isinstance(leaf, self._tensor_type):
                    return leaf
                length = self._check_divisible(leaf, dim, where) // self.num
                return self._narrow(leaf, dim, index * length, length)

            return trees.map_leaves(of_leaf, value)

        return [part(index) for index in range(self.num)]

    def _check_divisible(self, tensor: Any, dim: int, where: str) -> int:
        shape = tuple(tensor.shape)
        if dim >= len(shape):
            raise ArgumentError(
                "A tensor lacks the batch dim.",
                expected=f"more than {dim} dims",
                got=f"shape {list(shape)}",
                where=where,
                do="Give None for a value that is not to be split.",
            )
        length = int(shape[dim])
        if length % self.num:
            raise ArgumentError(
                "The batch cannot be split evenly.",
                expected=f"a multiple of {self.num} micro batches",
                got=f"{length} (dim {dim} of shape {list(shape)})",
                where=where,
            )
        return length
