"""Save, recompute and swap on MindSpore: the wrappers of a cell, and what they are made of."""

from __future__ import annotations

from hyper_parallel.platform.mindspore.activation_checkpoint.activation_swap import (
    AsyncSaveOnCpu,
    OffloadWrapper,
    SwapWrapper,
    base_check_fn,
    offload_wrapper,
    swap_wrapper,
)
from hyper_parallel.platform.mindspore.activation_checkpoint.activation_wrapper import (
    _CKPT_WRAPPED_MODULE,
    ActivationWrapper,
    FuncCell,
    list_wrappers,
)
from hyper_parallel.platform.mindspore.activation_checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    CheckpointWrapper,
    checkpoint_wrapper,
)
from hyper_parallel.platform.mindspore.activation_checkpoint.region import checkpoint
from hyper_parallel.platform.mindspore.activation_checkpoint.replacement import apply_activation_checkpointing
from hyper_parallel.platform.mindspore.activation_checkpoint.selective_contexts import (
    create_selective_checkpoint_contexts,
)

__all__ = [
    "ActivationWrapper",
    "FuncCell",
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
    "_CKPT_WRAPPED_MODULE",
]
