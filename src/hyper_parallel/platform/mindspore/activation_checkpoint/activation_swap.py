"""The fixed path of the wrappers whose residuals leave the device. They live in `wrappers/swap_wrapper.py`."""

from __future__ import annotations

from hyper_parallel.platform.mindspore.regions.saved_tensors import AsyncSaveOnCpu, base_check_fn
from hyper_parallel.platform.mindspore.wrappers.activation_wrapper import (
    _CKPT_WRAPPED_MODULE,
    ActivationWrapper,
    FuncCell,
)
from hyper_parallel.platform.mindspore.wrappers.swap_wrapper import (
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
    "FuncCell",
    "AsyncSaveOnCpu",
    "base_check_fn",
    "_CKPT_WRAPPED_MODULE",
]
