"""`DFunction` of the framework that this process works on, under its fixed path; the class itself is in `platform/`."""

from __future__ import annotations

import importlib
from typing import Any

from hyper_parallel.core.dtensor.framework import framework_folder
from hyper_parallel.core.shard.local_callable import _LocalCallable

__all__ = ["_LocalCallable"]


def __getattr__(name: str) -> Any:
    # Only when it is asked for: the class is a subclass of the framework's own, and importing this must not choose one.
    if name == "DFunction":
        return importlib.import_module(f"{framework_folder('import DFunction')}.function").DFunction
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
