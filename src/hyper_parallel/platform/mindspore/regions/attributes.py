"""Attributes of cells that are Python's own, as a region notes them before its forward and has them in a second run."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor, nn
from mindspore.ops import Primitive

from hyper_parallel.core.regions.python_state import Framework, PythonState, Saved, as_then
from hyper_parallel.platform.mindspore.swap.storages import unseen


def _read(generator: mindspore.Generator) -> bytes:
    with unseen():
        numbers: bytes = generator.get_state().asnumpy().tobytes()
    return numbers


def _write(generator: mindspore.Generator, numbers: bytes) -> None:
    with unseen():
        now = generator.get_state().asnumpy()
        generator.set_state(Tensor(np.frombuffer(numbers, now.dtype)))


MINDSPORE = Framework(
    # Whether a cell is in training it says twice. Parameters are not put back, nor what MindSpore compiles.
    names=frozenset(vars(nn.Cell())) - {"training", "_phase", "_buffers"},
    tensors=(Tensor, Primitive),
    saved={mindspore.Generator: Saved(_read, _write)},
    modules=lambda value: cells_in(value) if isinstance(value, nn.Cell) else (),
)
# The last note of each cell: most calls find everything as the one before did, and share it.
_notes: weakref.WeakKeyDictionary[nn.Cell, PythonState] = weakref.WeakKeyDictionary()
_NOTHING = contextlib.nullcontext()


def note_attributes(cell: nn.Cell | None) -> PythonState | None:
    """Of a region's cell and of all in it, when its forward begins; None without a cell."""
    if cell is None:
        return None
    cells = cells_in(cell)
    last = _notes.get(cell)
    if last is None or not last.is_of(cells) or not last.is_now():
        last = _notes[cell] = PythonState(cells, MINDSPORE, holds=False)
    return last


def as_noted(state: PythonState | None) -> contextlib.AbstractContextManager[Any]:
    """A block in which they are as they were noted, and after which they are as they were before it."""
    return _NOTHING if state is None else as_then(state)


def cells_in(root: nn.Cell) -> list[nn.Cell]:
    """A cell and all cells in it, each once, wrappers and what they wrap included."""
    found = [root]
    seen = {id(root)}
    for cell in found:  # grows
        attributes = vars(cell)
        children = attributes.get("_cells")
        if children is None:  # a wrapper has what its cell has
            children = {"": attributes.get("_ckpt_wrapped_module")}
        for child in children.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                found.append(child)
    return found


__all__ = ["MINDSPORE", "as_noted", "cells_in", "note_attributes"]
