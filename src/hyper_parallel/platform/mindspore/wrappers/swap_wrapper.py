"""The wrappers whose residuals leave the device: `swap_wrapper`, `offload_wrapper`.

They name what moves; `saved_tensors` moves it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import nn
from mindspore.graph.api import _pynative_executor

from hyper_parallel._base.errors import ArgumentTypeError, describe
from hyper_parallel.core.activation_checkpoint.options import name_of
from hyper_parallel.platform.mindspore.regions.saved_tensors import AsyncSaveOnCpu, base_check_fn
from hyper_parallel.platform.mindspore.wrappers.activation_wrapper import (
    _CKPT_WRAPPED_MODULE,
    ActivationWrapper,
    FuncCell,
)

__all__ = [
    "ActivationWrapper",
    "FuncCell",
    "SwapWrapper",
    "swap_wrapper",
    "OffloadWrapper",
    "offload_wrapper",
    "AsyncSaveOnCpu",
    "base_check_fn",
    "_CKPT_WRAPPED_MODULE",
]


class SwapWrapper(ActivationWrapper):
    """A cell whose residuals are swapped; made by `swap_wrapper`."""

    OWN = ActivationWrapper.OWN | {"policy_fn"}

    def __init__(self, mod: nn.Cell | Callable[..., Any], policy_fn: Callable[[Any], Any] | None = None) -> None:
        super().__init__(mod)
        self.policy_fn = policy_fn

    @property
    def policy_fn(self) -> Callable[[Any], Any] | None:
        """Return the function that is asked whether a residual is swapped; `None`: all that are eligible are."""
        return self.__dict__["_policy_fn"]

    @policy_fn.setter
    def policy_fn(self, policy_fn: Callable[[Any], Any] | None) -> None:
        if policy_fn is not None and not callable(policy_fn):
            raise ArgumentTypeError(
                "`policy_fn` decides for each tensor.",
                expected="a function policy_fn(tensor), or None to swap all that are eligible",
                got=describe(policy_fn),
            )
        self.__dict__["_policy_fn"] = policy_fn

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        if not self.runs_in_python:  # what compiles this to a graph reads it, and is refused there
            return None
        return _call_swapped(self._ckpt_wrapped_module, self.policy_fn, args, kwargs)

    def extend_repr(self) -> str:
        return "" if self.policy_fn is None else f"policy_fn={name_of(self.policy_fn)}"


class OffloadWrapper(ActivationWrapper):
    """A cell whose eligible residuals all go to the host; made by `offload_wrapper`."""

    def __init__(self, mod: nn.Cell | Callable[..., Any]) -> None:
        super().__init__(mod)

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        if not self.runs_in_python:  # what compiles this to a graph reads it, and is refused there
            return None
        return _call_swapped(self._ckpt_wrapped_module, None, args, kwargs)


def swap_wrapper(module: nn.Cell | Callable[..., Any], policy_fn: Callable[[Any], Any] | None = None) -> SwapWrapper:
    """Make a cell that computes what `module` does and swaps its residuals until backward needs them.

    No name changes.

    Args:
        module: a cell, or a plain function.
        policy_fn: called with each residual; `MUST_SAVE`, `PREFER_SAVE` and `True` keep the tensor, anything else of a
            policy swaps it. Without it all that are eligible are swapped.

    Raises:
        TypeError: `module` is neither a cell nor callable, or `policy_fn` is not callable.

    Example:
        >>> block = swap_wrapper(nn.Dense(2, 2), policy_fn=lambda tensor: tensor.size < 1024)
        >>> sorted(name for name, _ in block.parameters_and_names())
        ['bias', 'weight']
    """
    return SwapWrapper(module, policy_fn)


def offload_wrapper(module: nn.Cell | Callable[..., Any]) -> OffloadWrapper:
    """Make a cell that computes what `module` does and keeps every eligible residual on the host.

    No name changes.

    Raises:
        TypeError: `module` is neither a cell nor callable.

    Example:
        >>> sorted(name for name, _ in offload_wrapper(nn.Dense(2, 2)).parameters_and_names())
        ['bias', 'weight']
    """
    return OffloadWrapper(module)


def _call_swapped(
    inner: nn.Cell, policy_fn: Callable[[Any], Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if not _pynative_executor.requires_grad():
        return inner(*args, **kwargs)
    with AsyncSaveOnCpu(policy_fn, module=inner):
        return inner(*args, **kwargs)
