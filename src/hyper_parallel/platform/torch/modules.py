"""Modules: their tree, their parameters by name, hooks, state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hyper_parallel._base.errors import ArgumentTypeError, describe
from hyper_parallel.platform.arguments import check_module, found_parameter
from hyper_parallel.platform.micro_batch import MicroBatch
from hyper_parallel.platform.torch.communication import Communication


class Modules:
    @staticmethod
    def get_cell_construct(cell: nn.Module) -> Callable[..., Any]:
        return check_module(cell, nn.Module, "get_cell_construct").forward

    @staticmethod
    def get_cells_and_names(cell: nn.Module) -> list[tuple[str, nn.Module]]:
        return list(check_module(cell, nn.Module, "get_cells_and_names").named_modules())

    @staticmethod
    def parameters_dict(cell: nn.Module) -> dict[str, nn.Parameter]:
        return dict(check_module(cell, nn.Module, "parameters_dict").named_parameters())

    @staticmethod
    def search_parameter_by_name(cell: nn.Module, param_name: str) -> tuple[nn.Module, str, nn.Parameter] | None:
        check_module(cell, nn.Module, "search_parameter_by_name")
        if not isinstance(param_name, str):
            raise ArgumentTypeError(
                "A parameter is found by its dotted path.",
                expected="for example 'layers.0.weight'",
                got=describe(param_name),
            )
        path, _, local_name = param_name.rpartition(".")
        owner = _unwrapped(cell)
        for step in path.split(".") if path else []:
            child = owner._modules.get(step)
            if child is None:
                return None
            owner = _unwrapped(child)
        parameter = owner._parameters.get(local_name)
        return None if parameter is None else (owner, local_name, parameter)

    @staticmethod
    def update_parameter_by_name(cell: nn.Module, result: tuple[Any, ...], new_param: nn.Parameter) -> bool:
        """Replace the parameter that `search_parameter_by_name` found, or the one at a path: `(name, parameter)`.

        A parameter that `cell` holds in several places (tied weights) is replaced in all of them.
        """
        check_module(cell, nn.Module, "update_parameter_by_name")
        found = found_parameter(
            result, lambda name: Modules.search_parameter_by_name(cell, name), new_param, nn.Parameter
        )
        if found is None:
            return False
        owner, local_name, _ = found
        if not any(owner is module for module in cell.modules()) or local_name not in owner._parameters:
            return False
        old = owner._parameters[local_name]
        for module in cell.modules():
            for name, parameter in module._parameters.items():
                if parameter is old and parameter is not None:
                    module._parameters[name] = new_param
        return True

    @staticmethod
    def is_linear_module(module: object) -> bool:
        return isinstance(module, nn.Linear)

    @staticmethod
    def is_embedding_module(module: object) -> bool:
        return isinstance(module, nn.Embedding)

    @staticmethod
    def micro_batch(
        micro_batch_num: int,
        args_batch_dim: Sequence[int | None] | None = None,
        kwargs_batch_dim: Mapping[str, int | None] | None = None,
    ) -> MicroBatch:
        return MicroBatch(micro_batch_num, args_batch_dim, kwargs_batch_dim, torch.Tensor, torch.narrow)

    @staticmethod
    def get_model_state_dict(model: nn.Module, *, options: object = None) -> dict[str, torch.Tensor]:
        """Return parameters and buffers by name; `options` may have `full_state_dict`, `cpu_offload` and
        `rank0_only`.
        """
        state = dict(check_module(model, nn.Module, "get_model_state_dict").state_dict())
        if getattr(options, "full_state_dict", False):  # every rank takes part, whoever keeps the result
            state = {name: _whole(value) for name, value in state.items()}
        if getattr(options, "rank0_only", False) and Communication.get_rank() != 0:
            return {}
        if getattr(options, "cpu_offload", False):
            return {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
        return state


def _whole(value: object) -> Any:
    gather = getattr(value, "full_tensor", None)  # of a DTensor, ours or PyTorch's
    return value if gather is None else gather().detach()


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the module itself where a wrapper of this package stands in its place.

    Wrapping changes no name and no owner.
    """
    while "_checkpoint_wrapped_module" in vars(module):
        module = vars(module)["_checkpoint_wrapped_module"]
    return module
