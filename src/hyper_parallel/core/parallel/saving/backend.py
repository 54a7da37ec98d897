"""What saving asks of a framework: `BACKEND` in its `parallel/saving.py`.

Tensors are read and written as bytes on the host, as arrays of uint8: bfloat16 and float8 have no type in NumPy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from hyper_parallel.core.dtensor.boxes import Box
from hyper_parallel.core.parallel.saving.description import Spread
from hyper_parallel.core.parallel.saving.meeting import Store
from hyper_parallel.platform import platform_of
from hyper_parallel.platform.opaque import Module, Tensor
from hyper_parallel.platform.selection import backend

__all__ = ["Group", "Held", "OptimizerState", "SavingBackend", "saving_of"]


class Held(NamedTuple):
    """A tensor, and this rank's part of it.

    dtype: the code of safetensors, such as "BF16".
    spread: who has which box. None: the tensor is plain, so it is whole.
    box: this rank's; empty where it has nothing.
    local: the framework's plain tensor with the values of the box.
    """

    dtype: str
    shape: tuple[int, ...]
    spread: Spread | None
    box: Box
    local: Any


class Group(NamedTuple):
    """A parameter group of an optimizer: names of parameters, and plain values."""

    params: list[str]
    options: dict[str, Any]


class OptimizerState(Protocol):
    """An optimizer, by names of parameters. State that is of no parameter stands under the empty name."""

    def groups(self) -> list[Group]: ...

    def states(self) -> dict[str, dict[str, Any]]:
        """State by parameter and name: tensors, and plain values."""

    def targets(
        self, wanted: Mapping[str, Mapping[str, tuple[str, tuple[int, ...]]]], *, strict: bool
    ) -> dict[tuple[str, str], Held]:
        """Find or make the tensors for state of these dtypes and shapes. The optimizer is as it was.

        State that is wanted of a parameter that the optimizer has not is left out. `strict`: state that is made with
        the optimizer, and is not wanted, is an error.
        """

    def assign(self, values: Mapping[str, Mapping[str, Any]], options: Mapping[str, Mapping[str, Any]]) -> None:
        """Let the optimizer have the targets and these plain values, by parameter; options of groups, by parameter."""


class SavingBackend(Protocol):
    """A framework's part of saving and loading."""

    folder: ClassVar[str] = "parallel.saving"
    name: ClassVar[str]

    def rank(self) -> int: ...

    def num_ranks(self) -> int: ...

    def store(self) -> tuple[Store, object] | None:
        """A connection to the store at which ranks met, for saves and loads alone; None where there is none.

        It may be used as long as the object beside it is held.
        """

    def tensors(self, module: Module) -> dict[str, Tensor]:
        """Parameters and buffers that are kept, by name. A tied one is the same object under each of its names."""

    def parameters(self, module: Module) -> dict[str, Tensor]:
        """Parameters by name; a tied one under its first name, as in `tensors`."""

    def is_tensor(self, value: object) -> bool: ...

    def held(self, tensor: Tensor, where: str, *, is_written: bool) -> Held:
        """Say what a tensor is, and what of it is here.

        Raises:
            ValueError: it has no data, or is of a kind that has no place in a file.
        """

    def bytes_of(self, local: Tensor) -> Any:
        """Return the bytes as a flat array: of the tensor's own memory if that can be, else of a copy."""

    def own_bytes(self, local: Tensor) -> Any | None:
        """Return the tensor's own memory as a flat array to write to. None where that cannot be."""

    def note_written(self, local: Tensor) -> None:
        """Let the framework know that the memory of a tensor was written to."""

    def write(self, local: Tensor, dtype: str, data: Any) -> None:
        """Copy bytes of a tensor of this dtype, and of the same shape, into a tensor."""

    def launch_copy(self, local: Tensor, box: Box, out: Any) -> bool:
        """Begin to copy a box of a tensor on a device into a flat array on the host; False for one on the host.

        `join_device` waits until it is there.
        """

    def join_device(self, tensors: Sequence[Tensor]) -> None:
        """Wait until what was launched before has been computed."""

    def host_memory(self, num_bytes: int, tensors: Sequence[Tensor]) -> Any:
        """Make a flat array that these tensors are copied to quickly: pinned, where that helps."""

    def optimizer(self, optimizer: Any, parameters: Mapping[str, Tensor]) -> OptimizerState: ...


def saving_of(module: object, call: str) -> SavingBackend:
    """The part of the framework that a module or a cell is of."""
    return backend(platform_of(module), SavingBackend, call)
