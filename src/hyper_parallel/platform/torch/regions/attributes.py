"""Attributes of modules that are Python's own, as a region notes them before its forward and has them in a second run."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch import nn

from hyper_parallel.core.regions.python_state import Framework, PythonState, Saved, as_then
from hyper_parallel.platform.torch.regions.random_state import quietly

_GENERATOR = Saved(
    lambda generator: quietly(generator.get_state),
    lambda generator, state: quietly(generator.set_state, state),
    lambda left, right: quietly(torch.equal, left, right),
)
TORCH = Framework(
    # Buffers are put back like the contents of any other dict. Parameters are not: sharded data parallel exchanges them itself.
    names=frozenset(vars(nn.Module())) - {"training", "_buffers"},
    tensors=(torch.Tensor,),
    saved={torch.Generator: _GENERATOR},
    modules=lambda value: value.modules() if isinstance(value, nn.Module) else (),
)
# The last note of each module: most calls find everything as the one before did, and share it.
_notes: weakref.WeakKeyDictionary[nn.Module, PythonState] = weakref.WeakKeyDictionary()
_NOTHING = contextlib.nullcontext()


def note_attributes(module: nn.Module | None, modules: list[nn.Module]) -> PythonState | None:
    """Of `modules`, which are a region's `module` and those in it, when its forward begins; None without a module."""
    if module is None:
        return None
    last = _notes.get(module)
    if last is None or not last.is_of(modules) or not last.is_now():
        last = _notes[module] = PythonState(modules, TORCH, holds=False)
    return last


def as_noted(state: PythonState | None) -> contextlib.AbstractContextManager[Any]:
    """A block in which they are as they were noted, and after which they are as they were before it."""
    return _NOTHING if state is None else as_then(state)


__all__ = ["TORCH", "as_noted", "note_attributes"]
