"""Parallel training's MindSpore part: a stage's forward and backward, and tensors that cross ranks.

Gradients are those of the tape: they are added to `parameter._grad`, where `platform.clip_grad_norm_` finds them.
A backward comes as a whole: the half that others wait for runs all of it, and nothing is left for the other one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from mindspore import Tensor, get_rng_state, mint, nn, ops, runtime, set_rng_state
from mindspore._c_expression import run_backward
from mindspore.graph.api import _no_grad, _pynative_executor

from hyper_parallel._base.errors import ArgumentTypeError
from hyper_parallel.core.parallel.backend import Blocks, ParallelBackend, TensorMeta
from hyper_parallel.platform.mindspore.dtypes import to_dtype
from hyper_parallel.platform.opaque import Device


@contextmanager
def recording(flag: bool = True) -> Iterator[None]:
    """Around operations that are recorded for gradients, which MindSpore keeps per thread, and off."""
    before = _pynative_executor.grad_flag()
    _pynative_executor.set_grad_flag(flag)
    try:
        yield
    finally:
        _pynative_executor.set_grad_flag(before)


class MindSporeStage:
    """See `StageBackend`."""

    def __init__(self, cell: nn.Cell) -> None:
        self._cell = cell
        self._loss_cell: nn.Cell | None = None
        self.device: Device = "CPU"
        self.undeferred: set[str] = set()

    def weights(self) -> list[tuple[str, Tensor]]:
        return [(weight.name, weight) for weight in self._cell.get_parameters()]

    def gradient(self, name: str) -> Tensor | None:
        return dict(self.weights())[name]._grad

    def set_gradient(self, name: str, gradient: Tensor | None) -> None:
        dict(self.weights())[name]._grad = None if gradient is None else gradient.copy()

    def forward(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        with recording():
            return function(*args, **kwargs)

    def backward(
        self, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
    ) -> list[Tensor | None]:
        weights = self._trained()
        wanted = (*inputs, *weights)
        if not outputs or not wanted:
            return [None] * len(inputs)
        with recording():
            starts = tuple(
                ops.ones_like(output) if gradient is None else gradient
                for output, gradient in zip(outputs, gradients, strict=True)
            )
            found = run_backward(tuple(outputs), starts, False, False, wanted, True, accumulate_grad=False)
        with _no_grad():
            for weight, gradient in zip(weights, found[len(inputs) :], strict=True):
                if gradient is not None:
                    weight._grad = gradient if weight._grad is None else weight._grad + gradient
        return list(found[: len(inputs)])

    def backward_of_inputs(
        self, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
    ) -> tuple[list[Tensor | None], Callable[[], object]]:
        if not inputs:  # nobody waits for this stage: all of its backward is the half for the weights
            return [], lambda: self.backward(outputs, gradients, ())
        self.undeferred.update(weight.name for weight in self._cell.trainable_params())
        found = self.backward(outputs, gradients, inputs)
        return found, lambda: None

    def train_with(self, loss_fn: object) -> None:
        self._loss_cell = loss_fn if isinstance(loss_fn, nn.Cell) else None

    def _trained(self) -> list[Tensor]:
        """The weights whose gradients a backward makes, each once."""
        cells = [self._cell] if self._loss_cell is None else [self._cell, self._loss_cell]
        return list({id(weight): weight for cell in cells for weight in cell.trainable_params()}.values())

    def as_taken(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        return args, dict(kwargs)

    def weight_of(self, kwargs: Mapping[str, Any]) -> float | None:
        return None


class CellsInOrder:
    """The cells of a sequence. See `Blocks`."""

    def __init__(self, model: nn.Cell) -> None:
        self.names = list(model._cells)
        self._cells: list[tuple[str, nn.Cell]] = list(model._cells.items())

    def stage(self, begin: int, end: int) -> nn.Cell:
        cells = self._cells[begin:end]
        names = {id(weight): weight.name for _, cell in cells for weight in cell.get_parameters()}
        made = nn.SequentialCell(OrderedDict(cells))
        for weight in made.get_parameters():
            weight.name = names[id(weight)]  # which MindSpore changes with each cell that a weight is put into
        return made

    def num_weights(self) -> list[int]:
        return [_num_weights(cell) for _, cell in self._cells]


def _num_weights(cell: nn.Cell) -> int:
    embeddings = [part for _, part in cell.cells_and_names() if isinstance(part, (nn.Embedding, mint.nn.Embedding))]
    looked_up = {id(weight) for embedding in embeddings for weight in embedding.get_parameters()}
    return sum(weight.size for weight in cell.get_parameters() if id(weight) not in looked_up)


class MindSporeParallel:
    """See `ParallelBackend`."""

    folder: ClassVar[str] = ParallelBackend.folder

    def stage(self, module: nn.Cell) -> MindSporeStage:
        return MindSporeStage(module)

    def blocks(self, model: nn.Cell, by: object, batch: object) -> Blocks:
        if type(model).construct is not nn.SequentialCell.construct:  # a subclass may call them otherwise
            raise ArgumentTypeError(
                "Only a sequence of cells says by itself in which order they are called.",
                expected="an nn.SequentialCell",
                got=type(model).__name__,
                do="Give one cell for each stage: PipelineStage(cell, index, num_stages).",
            )
        return CellsInOrder(model)

    def join(self, device: Device) -> None:
        runtime.synchronize()

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        before = get_rng_state()
        try:
            yield
        finally:
            set_rng_state(before)

    def is_differentiable(self, meta: TensorMeta) -> bool:
        return "float" in meta.dtype

    def is_tensor(self, value: object) -> bool:
        return isinstance(value, Tensor)

    def meta(self, tensor: Tensor) -> TensorMeta:
        return TensorMeta(tuple(tensor.shape), str(tensor.dtype).lower(), bool(tensor._requires_grad))

    def version(self, tensor: Tensor) -> int:
        return 0  # MindSpore counts no writes on the CPU; there what is sent has been sent when the call returns

    def empty(self, meta: TensorMeta, device: object) -> Tensor:
        return self.zeros(meta, device)

    def zeros(self, meta: TensorMeta, device: object) -> Tensor:
        return mint.zeros(meta.shape, dtype=to_dtype(meta.dtype))

    def nothing_of(self, tensors: Sequence[Tensor], like: Tensor) -> Tensor:
        return sum((tensor * 0).sum().astype(like.dtype) for tensor in tensors)

    def as_input(self, tensor: Tensor, *, requires_grad: bool) -> Tensor:
        with recording(False):
            if requires_grad:
                tensor.requires_grad_()
            return tensor

    def as_sent(self, tensor: Tensor) -> Tensor:
        with recording(False):
            return ops.stop_gradient(tensor)

    def scaled(self, loss: Tensor, factor: float) -> Tensor:
        return loss if factor == 1.0 else loss * factor

    def add(self, total: Tensor | None, part: Tensor) -> Tensor:
        with _no_grad():
            part = ops.stop_gradient(part)
            return part.copy() if total is None else total + part


BACKEND: ParallelBackend = MindSporeParallel()
