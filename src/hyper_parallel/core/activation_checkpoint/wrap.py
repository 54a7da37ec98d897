"""Wrapping a module, whichever framework it is of. The framework of the module decides; a plain function takes the chosen one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError
from hyper_parallel.platform import platform_of
from hyper_parallel.platform.selection import bind, part_of


def swap_wrapper(module: Any, policy_fn: Callable[[Any], Any] | None = None) -> Any:
    """A module that computes what `module` does and swaps its residuals until backward needs them. No name changes.

    Args:
        module: a module of PyTorch or MindSpore, or a plain function.
        policy_fn: called with each residual; `MUST_SAVE`, `PREFER_SAVE` and `True` keep the tensor, anything else of a
            policy swaps it. Without it all that are eligible are swapped.

    Raises:
        TypeError: `module` is neither a module nor callable, or `policy_fn` is not callable.

    Example:
        >>> from torch import nn
        >>> block = swap_wrapper(nn.Linear(2, 2), policy_fn=lambda tensor: tensor.numel() < 1024)
        >>> sorted(block.state_dict())
        ['bias', 'weight']
    """
    return _backend_of(module, "swap_wrapper").swap_wrapper(module, policy_fn)


def offload_wrapper(module: Any) -> Any:
    """A module that computes what `module` does and keeps every eligible residual on the host. No name changes.

    Raises:
        TypeError: `module` is neither a module nor callable.

    Example:
        >>> from torch import nn
        >>> sorted(offload_wrapper(nn.Linear(2, 2)).state_dict())
        ['bias', 'weight']
    """
    return _backend_of(module, "offload_wrapper").offload_wrapper(module)


def _backend_of(module: Any, call: str) -> Any:
    if module is None:  # a ValueError: the argument was forgotten rather than mistaken
        raise ArgumentError(f"`{call}` needs a module.", expected="a module or a function", got="None")
    try:
        platform = platform_of(module, call=call)
    except ArgumentTypeError:
        if not callable(module):
            raise
        platform = bind(f"{call}({getattr(module, '__qualname__', type(module).__name__)})")
    return part_of(platform, "activation_checkpoint", call)
