"""The arguments of a region on PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.core.regions.arguments import SavedArguments, kinds_of

_KINDS = kinds_of(torch.Tensor, torch.nn.Module)


def saved_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> SavedArguments:
    return SavedArguments(args, kwargs, _KINDS)
