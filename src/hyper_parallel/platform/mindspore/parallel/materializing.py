"""Fills MindSpore's cells: see the rules in `core/parallel/materializing.py`.

A parameter that was made in `init_on_device("meta")` keeps the initializer that it was created with. It runs on the
whole parameter, then the cell's `reset_parameters()`, if it has one. An initializer is used once: MindSpore does not
know how a parameter with values was filled.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.graph.api import _no_grad

from hyper_parallel._base.errors import ArgumentError, StateError, describe
from hyper_parallel.core.dtensor.boxes import box_of
from hyper_parallel.core.parallel.materializing import MaterializingBackend
from hyper_parallel.core.shard.local_parts import mesh_coordinate
from hyper_parallel.platform.mindspore.devices import to_device
from hyper_parallel.platform.mindspore.dtensor.local_tensors import box_of_tensor
from hyper_parallel.platform.mindspore.dtensor.making import owned
from hyper_parallel.platform.mindspore.dtensor.movement import reduce_values
from hyper_parallel.platform.mindspore.dtensor.tensor import DTensor
from hyper_parallel.platform.mindspore.parameters import bind, copy_into, filled_by, is_placeholder, new_parameter

__all__ = ["BACKEND", "MindSporeFilling"]

# Names of cells that stand around one of the model; the model's own names are without them.
_WRAPPERS = {"_ckpt_wrapped_module"}


class _Slot(NamedTuple):
    """A place in a cell where a tensor is registered, with the initializer that the tensor was created with."""

    table: dict[str, Any]
    key: str
    tensor: Any
    initializer: Any


class MindSporeFilling:
    """See `Filling`."""

    def __init__(self, roots: Sequence[nn.Cell]) -> None:
        self._slots: dict[int, list[_Slot]] = {}
        self._owners: dict[int, list[tuple[str, nn.Cell]]] = {}
        self._names: dict[int, str] = {}
        self._filled: set[int] = set()
        self._left: set[tuple[int, str]] = set()
        self._wanted: dict[int, list[_Slot]] = {}
        for root in roots:
            self._owners[id(root)] = list(self._found(root))

    def _found(self, root: nn.Cell) -> Iterator[tuple[str, nn.Cell]]:
        for path, cell in root.cells_and_names():
            if id(cell) in self._slots:
                continue
            slots = [
                _Slot(table, key, value, value.init)
                for table in (cell._params, cell._buffers)
                for key, value in table.items()
                if value is not None and (isinstance(value, Parameter) or is_placeholder(value))
            ]
            if slots:
                name = ".".join(part for part in path.split(".") if part not in _WRAPPERS)
                self._slots[id(cell)], self._names[id(cell)] = slots, name
                yield name, cell

    def owners(self, root: nn.Cell) -> list[tuple[str, nn.Cell]]:
        return self._owners[id(root)]

    def parameters(self, module: nn.Cell) -> dict[str, str]:
        return {slot.tensor.name: slot.key for slot in self._slots[id(module)] if slot.table is module._params}

    def leave(self, module: nn.Cell, parameter: str) -> None:
        self._left.add((id(module), parameter))

    def fill(self, module: nn.Cell) -> list[str]:
        wanted = [
            slot
            for slot in self._slots[id(module)]
            if id(slot.tensor) not in self._filled and (id(module), slot.key) not in self._left
        ]
        self._wanted[id(module)] = wanted
        unwritten = []
        for slot, whole in zip(wanted, self._wholes(module, wanted), strict=True):
            if whole is None:
                unwritten.append(slot.key)
            else:
                self._filled.add(id(slot.tensor))
                _store(slot.tensor, whole)
        return unwritten

    def whole(self, module: nn.Cell, parameter: str) -> Tensor:
        wanted = self._wanted[id(module)]
        wholes = self._wholes(module, wanted)
        return next(whole for slot, whole in zip(wanted, wholes, strict=True) if slot.key == parameter)

    def empty_whole(self, module: nn.Cell, parameter: str) -> Tensor:
        tensor = self._slot(module, parameter).tensor
        return mint.zeros(tuple(tensor.shape), dtype=tensor.dtype)

    def store(self, module: nn.Cell, parameter: str, whole: Tensor) -> None:
        tensor = self._slot(module, parameter).tensor
        with _no_grad():
            _store(tensor, whole.copy())

    def _slot(self, module: nn.Cell, parameter: str) -> _Slot:
        return next(slot for slot in self._slots[id(module)] if slot.key == parameter and slot.table is module._params)

    def _wholes(self, module: nn.Cell, wanted: Sequence[_Slot]) -> list[Tensor | None]:
        """Make whole tensors by what fills them; None where nothing does."""
        reset = getattr(type(module), "reset_parameters", None)
        wholes = [None if slot.initializer is None else filled_by(slot.initializer, slot.tensor) for slot in wanted]
        if not callable(reset):
            return wholes
        before = [slot.table[slot.key] for slot in wanted]
        try:
            for slot, whole in zip(wanted, wholes, strict=True):
                begun = _unwritten(slot.tensor) if whole is None else whole
                is_parameter = slot.table is module._params
                slot.table[slot.key] = (
                    new_parameter(begun, name=slot.tensor.name, requires_grad=slot.tensor.requires_grad)
                    if is_parameter
                    else begun
                )
            with _no_grad():
                reset(module)
            return [self._checked(slot) for slot in wanted]
        except StateError:
            raise
        except Exception as error:
            raise StateError(
                "An initialiser failed.",
                got=f"{type(error).__name__}: {error}",
                where=f"{type(module).__name__} {self._names[id(module)] or 'at the root'}",
                do="An initialiser writes to the parameters of its own cell.",
            ) from error
        finally:
            for slot, tensor in zip(wanted, before, strict=True):
                slot.table[slot.key] = tensor

    def _checked(self, slot: _Slot) -> Tensor | None:
        now = slot.table[slot.key]
        if tuple(now.shape) != tuple(slot.tensor.shape):
            raise StateError(
                "An initialiser has put a tensor of another shape in place of one.",
                expected=str(list(slot.tensor.shape)),
                got=str(list(now.shape)),
                where=slot.key,
            )
        with _no_grad():
            is_left = now.is_floating_point() and now.numel() and bool(ops.isnan(now).any())
            return None if is_left else ops.stop_gradient(now)


def _unwritten(tensor: Tensor) -> Tensor:
    """A whole tensor of NaN, or of zeros where the type has none."""
    value = np.nan if tensor.is_floating_point() else 0
    return Tensor(np.full(tuple(tensor.shape), value, np.float64), tensor.dtype)


def _store(tensor: Any, whole: Tensor) -> None:
    """Keep this rank's box of a whole tensor. This is the one place that knows which box that is."""
    with _no_grad():
        target, part = tensor, whole
        if isinstance(tensor, DTensor):
            layout, shape = tensor._spec.layout, tensor._spec.shape
            box = box_of(layout, shape, mesh_coordinate(layout.mesh))
            target, part = tensor._local, owned(box_of_tensor(whole, box.starts, box.sizes))
        if is_placeholder(target):
            bind(target, part)
        elif part.numel():
            copy_into(target, part)
        tensor.init = None
        tensor.init_mode = None


