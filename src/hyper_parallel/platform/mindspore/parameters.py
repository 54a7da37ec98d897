"""Parameters: their local part, their data, and where they are created."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mindspore
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.graph.api import _no_grad
from mindspore.nn.cell import register_cell_buffer_registration_hook

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, StateError, describe
from hyper_parallel.platform.arguments import (
    check_flag,
    check_module,
    check_same_shape,
    check_size,
    check_stage_index,
    check_tensor,
)
from hyper_parallel.platform.mindspore.devices import Devices, to_device, to_device_or_none
from hyper_parallel.platform.mindspore.dtypes import to_dtype
from hyper_parallel.platform.mindspore.tensors import filled, is_whole


class Parameters:
    @staticmethod
    def new_zero_parameter(
        param_shape: Sequence[int], param_type: object, requires_grad: bool, device: object
    ) -> Parameter:
        size = check_size(param_shape, "param_shape")
        zeros = filled(size, 0, to_dtype(param_type), to_device_or_none(device), "new_zero_parameter")
        return new_parameter(zeros, requires_grad=check_flag(requires_grad, "requires_grad"))

    @staticmethod
    def get_param_local_shape(param: Tensor) -> tuple[int, ...]:
        return tuple(Parameters.get_param_local_data(param).shape)

    @staticmethod
    def get_param_local_data(param: Tensor) -> Tensor:
        check_tensor(param, Tensor, "get_param_local_data")
        to_local = getattr(param, "to_local", None)  # our DTensor
        return param if to_local is None else to_local()

    @staticmethod
    def set_layout_into_parameter(param: Parameter, layout: Any) -> Parameter:
        """Make a new parameter: this rank's part of the whole one, under the layout."""
        from hyper_parallel.platform.mindspore.dtensor import DTensor, distribute_tensor

        check_tensor(param, Tensor, "set_layout_into_parameter")
        if isinstance(param, DTensor):
            raise ArgumentError(
                "The parameter has a layout already.",
                expected="a plain parameter",
                got=repr(param.layout),
                do="Use `redistribute` on its data.",
            )
        whole = param if isinstance(param, Parameter) else new_parameter(param, requires_grad=True)
        return distribute_tensor(whole, layout)

    @staticmethod
    def get_param_type_size(param: Tensor) -> int:
        return check_tensor(param, Tensor, "get_param_type_size").itemsize

    @staticmethod
    def update_param_data(param: Parameter, data: Tensor) -> None:
        check_tensor(param, Tensor, "update_param_data")
        check_tensor(data, Tensor, "update_param_data")
        bind(*_local_parts(param, data))

    @staticmethod
    def load_into_param(param: Parameter, data: Tensor) -> None:
        check_tensor(param, Tensor, "load_into_param")
        check_tensor(data, Tensor, "load_into_param")
        check_same_shape(param.shape, data.shape, "load_into_param")
        param, data = _local_parts(param, data)
        with _no_grad():
            if is_placeholder(param):
                bind(param, data.to(param.dtype, copy=True))
            elif param.numel():
                copy_into(param, data)

    @staticmethod
    def init_parameters(module: nn.Cell, stage_index: int) -> None:
        """Give data to everything that was created without, on the current device.

        It is filled by the initializer that a parameter was created with, then by the cell's own `reset_parameters()`
        if it has one. Nothing is touched if something can be filled by neither.
        """
        check_module(module, nn.Cell, "init_parameters")
        check_stage_index(stage_index)
        owners = [(name, owner, _placeholders(owner)) for name, owner in module.cells_and_names()]
        owners = [(name, owner, placeholders) for name, owner, placeholders in owners if placeholders]
        for name, owner, placeholders in owners:
            can_reset = callable(getattr(owner, "reset_parameters", None))
            if not can_reset and any(value.init is None for value in placeholders):
                raise StateError(
                    "A module was created without data and cannot fill itself.",
                    expected="a method reset_parameters()",
                    got=f"{type(owner).__name__} without it",
                    where=name or "the root",
                    do="Add reset_parameters(), or load a checkpoint with `load_into_param`.",
                )
        for _, _, placeholders in owners:
            for value in placeholders:
                if is_placeholder(value):  # a tied parameter was filled where it was seen first
                    bind(value, _initial_data(value))
        for _, owner, _ in owners:
            if callable(getattr(owner, "reset_parameters", None)):
                owner.reset_parameters()

    @property
    def meta_device(self) -> str:
        return "meta"

    def init_on_device(self, device: object, include_buffers: bool = False) -> Any:
        return _creation_on(to_device(device), include_buffers)


def new_parameter(data: object, **options: Any) -> Parameter:
    """Make a parameter where `data` is.

    Also inside a block of `init_on_device`, which is about a module's parameters.
    """
    blocks, _creation.blocks = _creation.blocks, []
    try:
        return Parameter(data, **options)
    finally:
        _creation.blocks = blocks


