"""Which cell is running: its dotted path, read from Python's own stack. Hooks would have to be put on the user's cells."""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

from mindspore import nn

CALL = nn.Cell.__call__.__code__
_COMPLEX_CALL = nn.Cell._complex_call.__code__


class CellPaths:
    """The names of the cells below one root; looked up once, again when an unknown cell is met."""

    def __init__(self, root: nn.Cell) -> None:
        self._root = weakref.ref(root)
        self._names: dict[int, tuple[weakref.ref[Any], str]] = {}
        self._look()

    def _look(self) -> None:
        root = self._root()
        if root is not None:
            self._names = {id(cell): (weakref.ref(cell), name) for name, cell in root.cells_and_names()}

    def name(self, module: nn.Cell | None) -> str:
        """The path of a cell; the class's name if it is not below the root; "" without a cell."""
        if module is None:
            return ""
        cell = unwrapped(module)
        found = self._find(cell)
        if found is None:
            self._look()  # it was put into the model after the first look
            found = self._find(cell)
            if found is None:
                found = type(cell).__name__
                self._names[id(cell)] = (weakref.ref(cell), found)
        return found

    def _find(self, cell: nn.Cell) -> str | None:
        entry = self._names.get(id(cell))
        return entry[1] if entry is not None and entry[0]() is cell else None


_paths: weakref.WeakKeyDictionary[Any, CellPaths] = weakref.WeakKeyDictionary()


def paths_here(cell: nn.Cell | None) -> CellPaths | None:
    """The names below the outermost cell that is running in this thread; below `cell` if none is."""
    frame: FrameType | None = sys._getframe(1)
    outermost = None
    while frame is not None:
        if frame.f_code is CALL:
            outermost = frame
        frame = frame.f_back
    root = cell if outermost is None else outermost.f_locals["self"]
    if root is None:
        return None
    root = unwrapped(root)
    paths = _paths.get(root)
    if paths is None:
        paths = _paths[root] = CellPaths(root)
    return paths


def num_casting_cells(end: FrameType) -> int:
    """How many cells that cast (`to_float`) run now, inside of the frame `end`. An exception leaves their casts switched on."""
    found = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not end:
        if frame.f_code is _COMPLEX_CALL and frame.f_locals["self"].mixed_precision_type is not None:
            found += 1
        frame = frame.f_back
    return found


def unwrapped(cell: nn.Cell) -> nn.Cell:
    """The cell inside activation wrappers: they have no name of their own."""
    while True:
        inner = vars(cell).get("_ckpt_wrapped_module")
        if inner is None:
            return cell
        cell = inner
