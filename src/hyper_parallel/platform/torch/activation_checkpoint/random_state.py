"""The state of random generators: noted before an op runs, set again when it runs a second time."""

from __future__ import annotations

import threading
from typing import Any

import torch

# Threads share the default generators. Between reading a state and the op that draws from it, as between setting one and the op, no other
# region may draw or set: its numbers would be those of one state, and its recomputation those of another. Who draws outside of regions does
# not ask for it.
drawing = threading.RLock()


class GeneratorState:
    """One generator and its state at some moment."""

    __slots__ = ("generator", "state")

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.state = quietly(generator.get_state)

    def restore(self) -> None:
        with drawing:
            quietly(self.generator.set_state, self.state)


class set_back:  # noqa: N801 - used like a function
    """A block after which generators are as they were before it."""

    __slots__ = ("_states",)

    def __init__(self, generators: set[torch.Generator]) -> None:
        self._states = [GeneratorState(generator) for generator in generators]

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_error: object) -> None:
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