def _local_parts(param: Tensor, data: Tensor) -> tuple[Tensor, Tensor]:
    """Return the local tensors where the parameter is a DTensor, else both as they are.

    The data are then those of a DTensor, in any layout.
    """
    if not hasattr(param, "_local_tensor"):
        return param, data
    if not hasattr(data, "_local_tensor"):
        raise ArgumentTypeError(
            "The data of a distributed parameter are those of a DTensor.",
            expected=f"a DTensor of shape {list(param.shape)}",
            got=describe(data),
            do="Use `hp.distribute_tensor(tensor, param.layout)`.",
        )
    with _no_grad():
        return param._local_tensor, data.redistribute(param.layout)._local_tensor


def bind(param: Tensor, data: Tensor) -> None:
    """Make `param` the owner of the memory of `data`; it stays the object that optimizers and cells hold."""
    if not data.is_meta:
        data = ops.stop_gradient(data)  # a view of the same memory outside the graph
    param._update_data(data)
    # What a parameter without data kept to be filled later; with it, its next reading would fill it again.
    param.init = None
    param.init_mode = None


def copy_into(param: Tensor, data: Tensor) -> None:
    if Devices.device_type() != "cpu":
        param.copy_(data)
        return
    # On the CPU `copy_` takes whole tensors on both sides; given a view it warns, fails, or does nothing.
    if not is_whole(data):
        data = data.to(param.dtype, copy=True)
    if is_whole(param):
        param.copy_(data)
    elif param.dtype == mindspore.bfloat16:
        # There is no such kernel for bfloat16; as whole numbers its bits are written just as well.
        param.view(mindspore.int16)[:] = data.to(param.dtype).view(mindspore.int16)
    else:
        param[:] = data.to(param.dtype)


def is_placeholder(value: Tensor) -> bool:
    """Say whether it has no data yet: on the meta device, or with an initializer still to run."""
    return value.is_meta or value.init is not None


def _placeholders(owner: nn.Cell) -> list[Tensor]:
    values = [*owner._params.values(), *owner._buffers.values()]
    return [value for value in values if value is not None and is_placeholder(value)]


def _initial_data(value: Tensor) -> Tensor:
    if value.init is None:
        return mint.empty(value.shape, dtype=value.dtype)
    return filled_by(value.init, value)


def filled_by(initializer: Any, like: Tensor) -> Tensor:
    """Make a tensor of the shape of another by an initializer, which draws from NumPy's generator."""
    return Tensor(shape=tuple(like.shape), dtype=like.dtype, init=initializer).init_data()


class _Creation(threading.local):
    """Where the cells that this thread builds put their parameters; the innermost block counts."""

    def __init__(self) -> None:
        self.blocks: list[tuple[str, bool]] = []

    def device(self) -> str | None:
        return self.blocks[-1][0] if self.blocks else None


_creation = _Creation()
_patch_lock = threading.Lock()
_num_blocks = 0  # of all threads; MindSpore is changed only while this is above 0
_buffer_hooks: list[Any] = []
_plain_init: Any = Parameter.__init__
_plain_new_args: Any = Parameter._get_parameter_new_args


@contextmanager
def _creation_on(device: str, include_buffers: bool) -> Iterator[None]:
    # MindSpore's own `DeviceCtx` moves everything that any thread creates meanwhile, tensors and buffers included. So
    # the two functions through which every parameter is created are wrapped while a block is open; they ask the
    # thread's own blocks what to do, and a thread outside any block creates its parameters as ever.
    global _num_blocks, _plain_init, _plain_new_args
    with _patch_lock:
        if _num_blocks == 0:
            _plain_init, _plain_new_args = Parameter.__init__, Parameter._get_parameter_new_args
            Parameter.__init__ = _init_on_device
            Parameter._get_parameter_new_args = staticmethod(_new_args_on_device)
            _buffer_hooks.append(register_cell_buffer_registration_hook(_move_buffer))
        _num_blocks += 1
    _creation.blocks.append((device, include_buffers))
    try:
        yield
    finally:
        _creation.blocks.pop()
        with _patch_lock:
            _num_blocks -= 1
            if _num_blocks == 0:
                Parameter.__init__ = _plain_init
                Parameter._get_parameter_new_args = staticmethod(_plain_new_args)
                _buffer_hooks.pop().remove()


def _new_args_on_device(data: object, num_references: int, init_param: bool = True) -> Any:
    # What an initializer describes is not computed for the meta device: the parameter keeps the initializer instead,
    # with which `init_parameters` fills it later.
    return _plain_new_args(data, num_references, init_param and _creation.device() != "meta")


def _init_on_device(self: Parameter, default_input: object, *args: Any, **kwargs: Any) -> None:
    _plain_init(self, default_input, *args, **kwargs)
    device = _creation.device()
    if device is not None and not _is_on(self, device):
        # In place: whoever holds the parameter already (a tied cell, a tuple) holds it still.
        self._update_data(_moved(self, device))


def _move_buffer(cell: nn.Cell, name: str, buffer: Tensor | None) -> Tensor | None:
    device = _creation.device()
    if buffer is None or device is None or not _creation.blocks[-1][1] or _is_on(buffer, device):
        return None
    return _moved(buffer, device)


def _moved(tensor: Tensor, device: str) -> Tensor:
    if device == "meta":
        return mint.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return ops.stop_gradient(tensor).to(device)


def _is_on(tensor: Tensor, device: str) -> bool:
    return tensor.device.partition(":")[0] == device
