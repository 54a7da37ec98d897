"""Saving's MindSpore part: what a cell and an optimizer hold, and tensors as bytes.

Optimizers of MindSpore train local tensors (`p.to_local()` of a distributed parameter), and their state is as local:
a moment lies on the ranks as the parameter does that it is named after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from mindspore import Tensor, nn

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, StateError, describe
from hyper_parallel.core.dtensor.boxes import Box, boxes_of
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.parallel.saving.backend import Group, Held, SavingBackend
from hyper_parallel.core.parallel.saving.description import Spread, merged_spread
from hyper_parallel.platform.mindspore.checkpoint_files import CODES, NOT_IN_NUMPY, content_of, tensor_of
from hyper_parallel.platform.mindspore.communication import Communication
from hyper_parallel.platform.mindspore.devices import Devices
from hyper_parallel.platform.mindspore.dtensor.tensor import DTensor
from hyper_parallel.platform.mindspore.parameters import Parameters
from hyper_parallel.platform.mindspore.tensors import is_whole
from hyper_parallel.platform.tensor_file import TensorRecord


class MindSporeSaving:
    """See `SavingBackend`."""

    folder: ClassVar[str] = SavingBackend.folder
    name: ClassVar[str] = "MindSpore"

    def rank(self) -> int:
        return Communication.transport.rank()

    def num_ranks(self) -> int:
        transport = Communication.transport
        return len(transport.ranks_of(transport.world())) if transport.is_up() else 1

    def store(self) -> Any:
        return Communication.transport.store_of_saves()

    def tensors(self, module: nn.Cell) -> dict[str, Tensor]:
        if not isinstance(module, nn.Cell):
            raise ArgumentTypeError("A model is a cell.", expected="a mindspore.nn.Cell", got=describe(module))
        return {name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}

    def parameters(self, module: nn.Cell) -> dict[str, Tensor]:
        return dict(module.parameters_and_names())

    def is_tensor(self, value: object) -> bool:
        return isinstance(value, (Tensor, _LocalState))

    def held(self, tensor: Any, where: str, *, is_written: bool) -> Held:
        spread: Spread | None = None
        local: Any = tensor
        shape = tuple(tensor.shape)
        layout: Layout | None = None
        if isinstance(tensor, _LocalState):
            local, layout, shape = tensor.tensor, tensor.layout, tensor.shape
        elif isinstance(tensor, DTensor):
            local, layout = tensor._local, tensor._spec.layout
        box = Box((0,) * len(shape), shape)
        _check_storable(local, where)
        if layout is not None:
            if layout.partial:
                raise ArgumentError(
                    "A distributed tensor is not reduced yet, so no rank has its values.", got=repr(layout), where=where
                )
            spread = _spread_of_layout(layout, shape)
            box = next(
                (box for box, ranks in spread if self.rank() in ranks), Box((0,) * len(shape), (0,) * len(shape))
            )
            if tuple(local.shape) != box.sizes and not box.is_empty:
                raise StateError(
                    "A distributed tensor's part is not the one that its layout says.",
                    expected=str(list(box.sizes)),
                    got=str(list(local.shape)),
                    where=where,
                )
        return Held(CODES[local.dtype], shape, spread, box, local)

    def bytes_of(self, local: Tensor) -> Any:
        return content_of(local)

    def own_bytes(self, local: Tensor) -> Any | None:
        if Devices.device_type() != "cpu" or local.dtype in NOT_IN_NUMPY or not is_whole(local):
            return None
        first, second = local.asnumpy(), local.asnumpy()
        is_own = isinstance(first, np.ndarray) and first.flags.writeable and np.shares_memory(first, second)
        return first.reshape(-1).view(np.uint8) if is_own and first.flags.c_contiguous else None

    def note_written(self, local: Tensor) -> None:
        """MindSpore counts no writes on the CPU."""

    def write(self, local: Tensor, dtype: str, data: Any) -> None:
        made = tensor_of(TensorRecord("loaded", dtype, tuple(local.shape), memoryview(data)))
        Parameters.load_into_param(
            local, Tensor(made) if made.dtype == local.dtype else Tensor(made).astype(local.dtype)
        )

    def launch_copy(self, local: Tensor, box: Box, out: Any) -> bool:
        return False  # read by `bytes_of`, on every device

    def join_device(self, tensors: Sequence[Tensor]) -> None:
        """Reading a tensor's bytes waits for what computes it."""

    def host_memory(self, num_bytes: int, tensors: Sequence[Tensor]) -> Any:
        return np.empty(max(1, num_bytes), np.uint8)

    def optimizer(self, optimizer: Any, parameters: Mapping[str, Tensor]) -> MindSporeOptimizerState:
        return MindSporeOptimizerState(self, optimizer, parameters)


