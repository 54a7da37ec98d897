"""Save, recompute or swap what backward needs."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["CheckpointPolicy", "checkpoint", "checkpoint_wrapper"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.activation_checkpoint"), name)
