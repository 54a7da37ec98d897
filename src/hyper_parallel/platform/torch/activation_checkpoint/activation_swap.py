"""The fixed path of the wrappers whose residuals leave the device. They live in `wrappers/swap_wrapper.py`."""

from __future__ import annotations

from hyper_parallel.platform.torch.regions.saved_tensors import AsyncSaveOnCpu, base_check_fn
from hyper_parallel.platform.torch.wrappers.activation_wrapper import (
    _CHECKPOINT_PREFIX,
    _CHECKPOINT_WRAPPED_MODULE,
    ActivationWrapper,
    FunctionModule,
)
from hyper_parallel.platform.torch.wrappers.swap_wrapper import (
    OffloadWrapper,
    SwapWrapper,
    offload_wrapper,
    swap_wrapper,
)

__all__ = [
    "ActivationWrapper",
    "SwapWrapper",
    "swap_wrapper",
    "OffloadWrapper",
    "offload_wrapper",
    "FunctionModule",
    "AsyncSaveOnCpu",
    "base_check_fn",
    "_CHECKPOINT_WRAPPED_MODULE",
    "_CHECKPOINT_PREFIX",
]
