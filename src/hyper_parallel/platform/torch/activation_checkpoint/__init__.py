"""Save, recompute and swap on PyTorch, by the names that the spec fixes.

What is behind them lives in `wrappers`, `regions` and `compat`.
"""

from __future__ import annotations

import importlib
from typing import Any

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

# name -> the module of this framework's folder that it lives in; loaded when it is first used
_LAZY = {
    "ActivationWrapper": "wrappers.activation_wrapper",
    "list_wrappers": "wrappers.activation_wrapper",
    "_CHECKPOINT_WRAPPED_MODULE": "wrappers.activation_wrapper",
    "_CHECKPOINT_PREFIX": "wrappers.activation_wrapper",
    "CheckpointImpl": "wrappers.checkpoint_wrapper",
    "CheckpointWrapper": "wrappers.checkpoint_wrapper",
    "checkpoint_wrapper": "wrappers.checkpoint_wrapper",
    "SwapWrapper": "wrappers.swap_wrapper",
    "swap_wrapper": "wrappers.swap_wrapper",
    "OffloadWrapper": "wrappers.swap_wrapper",
    "offload_wrapper": "wrappers.swap_wrapper",
    "apply_activation_checkpointing": "wrappers.replacement",
    "checkpoint": "regions.checkpoint",
    "AsyncSaveOnCpu": "regions.saved_tensors",
    "base_check_fn": "regions.saved_tensors",
    "create_selective_checkpoint_contexts": "compat.selective_contexts",
}


def __getattr__(name: str) -> Any:
    home = _LAZY.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"hyper_parallel.platform.torch.{home}"), name)
    globals()[name] = value
    return value
