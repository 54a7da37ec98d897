"""What a plan was made for: the model, the batch, the framework and the device, in words that can be compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from hyper_parallel.core.planner.model.identity import Identity
from hyper_parallel.core.planner.plan.batch_fit import tensor_fields
from hyper_parallel.platform.arguments import check_module
from hyper_parallel.platform.torch.planner.steps import Arguments, device_of, tensors_of


def identity(model: nn.Module, batch: object = None, blocks: Iterable[str] | None = None) -> Identity:
    """Say what a plan is made for; without a batch, of the model alone.

    Which autocast a step runs under is seen in the step.
    """
    return Identity(
        framework="torch",
        version=str(torch.__version__),
        device=device_name(device_of(model)),
        model=type(model).__qualname__,
        parameters={name: _look(tensor) for name, tensor in model.named_parameters()},
        batch=meta_of(batch),
        batch_bytes=None if batch is None else batch_bytes(batch),
        blocks=None if blocks is None else tuple(blocks),
        is_training=model.training,
    )


def check_model(model: object, call: str) -> None:
    """Raise TypeError where it is no module of PyTorch."""
    check_module(model, nn.Module, call)


def forward_of(model: nn.Module) -> Callable[..., Any]:
    """Give the function that a batch is the arguments of, after the model itself."""
    return type(model).forward


def batch_bytes(batch: object) -> int:
    """Count the bytes of all tensors of a batch."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(batch))


def meta_of(batch: Any) -> Any:
    """Put dtype and shape in place of each tensor of a batch; what is no tensor is named by its type."""
    if isinstance(batch, Arguments):
        return {"args": meta_of(list(batch.args)), "kwargs": meta_of(batch.kwargs)}
    if isinstance(batch, torch.Tensor):
        return tensor_meta(batch.dtype, torch.Size([batch.numel()]) if batch.is_nested else batch.shape)
    if isinstance(batch, dict) or hasattr(batch, "keys"):
        # Not all that have keys are dicts.
        return {str(key): meta_of(batch[key]) for key in batch.keys()}  # noqa: SIM118
    if isinstance(batch, (list, tuple)):
        return [meta_of(item) for item in batch]
    if isinstance(batch, (str, int, float, bool, type(None))):
        return batch
    fields = tensor_fields(batch)
    return {name: meta_of(value) for name, value in fields.items()} if fields else type(batch).__name__


def tensor_meta(dtype: torch.dtype, shape: torch.Size) -> str:
    """Say a tensor's dtype and shape in words: "float32[2, 8]"."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    return f"{device.type}: {getattr(torch, device.type).get_device_name(device)}"


def _look(parameter: torch.Tensor) -> str:
    trained = "" if parameter.requires_grad else ", frozen"
    return f"{tensor_meta(parameter.dtype, parameter.shape)}{trained}"


def autocast_now(device: torch.device) -> str:
    """Say the dtype of the autocast that is on, or "off"."""
    is_on = torch.is_autocast_enabled(device.type)
    return str(torch.get_autocast_dtype(device.type)).removeprefix("torch.") if is_on else "off"
