"""Python's and NumPy's global generators, set back for a function that runs again."""

from __future__ import annotations

import ctypes
import random
import sys
from typing import Any

from hyper_parallel._base.put_back import PutBack


class HostRandomness:
    """Python's and NumPy's global generators around a function.

    Only a state that the function changed is worth setting back: other threads draw from these generators, too.
    """

    def __init__(self) -> None:
        self._python: Any = _PythonState.now()
        self._numpy: Any = _NumpyState.now()
        self.was_used = True

    def note_use(self) -> None:
        """Call when the function is done."""
        if self._python is _PythonState.now():
            self._python = None
        if self._numpy is _NumpyState.now():
            self._numpy = None
        self.was_used = self._python is not None or self._numpy is not None

    def again(self) -> PutBack:
        """A block in which they are as they were before the function, if it used them."""
        then = [each for each in (self._python, self._numpy) if each is not None]
        return _Again(then, [now for each in then if (now := type(each).now()) is not None])


class _Again(PutBack):
    def __init__(self, then: list[Any], before: list[Any]) -> None:
        self._then = then
        self._before = before

    def change(self) -> None:
        for each in self._then:
            each.restore()

    def put_back(self) -> None:
        for each in self._before:
            each.restore()


class _PythonState:
    """A state of Python's global generator. Reading one takes 9 microseconds: the last is kept as long as it is the present one."""

    _last: _PythonState | None = None

    def __init__(self, mark: tuple[int, ...]) -> None:
        self._mark = mark
        self._state = random.getstate()

    @classmethod
    def now(cls) -> _PythonState:
        # The position changes with every draw, the numbers with every 624th.
        if _python_words is None:
            numbers = random.getstate()[1]
            mark = (numbers[-1], numbers[0], numbers[1])
        else:
            mark = (_python_words[0], _python_words[1], _python_words[2])
        last = cls._last
        if last is None or last._mark != mark:
            last = cls._last = cls(mark)
        return last

    def restore(self) -> None:
        random.setstate(self._state)


def _words_of_python() -> Any:
    """The memory of Python's global generator: its position and its 624 numbers; None where they are not where CPython has them."""
    generator = getattr(random.getstate, "__self__", None)
    head = object.__basicsize__
    if sys.implementation.name != "cpython" or type(generator) is not random.Random:
        return None
    if random.Random.__basicsize__ < head + 4 * 625:
        return None
    words = (ctypes.c_uint32 * 625).from_address(id(generator) + head)
    numbers = random.getstate()[1]
    return words if (words[0], *words[1:]) == (numbers[-1], *numbers[:-1]) else None


_python_words = _words_of_python()


class _NumpyState:
    """A state of NumPy's global generator. Reading one takes 40 microseconds: the last is kept as long as it is the present one."""

    _last: _NumpyState | None = None

    def __init__(self, numpy: Any, mark: tuple[int, ...]) -> None:
        self._numpy = numpy
        self._mark = mark
        self._state = numpy.random.get_state()

    @classmethod
    def now(cls) -> _NumpyState | None:
        numpy = sys.modules.get("numpy")
        if numpy is None or not hasattr(numpy, "random"):
            return None
        mark = _mark_of(numpy)
        last = cls._last
        if last is None or mark is None or last._mark != mark:
            last = cls._last = cls(numpy, mark or ())
        return last

    def restore(self) -> None:
        self._numpy.random.set_state(self._state)


def _mark_of(numpy: Any) -> tuple[int, ...] | None:
    """The position in NumPy's Mersenne twister and two of its 624 numbers; None if the generator is another one."""
    generator = numpy.random.mtrand._rand._bit_generator
    if type(generator).__name__ != "MT19937":
        return None
    words = _numpy_words.get(id(generator))
    if words is None or words[0] is not generator:
        address = generator.ctypes.state_address
        words = _numpy_words[id(generator)] = generator, (ctypes.c_uint32 * 625).from_address(address)
    return words[1][624], words[1][0], words[1][1]


_numpy_words: dict[int, tuple[Any, Any]] = {}  # NumPy's global generators, as they were set, with their memory
