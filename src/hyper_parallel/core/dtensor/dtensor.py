"""`DTensor` and what makes them, of the framework that this process works on."""

from __future__ import annotations

import importlib
from typing import Any

_NAMES = ["DTensor", "distribute_tensor", "empty", "full", "ones", "rand", "randn", "zeros"]


def __getattr__(name: str) -> Any:
    # Not at import: the class is a subclass of the framework's own, and importing this must not choose one.
    if name in _NAMES:
        from hyper_parallel.core.dtensor.framework import framework_folder

        return getattr(importlib.import_module(framework_folder()), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
