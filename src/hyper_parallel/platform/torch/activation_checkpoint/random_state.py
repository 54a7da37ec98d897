"""The state of random generators: noted before an op runs, set again when it runs a second time."""

from __future__ import annotations

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
        self._python = random.getstate()
        self._numpy = _numpy_state()
        self.used_python = False
        self.used_numpy = False

    def note_use(self) -> None:
        """Call when the function is done."""
        self.used_python = random.getstate() != self._python
        self.used_numpy = self._numpy is not None and not _same_numpy(self._numpy, _numpy_state())
        if not self.used_python:
            self._python = ()
        if not self.used_numpy:
            self._numpy = None

    @contextmanager
    def again(self) -> Iterator[None]:
        """A block in which they are as they were before the function, if it used them."""
        python = random.getstate() if self.used_python else None
        numpy = _numpy_state() if self.used_numpy else None
        try:
            if python is not None:
                random.setstate(self._python)
            if numpy is not None:
                sys.modules["numpy"].random.set_state(self._numpy)
            yield
        finally:
            if python is not None:
                random.setstate(python)
            if numpy is not None:
                sys.modules["numpy"].random.set_state(numpy)


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")
    return None if numpy is None or not hasattr(numpy, "random") else numpy.random.get_state()


def _same_numpy(left: Any, right: Any) -> bool:
    return bool(left[2:] == right[2:] and (left[1] == right[1]).all())


def _quietly(call: Any, *args: Any) -> Any:
    # Reading a state makes tensors: no dispatch mode, ours or another region's, takes them for ops of the model.
    with torch._C._DisableTorchDispatch():
        return call(*args)
