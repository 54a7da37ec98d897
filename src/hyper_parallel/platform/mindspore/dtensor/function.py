"""`DFunction` on MindSpore: users' own autograd functions, on plain and on distributed tensors."""

from __future__ import annotations

import sys
from typing import Any

from mindspore.common._grad_function import _Function

from hyper_parallel.core.shard.local_callable import FunctionOnShards
from hyper_parallel.platform.mindspore.dtensor import backend  # noqa: F401 - so that the dispatcher knows DTensors
from hyper_parallel.platform.mindspore.dtensor.tensor import DTensor

__all__ = ["DFunction"]


class DFunction(FunctionOnShards, _Function):
    """Base of users' own distributed autograd functions: `forward` and `backward` on local tensors.

    `apply` with plain tensors is MindSpore's own. With a DTensor among its arguments it follows the rule that is
    registered under `_op_name`, and answers DTensors.

    Example:
        >>> class Double(DFunction):
        ...     _op_name = "Double"
        ...
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         return x * 2
        ...
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         return grad * 2
        >>> import mindspore
        >>> print(Double.apply(mindspore.ops.ones(2)))
        [2. 2.]
    """

    _dtensor_types = (DTensor,)
    _framework_function = _Function
    _other_framework = "torch"

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        if cls._other_framework in sys.modules:
            cls._check_own((*args, *kwargs.values()))
        if kwargs or cls._has_dtensor(args):
            return cls._apply_anything(args, kwargs)
        return super().apply(*args)

    @classmethod
    def _apply_natively(cls, *args: Any) -> Any:
        return super().apply(*args)
