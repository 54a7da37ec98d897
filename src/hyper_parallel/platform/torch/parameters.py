"""Parameters: their local part, their data, and where they are created."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from hyper_parallel._base.errors import ArgumentError, StateError, describe
from hyper_parallel.platform.arguments import check_module, check_same_shape, check_stage_index, check_tensor
from hyper_parallel.platform.torch.devices import Devices


class Parameters:
    @staticmethod
    def get_param_local_shape(param: torch.Tensor) -> tuple[int, ...]:
        return tuple(Parameters.get_param_local_data(param).shape)

    @staticmethod
    def get_param_local_data(param: torch.Tensor) -> torch.Tensor:
        check_tensor(param, torch.Tensor, "get_param_local_data")
        to_local = getattr(param, "to_local", None)  # PyTorch's DTensor; ours answers the same
        return param if to_local is None else to_local()

    @staticmethod
    def set_layout_into_parameter(param: nn.Parameter, layout: Any) -> nn.Parameter:
        """Make a new parameter: this rank's part of the whole one, under the layout."""
        from hyper_parallel.platform.torch.dtensor import DTensor, distribute_tensor

        check_tensor(param, torch.Tensor, "set_layout_into_parameter")
        if isinstance(param, DTensor):
            raise ArgumentError(
                "The parameter has a layout already.",
                expected="a plain parameter",
                got=repr(param.layout),
                do="Use `redistribute` on its data.",
            )
        made = distribute_tensor(nn.Parameter(param.detach(), requires_grad=param.requires_grad), layout)
        return nn.Parameter(made, requires_grad=param.requires_grad)

    @staticmethod
    def get_param_type_size(param: torch.Tensor) -> int:
        return check_tensor(param, torch.Tensor, "get_param_type_size").element_size()

    @staticmethod
    def update_param_data(param: nn.Parameter, data: torch.Tensor) -> None:
        check_tensor(param, torch.Tensor, "update_param_data")
        data = check_tensor(data, torch.Tensor, "update_param_data").detach()
        if param.device.type == "meta" and data.device.type != "meta":
            _replace_placeholder(param, data)
        else:
            param.data = data

    @staticmethod
    def load_into_param(param: nn.Parameter, data: torch.Tensor) -> None:
        check_tensor(param, torch.Tensor, "load_into_param")
        data = check_tensor(data, torch.Tensor, "load_into_param").detach()
        check_same_shape(param.shape, data.shape, "load_into_param")
        if param.device.type == "meta":
            _replace_placeholder(param, data.to(param.dtype, copy=True))
        else:
            with torch.no_grad():
                param.copy_(data)

    @staticmethod
    def init_parameters(module: nn.Module, stage_index: int) -> None:
        """Give data to everything on the meta device, on the current device.

        Each module's own `reset_parameters()` fills it. A model that fills its modules itself, with `_init_weights` as
        Hugging Face's do, is asked instead. Nothing is touched if a module with such data has neither.
        """
        check_module(module, nn.Module, "init_parameters")
        check_stage_index(stage_index)
        owners = [(name, owner) for name, owner in module.named_modules() if _has_placeholder(owner)]
        by_model = getattr(module, "_init_weights", None)
        for name, owner in owners:
            if by_model is None and not callable(getattr(owner, "reset_parameters", None)):
                raise StateError(
                    "A module was created without data and cannot fill itself.",
                    expected="a method reset_parameters()",
                    got=f"{type(owner).__name__} without it",
                    where=name or "the root",
                    do="Add reset_parameters(), or load a checkpoint with `load_into_param`.",
                )
        device = Devices.device()
        made: dict[int, torch.Tensor] = {}  # tied parameters stay tied
        for _, owner in owners:
            for table in (owner._parameters, owner._buffers):
                for name, value in table.items():
                    if value is not None and value.device.type == "meta":
                        if id(value) not in made:
                            made[id(value)] = _with_memory(value, device)
                        table[name] = made[id(value)]
        for name, owner in owners:
            if by_model is None:
                owner.reset_parameters()
            else:
                _fill_by_model(name, owner, by_model)

    @property
    def meta_device(self) -> torch.device:
        return torch.device("meta")

    def init_on_device(self, device: object, include_buffers: bool = False) -> Any:
        try:
            target = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ArgumentError(
                "There is no such device.", expected="for example 'cpu', 'meta' or 'cuda:0'", got=describe(device)
            ) from error
        return _creation_on(target, include_buffers)


