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

# Not among the lazy names: the file and the function have one name, and importing the file later would put it in the
# function's place.
from hyper_parallel.platform.torch.activation_checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    checkpoint_wrapper,
)

__all__ = [
    "ActivationWrapper",
    "checkpoint",
    "CheckpointImpl",
    "CheckpointWrapper",
    "checkpoint_wrapper",
    "apply_activation_checkpointing",
    "create_selective_checkpoint_contexts",
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
    "checkpoint": "region",
    "create_selective_checkpoint_contexts": "selective_contexts",
    "apply_activation_checkpointing": "replacement",
    "AsyncSaveOnCpu": "saved_tensors",
    "base_check_fn": "saved_tensors",
}


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{module}"), name)