class MindSporeMaterializing:
    """See `MaterializingBackend`."""

    folder: ClassVar[str] = MaterializingBackend.folder
    initialisers: ClassVar[str] = (
        "the initializer of a parameter made in `init_on_device`, which runs once, or reset_parameters() of its cell"
    )

    @contextmanager
    def filling(self, roots: Sequence[nn.Cell], device: object) -> Iterator[MindSporeFilling]:
        if device is not None and to_device(device) == "meta":
            raise ArgumentError("Values need memory.", expected="a device other than meta", got=describe(device))
        yield MindSporeFilling(roots)

    def drawn_seed(self) -> int:
        return int(np.random.randint(2**31))

    def seeds_differ(self, roots: Sequence[nn.Cell], seed: int) -> bool:
        meshes = {p._spec.layout.mesh: None for root in roots for p in root.get_parameters() if isinstance(p, DTensor)}
        low, high = seed % 2**31, seed // 2**31 % 2**31
        for mesh in meshes:
            if mesh.size() == 1:
                continue
            both = Tensor([low, -low, high, -high], mindspore.int64)
            found = reduce_values(both, mesh, mesh.axis_names, "max")
            if found.asnumpy().tolist() != both.asnumpy().tolist():
                return True
        return False


BACKEND: MaterializingBackend = MindSporeMaterializing()
