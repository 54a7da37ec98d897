"""PyTorch's dtypes by name."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.platform.dtype_names import dtype_by_name

DTYPES: dict[str, Any] = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def to_dtype(dtype: object) -> Any:
    """Find the dtype of a name, or take the dtype itself."""
    return dtype_by_name(dtype, DTYPES, torch.dtype)


def to_dtype_or(dtype: object, default: object) -> Any:
    return default if dtype is None else to_dtype(dtype)