def _replace_placeholder(param: torch.Tensor, data: torch.Tensor) -> None:
    # A meta tensor cannot be bound to real data by `.data =`; swapping keeps the object that optimizers and modules
    # hold.
    torch.utils.swap_tensors(param, nn.Parameter(data, requires_grad=param.requires_grad))


def _has_placeholder(owner: nn.Module) -> bool:
    values = [*owner._parameters.values(), *owner._buffers.values()]
    return any(value is not None and value.device.type == "meta" for value in values)


def _fill_by_model(name: str, owner: nn.Module, by_model: Callable[[nn.Module], object]) -> None:
    """Fill a module as its model does. What the model passes over would be whatever was in memory."""
    values = {key: value for key, value in (*owner._parameters.items(), *owner._buffers.items()) if value is not None}
    floats = {key: value for key, value in values.items() if value.is_floating_point()}
    with torch.no_grad():
        for value in floats.values():
            value.fill_(float("nan"))
        by_model(owner)
    left = [key for key, value in floats.items() if value.isnan().any()]
    if left:
        raise StateError(
            "A model has not filled a module that was created without data.",
            expected="numbers from its _init_weights()",
            got=f"none for {', '.join(left)} of {type(owner).__name__}",
            where=name or "the root",
            do="Load a checkpoint with `load_into_param`.",
        )


def _with_memory(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    data = torch.empty_like(value, device=device)
    return nn.Parameter(data, requires_grad=value.requires_grad) if isinstance(value, nn.Parameter) else data


class _Creation(threading.local):
    """Where the modules that this thread builds put their parameters; the innermost block counts."""

    def __init__(self) -> None:
        self.blocks: list[tuple[torch.device, bool]] = []


_creation = _Creation()
_hooks_lock = threading.Lock()
_num_blocks = 0  # of all threads; the framework's registration hooks exist only while this is above 0
_hooks: list[Any] = []


@contextmanager
def _creation_on(device: torch.device, include_buffers: bool) -> Iterator[None]:
    # The framework's registration hooks are one per process, so they are installed once and ask the thread's own blocks
    # what to do: a thread outside any block builds its modules as ever.
    global _num_blocks
    with _hooks_lock:
        if _num_blocks == 0:
            _hooks.append(register_module_parameter_registration_hook(_move_parameter))
            _hooks.append(register_module_buffer_registration_hook(_move_buffer))
        _num_blocks += 1
    _creation.blocks.append((device, include_buffers))
    try:
        yield
    finally:
        _creation.blocks.pop()
        with _hooks_lock:
            _num_blocks -= 1
            if _num_blocks == 0:
                while _hooks:
                    _hooks.pop().remove()


def _move_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
    if param is None or not _creation.blocks:
        return None
    device, _ = _creation.blocks[-1]
    if _is_on(param, device):
        return None  # also a tied parameter that was moved when it was registered first: it must stay the same object
    moved = nn.Parameter(param.detach().to(device), requires_grad=param.requires_grad)
    if type(param) is not nn.Parameter:
        moved.__class__ = type(param)  # a subclass keeps its class and the attributes it was given
    moved.__dict__.update(param.__dict__)
    return moved


def _move_buffer(module: nn.Module, name: str, buffer: torch.Tensor | None) -> torch.Tensor | None:
    if buffer is None or not _creation.blocks:
        return None
    device, include_buffers = _creation.blocks[-1]
    if not include_buffers or _is_on(buffer, device):
        return None
    return buffer.to(device)


def _is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    return tensor.device.type == device.type and (device.index is None or tensor.device.index == device.index)
