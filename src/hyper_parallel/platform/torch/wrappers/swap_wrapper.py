"""The wrappers whose residuals leave the device: `swap_wrapper`, `offload_wrapper`.

They name what moves; `saved_tensors` moves it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from torch import nn

from hyper_parallel._base.errors import ArgumentTypeError, describe
from hyper_parallel.platform.torch.regions.compiled_code import not_compiled, prepare_for_compiled_code
from hyper_parallel.platform.torch.regions.left_as_found import left_as_found
from hyper_parallel.platform.torch.regions.saved_tensors import AsyncSaveOnCpu
from hyper_parallel.platform.torch.wrappers import quiet_calls
from hyper_parallel.platform.torch.wrappers.activation_wrapper import (
    _CHECKPOINT_PREFIX,
    _CHECKPOINT_WRAPPED_MODULE,
    ActivationWrapper,
    FunctionModule,
)

__all__ = [
    "ActivationWrapper",
    "SwapWrapper",
    "swap_wrapper",
    "OffloadWrapper",
    "offload_wrapper",
    "FunctionModule",
    "_CHECKPOINT_WRAPPED_MODULE",
    "_CHECKPOINT_PREFIX",
]

_SAVED_TENSORS = "hyper_parallel.platform.torch.regions.saved_tensors"


def __getattr__(name: str) -> Any:
    if name in ("AsyncSaveOnCpu", "base_check_fn"):  # known here too; loaded when first used
        return getattr(importlib.import_module(_SAVED_TENSORS), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class SwapWrapper(ActivationWrapper):
    """A module whose residuals are swapped; made by `swap_wrapper`."""

    OWN = ActivationWrapper.OWN | {"policy_fn"}

    def __init__(self, mod: nn.Module | Callable[..., Any], policy_fn: Callable[[Any], Any] | None = None) -> None:
        super().__init__(mod)
        self.policy_fn = policy_fn
        prepare_for_compiled_code(before_it_is_compiled=True)

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

    @not_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _call_swapped(self, self.policy_fn, args, kwargs)

    def extra_repr(self) -> str:
        policy = self.policy_fn
        return "" if policy is None else f"policy_fn={getattr(policy, '__qualname__', None) or repr(policy)}"


class OffloadWrapper(ActivationWrapper):
    """A module whose eligible residuals all go to the host; made by `offload_wrapper`."""

    def __init__(self, mod: nn.Module | Callable[..., Any]) -> None:
        super().__init__(mod)
        prepare_for_compiled_code(before_it_is_compiled=True)

    @not_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _call_swapped(self, None, args, kwargs)


def swap_wrapper(module: nn.Module | Callable[..., Any], policy_fn: Callable[[Any], Any] | None = None) -> SwapWrapper:
    """Make a module that computes what `module` does and swaps its residuals until backward needs them.

    No name changes.

    Args:
        module: a module, or a plain function.
        policy_fn: called with each residual; `MUST_SAVE`, `PREFER_SAVE` and `True` keep the tensor, anything else of a
            policy swaps it. Without it all that are eligible are swapped.

    Raises:
        TypeError: `module` is neither a module nor callable, or `policy_fn` is not callable.

    Example:
        >>> block = swap_wrapper(nn.Linear(2, 2), policy_fn=lambda tensor: tensor.numel() < 1024)
        >>> sorted(block.state_dict())
        ['bias', 'weight']
    """
    return SwapWrapper(module, policy_fn)


def offload_wrapper(module: nn.Module | Callable[..., Any]) -> OffloadWrapper:
    """Make a module that computes what `module` does and keeps every eligible residual on the host.

    No name changes.

    Raises:
        TypeError: `module` is neither a module nor callable.

    Example:
        >>> sorted(offload_wrapper(nn.Linear(2, 2)).state_dict())
        ['bias', 'weight']
    """
    return OffloadWrapper(module)


def _call_swapped(
    wrapper: ActivationWrapper, policy_fn: Callable[[Any], Any] | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    prepare_for_compiled_code()
    inner = wrapper._checkpoint_wrapped_module
    # A policy of the user's is asked about each residual: it may count them.
    situation = quiet_calls.situation_of(inner, args, kwargs) if policy_fn is None else None
    if not quiet_calls.needs_hooks(wrapper, situation):
        return inner(*args, **kwargs)
    hooks = AsyncSaveOnCpu(policy_fn, module=inner)
    with left_as_found(), hooks:
        result = inner(*args, **kwargs)
    quiet_calls.note(wrapper, situation, hooks.count_idx)
    return result
