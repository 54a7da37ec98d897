"""Parallel training's PyTorch part: a stage's forward and backward, and tensors that cross ranks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from hyper_parallel.core.parallel.backend import Blocks, ParallelBackend, TensorMeta
from hyper_parallel.platform.torch.dtensor.tensor import DTensor
from hyper_parallel.platform.torch.dtypes import to_dtype
from hyper_parallel.platform.torch.parallel.block_stage import BlockList, BlockStage, num_weights
from hyper_parallel.platform.torch.parallel.weight_gradients import backward_of_inputs


class TorchStage:
    """See `StageBackend`."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.undeferred: set[str] = set()

    @property
    def device(self) -> torch.device:
        tensors = [*self._module.parameters(), *self._module.buffers()]
        return tensors[0].device if tensors else torch.get_default_device()

    def weights(self) -> list[tuple[str, torch.Tensor]]:
        return list(self._module.named_parameters())

    def gradient(self, name: str) -> torch.Tensor | None:
        return _plain(self._module.get_parameter(name)).grad

    def set_gradient(self, name: str, gradient: torch.Tensor | None) -> None:
        _plain(self._module.get_parameter(name)).grad = None if gradient is None else gradient.clone()

    def forward(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if args and function is self._module and self._of_blocks() is not None:
            kwargs = {"received": args[0], **kwargs}
            args = ()
        with torch.enable_grad():
            return function(*args, **kwargs)

    def backward(
        self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        if outputs:
            torch.autograd.backward(outputs, gradients)
        return _gradients_of(inputs)

    def backward_of_inputs(
        self, outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor | None], Callable[[], object]]:
        if not outputs or not inputs:  # nobody waits for this stage: all of its backward is the half for the weights
            return _gradients_of(inputs), lambda: self.backward(outputs, gradients, ())
        deferred = backward_of_inputs(outputs, gradients, inputs)
        if deferred.done:
            done = {id(weight) for weight in deferred.done}
            self.undeferred.update(name for name, weight in self._module.named_parameters() if id(weight) in done)
        return _gradients_of(inputs), deferred.run

    def train_with(self, loss_fn: object) -> None:
        """Autograd finds the weights of a loss function by itself."""

    def as_taken(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        stage = self._of_blocks()
        return (args, dict(kwargs)) if stage is None else ((), stage.as_keywords(args, kwargs))

    def weight_of(self, kwargs: Mapping[str, Any]) -> float | None:
        stage = self._of_blocks()
        return None if stage is None else stage.weight_of(kwargs)

    def _of_blocks(self) -> BlockStage | None:
        """The module, if it was cut out of a model; a wrapper of regions may be around it."""
        inner = getattr(self._module, "_checkpoint_wrapped_module", self._module)
        return inner if isinstance(inner, BlockStage) else None


def _plain(weight: torch.Tensor) -> torch.Tensor:
    """The memory of a weight on this rank: a shard's part, or the weight itself."""
    return weight._local if isinstance(weight, DTensor) else weight


def _gradients_of(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    found = [value.grad for value in inputs]
    for value in inputs:
        value.grad = None  # the gradient goes to another rank; the leaf may live on in a user's list
    return found


class ModulesInOrder:
    """The modules of a sequence. See `Blocks`."""

    def __init__(self, model: nn.Module) -> None:
        self.names = list(model._modules)
        self._modules: list[tuple[str, Any]] = list(model._modules.items())

    def stage(self, begin: int, end: int) -> nn.Module:
        return nn.Sequential(OrderedDict(self._modules[begin:end]))

    def num_weights(self) -> list[int]:
        return [num_weights(module) for _, module in self._modules]


class TorchParallel:
    """See `ParallelBackend`."""

    folder: ClassVar[str] = ParallelBackend.folder

    def stage(self, module: nn.Module) -> TorchStage:
        return TorchStage(module)

    def blocks(self, model: nn.Module, by: object, batch: object) -> Blocks:
        # A subclass may call them otherwise.
        is_sequence = getattr(type(model), "forward", None) is nn.Sequential.forward
        return ModulesInOrder(model) if is_sequence else BlockList(model, by, batch)

    def join(self, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        with torch.random.fork_rng():
            yield

    def is_differentiable(self, meta: TensorMeta) -> bool:
        dtype = to_dtype(meta.dtype)
        return bool(dtype.is_floating_point or dtype.is_complex)

    def is_tensor(self, value: object) -> bool:
        return isinstance(value, torch.Tensor)

    def meta(self, tensor: torch.Tensor) -> TensorMeta:
        return TensorMeta(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.requires_grad)

    def version(self, tensor: torch.Tensor) -> int:
        return tensor._version

    def empty(self, meta: TensorMeta, device: torch.device) -> torch.Tensor:
        return torch.empty(meta.shape, dtype=to_dtype(meta.dtype), device=device)

    def zeros(self, meta: TensorMeta, device: torch.device) -> torch.Tensor:
        return torch.zeros(meta.shape, dtype=to_dtype(meta.dtype), device=device)

    def nothing_of(self, tensors: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        return torch.stack([(tensor * 0).sum().to(like.dtype) for tensor in tensors]).sum()

    def as_input(self, tensor: torch.Tensor, *, requires_grad: bool) -> torch.Tensor:
        return tensor.detach().requires_grad_(requires_grad)

    def as_sent(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()

    def scaled(self, loss: torch.Tensor, factor: float) -> torch.Tensor:
        return loss if factor == 1.0 else loss * factor

    def add(self, total: torch.Tensor | None, part: torch.Tensor) -> torch.Tensor:
        return part.detach().clone() if total is None else total + part.detach()


BACKEND: ParallelBackend = TorchParallel()
