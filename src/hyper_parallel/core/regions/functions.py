"""What a region calls, whichever framework it is of: its identity from step to step, and its name in errors."""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any

from hyper_parallel.platform.opaque import Module

_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_next_number = itertools.count()


def bare(function: object) -> Any:
    """What a functools.partial calls; every other function itself."""
    while isinstance(function, functools.partial):
        function = function.func
    return function


def identity(function: object, module: Module) -> Any:
    """What is the same in the next step: the module, or the code of a function that may be made anew each time."""
    if module is not None:
        return module
    function = bare(function)
    return getattr(getattr(function, "__func__", function), "__code__", type(function))


def region_name(function: object, module: Any, paths: Any) -> str:
    """`paths`: those of the model that runs, or None."""
    if module is not None:
        return ("" if paths is None else paths.name(module)) or type(module).__name__
    return getattr(function, "__qualname__", None) or type(function).__name__


def engine_key(name: str, of: object) -> str:
    """What a swap engine learns by, from step to step: no two blocks of one class have it, nor a new model and one that is gone.

    An address is no such key: Python gives it to the next object.
    """
    number = _numbers.get(of)
    if number is None:
        number = _numbers[of] = next(_next_number)
    return f"{name} {number}"
