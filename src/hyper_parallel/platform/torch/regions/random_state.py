"""The state of random generators: noted before an op runs, set again when it runs a second time."""

from __future__ import annotations

import threading
from typing import Any

import torch

from hyper_parallel._base.put_back import PutBack

_thread = threading.local()


class OwnGenerators:
    """The default generators as one thread sees them, while another one draws from the same: where this thread has got to."""

    __slots__ = ("_are_put", "_depth", "_generators", "_others", "_states")

    def __init__(self) -> None:
        self._generators = [torch.default_generator]
        if torch.cuda.is_initialized():
            self._generators += torch.cuda.default_generators
        self._states = self._now()
        self._others: list[torch.Tensor] = []
        self._depth = 0
        self._are_put = False

    def put(self) -> None:
        """From here on they are as this thread left them; calls may be nested."""
        if self._depth == 0:
            self._others = self._now()
        self._depth += 1
        if self._depth == 1:
            self._set(self._states)
            self._are_put = True

    def take_away(self) -> None:
        """From here on they are as they were before `put`."""
        if self._depth == 1:
            if self._are_put:  # not where an interrupt came before all were
                self._states = self._now()
                self._are_put = False
            self._set(self._others)
        self._depth -= 1

    @property
    def depth(self) -> int:
        return self._depth

    def keep(self) -> None:
        """From here on, for all threads, they are as this one left them."""
        self._set(self._states)

    def _now(self) -> list[torch.Tensor]:
        return [quietly(generator.get_state) for generator in self._generators]

    def _set(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            quietly(generator.set_state, state)


class _Drawing:
    """The lock under which regions read and set generators, and draw from them; a thread may take it again.

    Threads share the default generators. Between reading a state and the op that draws from it, as between setting one and the op, nobody else may draw
    or set: the numbers would be those of one state, and the recomputation's those of another. Who draws outside of regions does not ask for it, but for
    the two sides of an overlap: each has its own generators then (`own_generators.py`), and they are put in place while it holds the lock.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.is_used_by_regions = (
            False  # from the first op of a region on that draws; what is done for overlaps only then
        )

    def __enter__(self) -> None:
        self._lock.acquire()
        own: OwnGenerators | None = getattr(_thread, "own", None)
        if own is not None:
            try:
                own.put()
            except BaseException:
                self._lock.release()
                raise

    def __exit__(self, *_error: object) -> None:
        own: OwnGenerators | None = getattr(_thread, "own", None)
        try:
            if own is not None:
                own.take_away()
        finally:
            self._lock.release()

    def is_mine(self) -> bool:
        """Whether this thread is between `__enter__` and `__exit__`."""
        return self._lock._is_owned()  # type: ignore[attr-defined]

    def let_go(self) -> None:
        """After an interrupt that may have come as it was taken, or as it was to be given back."""
        if not self.is_mine():
            return
        own: OwnGenerators | None = getattr(_thread, "own", None)
        while own is not None and own.depth > 0:
            own.take_away()
        while self.is_mine():
            self._lock.release()

    def set_own(self, own: OwnGenerators | None) -> OwnGenerators | None:
        """Give this thread generators of its own, or take them; those before."""
        before: OwnGenerators | None = getattr(_thread, "own", None)
        _thread.own = own
        return before


drawing = _Drawing()


class GeneratorState:
    """One generator and its state at some moment."""

    __slots__ = ("generator", "state")

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        with drawing:
            self.state = quietly(generator.get_state)

    def restore(self) -> None:
        with drawing:
            quietly(self.generator.set_state, self.state)


class set_back(PutBack):  # noqa: N801 - used like a function
    """A block after which generators are as they were before it."""

    def __init__(self, generators: set[torch.Generator]) -> None:
        self._states = [GeneratorState(generator) for generator in generators]

    def put_back(self) -> None:
        for state in self._states:
            state.restore()


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


def states_of(tensors: list[torch.Tensor]) -> list[GeneratorState]:
    """The default generators of the CPU and of the devices of these tensors, now."""
    states = [GeneratorState(torch.default_generator)]
    for device in {tensor.device for tensor in tensors} if tensors else ():
        generator = default_generator(device)
        if generator is not None and device.type != "cpu":
            states.append(GeneratorState(generator))
    return states


def quietly(call: Any, *args: Any) -> Any:
    # Reading a state makes tensors: no dispatch mode, ours or another region's, takes them for ops of the model.
    if torch._C._len_torch_dispatch_stack() == 0:
        return call(*args)
    with torch._C._DisableTorchDispatch():
        return call(*args)
