"""The state of random generators: noted before an op runs, set again when it runs a second time."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class GeneratorState:
    """One generator and its state at some moment."""

    __slots__ = ("generator", "state")

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.state = _quietly(generator.get_state)

    def restore(self) -> None:
        _quietly(self.generator.set_state, self.state)


def generator_of(args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> torch.Generator | None:
    """The generator that a random op with these arguments draws from."""
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, torch.Generator):
            return argument
    device = kwargs.get("device")
    if device is None:
        device = tensors[0].device if tensors else torch.device("cpu")
    return default_generator(torch.device(device))


def default_generator(device: torch.device) -> torch.Generator | None:
    if device.type == "cpu":
        return torch.default_generator
    module = getattr(torch, device.type, None)
    generators = getattr(module, "default_generators", None)
    if module is None or not generators:
        return None
    index = module.current_device() if device.index is None else device.index
    found: torch.Generator = generators[index]
    return found


def states_of(devices: set[torch.device]) -> list[GeneratorState]:
    """The default generators of the CPU and of these devices, now."""
    generators = [torch.default_generator]
    for device in devices:
        generator = default_generator(device)
        if generator is not None and device.type != "cpu":
            generators.append(generator)
    return [GeneratorState(generator) for generator in generators]


class HostRandomness:
    """Python's and NumPy's global generators around a function.

    Only a state that the function changed is worth setting back: other threads draw from these generators, too.
    """

    def __init__(self) -> None:
        self._python: Any = random.getstate()
        self._numpy: Any = _NumpyState.now()
        self.was_used = True

    def note_use(self) -> None:
        """Call when the function is done."""
        python = random.getstate()[1]
        # The position changes with every draw, the numbers with every 624th.
        if python[-1] == self._python[1][-1] and python[:2] == self._python[1][:2]:
            self._python = None
        if self._numpy is _NumpyState.now():
            self._numpy = None
        self.was_used = self._python is not None or self._numpy is not None

    @contextmanager
    def again(self) -> Iterator[None]:
        """A block in which they are as they were before the function, if it used them."""
        python = None if self._python is None else random.getstate()
        numpy = None if self._numpy is None else _NumpyState.now()
        try:
            if python is not None:
                random.setstate(self._python)
            if numpy is not None:
                self._numpy.restore()
            yield
        finally:
            if python is not None:
                random.setstate(python)
            if numpy is not None:
                numpy.restore()


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
    words = (ctypes.c_uint32 * 625).from_address(generator.ctypes.state_address)
    return words[624], words[0], words[1]


def _quietly(call: Any, *args: Any) -> Any:
    # Reading a state makes tensors: no dispatch mode, ours or another region's, takes them for ops of the model.
    with torch._C._DisableTorchDispatch():
        return call(*args)
