"""What a step may change of a model, noted before it and put back.

Python's own state and generators are noted whole, and all tensors are copied to the host: MindSpore shows neither
writes by index nor `set_data` as ops, and counts no writes on the CPU. Steps begin alike, so that the first shows which
parameters they write. Gradients are results here, not fields of parameters.

What cannot be set back is the state in the kernel of a reused `nn.Dropout`.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, bfloat16, nn, ops
from mindspore.graph.api import _no_grad

from hyper_parallel._base.errors import StateError
from hyper_parallel.core.regions.python_state import PythonState, check_no_iterators, is_iterator
from hyper_parallel.platform.mindspore.regions.attributes import MINDSPORE, cells_in
from hyper_parallel.platform.mindspore.regions.random_ops import SeedState
from hyper_parallel.platform.mindspore.swap.storages import aliased, storage_address, unseen
from hyper_parallel.platform.trees import leaves

_REACH = 3  # objects in objects of the user's that are noted
_HOOKS = tuple(name for name in vars(nn.Cell()) if "hook" in name)


class ModelState:
    """A model between steps, and what its steps lead to beside it.

    `put_back` can be called after each of several steps, `end` after the last.

    Args:
        others: what belongs to a step as well: the loss function.
        batch: what is in it is put back, too.

    Raises:
        ArgumentError (a ValueError): something of it cannot be put back; it is named.
    """

    def __init__(self, model: nn.Cell, *others: Any, batch: object = None) -> None:
        self._cells = [cell for cell in cells_in(model) if not type(cell).__module__.startswith("hyper_parallel.")]
        self._hooks = [
            (cell, name, dict(getattr(cell, name) or {}))
            for cell in self._cells
            for name in _HOOKS
            if isinstance(getattr(cell, name, None), (dict, type(None)))
        ]
        hooks = [hook for _, _, found in self._hooks for hook in found.values()]
        given = () if is_iterator(batch) else (batch,)  # the model says that it takes none
        self._python = PythonState(self._cells, MINDSPORE, holds=True, values=[*hooks, *others, *given], reach=_REACH)
        names = {id(cell): name for name, cell in model.cells_and_names()}
        check_no_iterators(self._python, {id(batch): "batch", **names})
        named = {id(parameter): (name, parameter) for name, parameter in model.parameters_and_names()}
        found = {id(leaf): leaf for leaf in (*model.buffers(), *self._python.tensors, *leaves(batch))}
        self._parameters = [_Values(parameter, name) for name, parameter in named.values()]
        self._tensors = [
            _Values(leaf, "a tensor that the model has")
            for key, leaf in found.items()
            if isinstance(leaf, Tensor) and key not in named
        ]
        self._written: list[_Values] | None = None  # None: no step has shown which
        self._random = RandomStates()

    @contextlib.contextmanager
    def next_step(self) -> Iterator[None]:
        """Open a block for a step: the first that comes to its end shows which parameters are written."""
        yield
        if self._written is None:
            self._written = [noted for noted in self._parameters if noted.is_other()]

    def put_back(self) -> None:
        # Lists of cells have wrappers of the planner's among them for a while.
        lists = [(cell, name, value) for cell in self._cells for name, value in vars(cell).items() if _has_cells(value)]
        self._put_back(self._parameters if self._written is None else self._written)
        for cell, name, value in lists:
            vars(cell)[name] = value

    def end(self) -> None:
        """Put everything back after the last step, when all that planning has put on the model is off again.

        Raises:
            StateError: something could not be put back.
        """
        self._put_back(self._parameters)
        for cell, name, before in self._hooks:
            now = getattr(cell, name, None)
            if isinstance(now, dict) and list(now.items()) != list(before.items()):
                now.clear()
                now.update(before)
        for noted in (*self._parameters, *self._tensors):
            if noted.is_other():
                raise StateError(
                    "A step changed what planning cannot put back.",
                    expected="values as before",
                    got=f"others in {noted.name}",
                    do="Load the values again, and plan with the writing switched off.",
                )

    def _put_back(self, parameters: list[_Values]) -> None:
        self._python.put_back()
        with unseen(), _no_grad():
            for noted in (*parameters, *self._tensors):
                noted.put_back()
        self._random.restore()


class _Values:
    """One tensor and its copy on the host."""

    def __init__(self, tensor: Tensor, name: str) -> None:
        self.tensor = tensor
        self.name = name
        self._memory = aliased(tensor)
        self._address = storage_address(tensor)
        self._requires_grad = tensor.requires_grad if isinstance(tensor, Parameter) else None
        self._values = _numbers(tensor).copy()

    def is_other(self) -> bool:
        return not self._is_in_place() or not _same(_numbers(self.tensor), self._values)

    def _is_in_place(self) -> bool:
        return storage_address(self.tensor) == self._address and self.tensor.shape == self._memory.shape

    def put_back(self) -> None:
        tensor = self.tensor
        if not self._is_in_place():
            tensor._update_data(self._memory)
        if self._requires_grad is not None and tensor.requires_grad != self._requires_grad:
            tensor.requires_grad = self._requires_grad
        if _same(_numbers(tensor), self._values):
            return
        before = Tensor(self._values).astype(tensor.dtype)
        if isinstance(tensor, Parameter):
            ops.assign(tensor, before)
        elif tensor.shape:
            tensor[:] = before  # `copy_` does nothing to some views
        else:
            tensor.copy_(before)


class RandomStates:
    """The global generators that a step may draw from. Those that cells have are part of Python's state."""

    def __init__(self) -> None:
        self._seeds = SeedState()
        self._python = random.getstate()
        self._numpy = sys.modules["numpy"].random.get_state()

    def restore(self) -> None:
        self._seeds.restore()
        random.setstate(self._python)
        np.random.set_state(self._numpy)


def _has_cells(value: Any) -> bool:
    return type(value) in (list, tuple) and any(isinstance(item, nn.Cell) for item in value)


def _numbers(tensor: Tensor) -> np.ndarray[Any, Any]:
    """Read a tensor as an array. On the CPU it shares the tensor's memory."""
    with unseen(), _no_grad():
        plain = aliased(tensor)
        numbers: np.ndarray[Any, Any] = (plain.float() if plain.dtype == bfloat16 else plain).asnumpy()
        return numbers


def _same(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> bool:
    """Compare bit for bit: not-a-number is itself."""
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    return bool(np.array_equal(_bytes_of(left), _bytes_of(right)))


def _bytes_of(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


__all__ = ["ModelState", "RandomStates"]
