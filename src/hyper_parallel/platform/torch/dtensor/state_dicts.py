"""Refuses PyTorch's own way to whole tensors: of our distributed tensors it hands on the parts.

While a state dict is made, it calls nothing of a tensor that would tell but `detach`. So that looks who has asked.
"""

from __future__ import annotations

import sys

from torch import nn

from hyper_parallel._base.errors import StateError, describe

__all__ = ["check_not_gathered"]

_SAVES = nn.Module._save_to_state_dict.__code__
_GATHERS = "torch.distributed.checkpoint.state_dict", "_get_model_state_dict"


def check_not_gathered(tensor: object) -> None:
    """Raise where the caller's caller saves the tensor for `get_model_state_dict` with `full_state_dict`."""
    frame = sys._getframe(1).f_back
    if frame is None or frame.f_code is not _SAVES:
        return
    while frame is not None and (frame.f_globals.get("__name__"), frame.f_code.co_name) != _GATHERS:
        frame = frame.f_back
    if frame is not None and getattr(frame.f_locals.get("info"), "full_state_dict", False):
        raise StateError(
            "PyTorch's `get_model_state_dict` does not gather distributed tensors of this package.",
            expected="full_state_dict=False, or parameters that are plain or PyTorch's own",
            got=f"full_state_dict=True, and {describe(tensor)}",
            do="Call `platform.get_model_state_dict(model, options=options)` of `hp.get_platform()` on every rank.",
        )
