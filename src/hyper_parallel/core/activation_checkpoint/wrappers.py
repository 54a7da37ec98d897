"""What can be said about wrappers on both frameworks."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.activation_checkpoint.backend import ActivationsBackend
from hyper_parallel.platform import platform_of
from hyper_parallel.platform.opaque import Module
from hyper_parallel.platform.selection import backend


def wrappers(model: Module) -> list[tuple[str, Any]]:
    """List the wrappers in `model` as `(name, wrapper)`, each once, an outer one before those inside it.

    The name is the one that the wrapped module has in the framework's own listing, where wrappers do not appear;
    wrappers around one module share it, and the root's is empty.

    Raises:
        TypeError: `model` is not a module of PyTorch or MindSpore.

    Example:
        >>> from torch import nn
        >>> from hyper_parallel.platform.torch.activation_checkpoint import swap_wrapper
        >>> model = nn.Sequential(nn.Linear(2, 2), swap_wrapper(nn.Linear(2, 2)))
        >>> [(name, type(wrapper).__name__) for name, wrapper in wrappers(model)]
        [('1', 'SwapWrapper')]
    """
    return backend(platform_of(model, call="wrappers"), ActivationsBackend, "wrappers").list_wrappers(model)