class _LocalState:
    """State of an optimizer that lies on the ranks as a parameter does."""

    def __init__(self, tensor: Tensor, layout: Layout, shape: tuple[int, ...]) -> None:
        self.tensor, self.layout, self.shape = tensor, layout, shape
        self.dtype = tensor.dtype


class MindSporeOptimizerState:
    """See `OptimizerState`. State is made with the optimizer: it is there before the first step."""

    def __init__(self, saving: MindSporeSaving, optimizer: Any, parameters: Mapping[str, Tensor]) -> None:
        if not isinstance(optimizer, nn.Cell) or not hasattr(optimizer, "parameters"):
            raise ArgumentTypeError(
                "This is no optimizer of MindSpore.", expected="an optimizer of mindspore.nn or mindspore.mint",
                got=describe(optimizer),
            )  # fmt: skip
        self._saving = saving
        self._optimizer = optimizer
        self._states: dict[str, dict[str, Any]] = {}
        known: dict[int, tuple[str, Tensor]] = {}
        for name, value in parameters.items():
            known.setdefault(id(value), (name, value))
            if isinstance(value, DTensor):
                known.setdefault(id(value._local), (name, value))
        trained = list(optimizer.parameters)
        unknown = [param.name for param in trained if id(param) not in known]
        if unknown:
            raise ArgumentError(
                "The optimizer trains a parameter that the model has not.",
                expected="parameters of the model that is saved or loaded",
                got=", ".join(unknown[:5]),
                do="Give the model that the optimizer was made for, as it is now.",
            )
        # What the optimizer calls a parameter -> what the model does, and the model's own tensor.
        self._by_name = {param.name: known[id(param)] for param in trained}
        for path, value in optimizer.parameters_and_names():
            if id(value) not in known:
                param, name, owner = self._owner(value.name or path)
                state: Any = value
                if isinstance(owner, DTensor) and tuple(value.shape) == tuple(owner._local.shape):
                    state = _LocalState(value, owner._spec.layout, tuple(owner.shape))
                self._states.setdefault(param, {})[name] = state

    def _owner(self, name: str) -> tuple[str, str, Tensor | None]:
        """Of "moment1.layers.0.weight": the parameter's name, "moment1", and the parameter."""
        parts = name.split(".")
        for at in range(1, len(parts)):
            found = self._by_name.get(".".join(parts[at:]))
            if found is not None:
                return found[0], ".".join(parts[:at]), found[1]
        return "", name, None

    def groups(self) -> list[Group]:
        found = getattr(self._optimizer, "param_groups", None)
        if not found:
            return [Group([name for name, _ in self._by_name.values()], {})]
        made = []
        for group in found:
            options = {key: _number(value) for key, value in group.items() if key != "params"}
            made.append(Group([self._by_name[param.name][0] for param in group["params"]], options))
        return made

    def states(self) -> dict[str, dict[str, Any]]:
        return {param: dict(states) for param, states in self._states.items()}

    def targets(
        self, wanted: Mapping[str, Mapping[str, tuple[str, tuple[int, ...]]]], *, strict: bool
    ) -> dict[tuple[str, str], Held]:
        found = {}
        for param, states in self._states.items():
            for name, value in states.items():
                if name in wanted.get(param, {}):
                    found[param, name] = self._saving.held(value, f"state {name!r} of {param}", is_written=True)
                elif strict:
                    raise ArgumentError(
                        "The optimizer has state that the checkpoint has not.",
                        expected="state of the same kind of optimizer, of the same framework",
                        got=f"{name} of {param}" if param else name,
                        do="Make the optimizer as it was, load without it, or load with strict=False.",
                    )
        return found

    def assign(self, values: Mapping[str, Mapping[str, Any]], options: Mapping[str, Mapping[str, Any]]) -> None:
        for group in getattr(self._optimizer, "param_groups", None) or ():
            names = [self._by_name[param.name][0] for param in group["params"]]
            known: Mapping[str, Any] = next((options[name] for name in names if name in options), {})
            for key, value in known.items():
                if isinstance(group.get(key), Tensor):
                    Parameters.load_into_param(group[key], Tensor(value, group[key].dtype))
                else:
                    group[key] = value


def _number(value: object) -> object:
    return value.asnumpy().item() if isinstance(value, Tensor) and value.size == 1 else value


def _check_storable(local: Tensor, where: str) -> None:
    if local.is_meta or local.has_init:
        raise ArgumentError(
            "A tensor has no memory (it was made without data).", where=where,
            do="Give it memory first: `platform.init_parameters(model, 0)`.",
        )  # fmt: skip
    if local.dtype not in CODES:
        raise ArgumentError(
            "A tensor's dtype has no place in a safetensors file.", got=describe(local), where=where,
            do="Cast it before saving.",
        )  # fmt: skip


@lru_cache(maxsize=65536)
def _spread_of_layout(layout: Layout, shape: tuple[int, ...]) -> Spread:
    return merged_spread(dict(boxes_of(layout, shape)))


BACKEND: SavingBackend = MindSporeSaving()
