"""What a region calls, whichever framework it is of: its identity from step to step, and its name in errors."""

from __future__ import annotations

import functools
from typing import Any


def bare(function: Any) -> Any:
    """What a functools.partial calls; every other function itself."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def identity(function: Any, module: Any) -> Any:
    """What is the same in the next step: the module, or the code of a function that may be made anew each time."""
    if module is not None:
        return module
    function = bare(function)
    return getattr(getattr(function, "__func__", function), "__code__", type(function))


def region_name(function: Any, module: Any, paths: Any) -> str:
    """`paths`: those of the model that runs, or None."""
    if module is not None:
        return ("" if paths is None else paths.name(module)) or type(module).__name__
    return getattr(function, "__qualname__", None) or type(function).__name__
