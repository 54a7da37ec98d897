"""What a plan was made for: the model, the batch, the framework and the device, in words that can be compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import mindspore
from mindspore import Parameter, Tensor, nn

from hyper_parallel.core.planner.plan.batch_fit import tensor_fields
from hyper_parallel.platform.arguments import check_module
from hyper_parallel.platform.mindspore.planner.meters import is_cpu
from hyper_parallel.platform.mindspore.planner.steps import device_of, tensors_of

if TYPE_CHECKING:
    from hyper_parallel.platform.mindspore.planner.profiling import ProfiledModel


def facts(profiled: ProfiledModel) -> dict[str, Any]:
    """All that a plan depends on, in the order in which differences are told."""
    return {
        **all_facts(profiled.model, profiled.batch),
        "blocks": list(profiled.blocks),
        "training": bool(profiled.model.training),
        "version": mindspore.__version__,
    }


def all_facts(model: nn.Cell, batch: Any) -> dict[str, Any]:
    return {**model_facts(model), "batch": look(batch)}


def model_facts(model: nn.Cell) -> dict[str, Any]:
    """What makes a plan fit a model or not."""
    return {
        "framework": "mindspore",
        "model": type(model).__qualname__,
        "parameters": {name: _look(parameter) for name, parameter in model.parameters_and_names()},
        "device": device_name(device_of(model)),
    }


def look(batch: Any) -> Any:
    """A batch with the look of each tensor in its place; what is no tensor is named by its type."""
    if isinstance(batch, Tensor):
        return look_of(batch)
    if isinstance(batch, dict):
        return {str(key): look(each) for key, each in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [look(each) for each in batch]
    if isinstance(batch, (str, int, float, bool, type(None))):
        return batch
    fields = tensor_fields(batch)
    return {name: look(each) for name, each in fields.items()} if fields else type(batch).__name__


def check_model(model: Any, call: str) -> None:
    """Raises TypeError where it is none."""
    check_module(model, nn.Cell, call)


def forward_of(model: nn.Cell) -> Callable[..., Any]:
    """What a batch is the arguments of, after the model itself."""
    return type(model).construct


def batch_bytes(batch: Any) -> int:
    """Bytes of all tensors of a batch."""
    return sum(int(tensor.nbytes) for tensor in tensors_of(batch))


def look_of(tensor: Tensor) -> str:
    """How a tensor looks, in words: "float32[2, 8]"."""
    return f"{str(tensor.dtype).lower()}{list(tensor.shape)}"


def device_name(device: str) -> str:
    return "cpu" if is_cpu(device) else f"{device}: {mindspore.hal.get_device_name(0)}"


def _look(parameter: Parameter) -> str:
    return f"{look_of(parameter)}{'' if parameter.requires_grad else ', frozen'}"
