"""Save, recompute and swap on PyTorch: the wrappers of a module, and what they are made of."""

from __future__ import annotations

import importlib
from typing import Any

from hyper_parallel.platform.torch.activation_checkpoint.activation_swap import (
    OffloadWrapper,
    SwapWrapper,
    offload_wrapper,
    swap_wrapper,
)
from hyper_parallel.platform.torch.activation_checkpoint.activation_wrapper import (
    _CHECKPOINT_PREFIX,
    _CHECKPOINT_WRAPPED_MODULE,
    ActivationWrapper,
    list_wrappers,
)

__all__ = [
    "ActivationWrapper",
    "SwapWrapper",
    "swap_wrapper",
    "OffloadWrapper",
    "offload_wrapper",
    "AsyncSaveOnCpu",
    "base_check_fn",
    "list_wrappers",
    "_CHECKPOINT_WRAPPED_MODULE",
    "_CHECKPOINT_PREFIX",
]

# public name -> the module here that it lives in; loaded when first used
_LAZY = {
    "AsyncSaveOnCpu": "saved_tensors",
    "base_check_fn": "saved_tensors",
}


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
