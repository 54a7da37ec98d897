"""Which call of which module an op belongs to, read from Python's own stack."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any, NamedTuple, Protocol


class Paths(Protocol):
    """The names of a model's modules."""

    def name(self, module: Any) -> str:
        """The dotted path of a module."""


class Occurrence(NamedTuple):
    """Which of the calls of an op one is.

    Fields:
        occurrence: how often the op ran before in the module
        call: which call of the module it was
        occurrence_in_call: how often the op ran before in that call
    """

    module: str
    occurrence: int
    call: int
    occurrence_in_call: int


class ModuleCall:
    """One call of a module, with the ops that were met in it.

    Fields:
        number: how many calls of the same module came before it in the region, as far as ops ran in them
        _in_call, _in_module: how often each op was met, by its id; `_in_module` is shared by the calls of a module
    """

    __slots__ = ("_in_call", "_in_module", "name", "number")

    def __init__(self, name: str, number: int, in_module: dict[int, int]) -> None:
        self.name = name
        self.number = number
        self._in_call: dict[int, int] = {}
        self._in_module = in_module

    def count(self, func: object) -> Occurrence:
        """Which call of the op this is. Whoever asks keeps the op, and so its id."""
        key = id(func)
        in_module = self._in_module.get(key, 0)
        in_call = self._in_call.get(key, 0)
        self._in_module[key] = in_module + 1
        self._in_call[key] = in_call + 1
        return Occurrence(self.name, in_module, self.number, in_call)

    def note(self, func: object, in_module: int, in_call: int) -> None:
        """The op was met so often."""
        self._in_module[id(func)] = in_module
        self._in_call[id(func)] = in_call


class ModuleCalls:
    """The calls of modules in a region, told apart by their frames on Python's stack. `call` is the code that calls a module.

    What is known about a call lies in its frame, under a name that no variable has: there it ends with the call. To hold the frame would hold the
    tensors that its function was called with, and its address is given to another one when it has ended.
    """

    _num_made = itertools.count()

    def __init__(self, paths: Paths | None, call: CodeType) -> None:
        self._paths = paths
        self._call = call
        self._mark = f"<call in region {next(ModuleCalls._num_made)}>"
        self._without_module: ModuleCall | None = None
        self._begun: dict[str, ModuleCall] = {}  # by module: see `catch_up`
        self._num_calls: dict[str, int] = {}
        self._in_module: dict[str, dict[int, int]] = {}

    def innermost(self, depth: int) -> ModuleCall:
        """The call in which the caller, `depth` frames up or more, runs."""
        if self._paths is not None:
            try:
                frame: FrameType | None = sys._getframe(depth)
            except ValueError:  # a thread of autograd's own calls the mode from C++: below that there is no Python
                frame = None
            is_called = self._call
            while frame is not None:
                if frame.f_code is is_called:
                    variables = frame.f_locals
                    call: ModuleCall | None = variables.get(self._mark)
                    if call is None:
                        call = variables[self._mark] = self._new(self._paths.name(variables["self"]))
                    return call
                frame = frame.f_back
        if self._without_module is None:
            self._without_module = self._new("")
        return self._without_module

    def catch_up(self, met: Iterable[tuple[Any, Occurrence]]) -> None:
        """Ops that were met, and not counted as it was known where they are: all in the first call of their module, which may not be over."""
        for func, (name, occurrence, _, in_call) in met:
            call = self._begun.get(name)
            if call is None:
                call = self._begun[name] = self._new(name)
            call.note(func, occurrence + 1, in_call + 1)

    def _new(self, name: str) -> ModuleCall:
        begun = self._begun.pop(name, None)
        if begun is not None:
            return begun
        number = self._num_calls.get(name, 0)
        self._num_calls[name] = number + 1
        in_module = self._in_module.get(name)
        if in_module is None:
            in_module = self._in_module[name] = {}
        return ModuleCall(name, number, in_module)
