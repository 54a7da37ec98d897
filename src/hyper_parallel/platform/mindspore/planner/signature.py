"""What a plan was made for: the model, the batch, the framework and the device, in words that can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import mindspore
from mindspore import Parameter, Tensor, nn

from hyper_parallel.core.planner.model.identity import Identity
from hyper_parallel.core.planner.plan.batch_fit import tensor_fields
from hyper_parallel.platform.arguments import check_module
from hyper_parallel.platform.mindspore.planner.meters import is_cpu
from hyper_parallel.platform.mindspore.planner.steps import device_of, tensors_of


def identity(model: nn.Cell, batch: object = None, blocks: Iterable[str] | None = None) -> Identity:
    """Say what a plan is made for; without a batch, of the model alone."""
    return Identity(
        framework="mindspore",
        version=str(mindspore.__version__),
        device=device_name(device_of(model)),
        model=type(model).__qualname__,
        parameters={name: _look(parameter) for name, parameter in model.parameters_and_names()},
        batch=meta_of(batch),
        blocks=None if blocks is None else tuple(blocks),
        is_training=bool(model.training),
    )


def meta_of(batch: object) -> Any:
    """Put dtype and shape in place of each tensor of a batch; what is no tensor is named by its type."""
    if isinstance(batch, Tensor):
        return tensor_meta(batch)
    if isinstance(batch, dict):
        return {str(key): meta_of(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return [meta_of(item) for item in batch]
    if isinstance(batch, (str, int, float, bool, type(None))):
        return batch
    fields = tensor_fields(batch)
    return {name: meta_of(value) for name, value in fields.items()} if fields else type(batch).__name__


def check_model(model: object, call: str) -> None:
    """Raise TypeError where it is no cell."""
    check_module(model, nn.Cell, call)


def forward_of(model: nn.Cell) -> Callable[..., Any]:
    """Give the function that a batch is the arguments of, after the model itself."""
    return type(model).construct


def batch_bytes(batch: object) -> int:
    """Count the bytes of all tensors of a batch."""
    return sum(int(tensor.nbytes) for tensor in tensors_of(batch))


def tensor_meta(tensor: Tensor) -> str:
    """Say a tensor's dtype and shape in words: "float32[2, 8]"."""
    return f"{str(tensor.dtype).lower()}{list(tensor.shape)}"


def device_name(device: str) -> str:
    return "cpu" if is_cpu(device) else f"{device}: {mindspore.hal.get_device_name(0)}"


def _look(parameter: Parameter) -> str:
    return f"{tensor_meta(parameter)}{'' if parameter.requires_grad else ', frozen'}"
