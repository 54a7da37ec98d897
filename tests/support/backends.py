"""The frameworks and devices that the shared test text runs on, and the few words it needs to be written once."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hyper_parallel.platform import Platform, selection


class Backend:
    """One framework on one device. `name` is the column of the platform table."""

    name: str
    title: str
    platform: Any

    def missing(self) -> str:
        """Why this backend cannot run here; empty if it can."""
        raise NotImplementedError

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """The framework set up as a test expects it."""
        yield

    # Words of the test text. Names follow NumPy where they can.

    def tensor(self, values: Any, dtype: str = "float32") -> Any:
        raise NotImplementedError

    def grad_of(self, fn: Callable[..., Any], *tensors: Any) -> list[np.ndarray]:
        """Gradients of `fn(*tensors).sum()` with respect to every tensor."""
        raise NotImplementedError

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """A block in which operations are recorded for `backward`."""
        yield

    def backward(self, loss: Any) -> None:
        """Gradients of a number, left on the parameters (`get_grad`)."""
        raise NotImplementedError

    def numbers(self, tensor: Any) -> np.ndarray:
        return self.platform.tensor_to_numpy(tensor)


class TorchBackend(Backend):
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.name = f"torch-{kind}"
        self.title = {"cpu": "PyTorch CPU", "cuda": "PyTorch CUDA"}[kind]

    def missing(self) -> str:
        if importlib.util.find_spec("torch") is None:
            return "PyTorch is not installed"
        import torch

        if self.kind == "cuda" and not torch.cuda.is_available():
            return "no CUDA device here; last results are in the platform table"
        return ""

    @functools.cached_property
    def platform(self) -> Any:
        from hyper_parallel.platform.torch.platform import TorchPlatform

        return TorchPlatform()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        import torch

        # On a machine with a GPU the CPU column must still mean the CPU: hide the accelerator from the platform.
        hidden = contextlib.nullcontext()
        if self.kind == "cpu" and torch.accelerator.is_available():
            from unittest import mock

            hidden = mock.patch("torch.accelerator.current_accelerator", return_value=None)
        with hidden, torch.device(self.kind):
            yield

    def tensor(self, values: Any, dtype: str = "float32") -> Any:
        import torch

        return torch.tensor(np.asarray(values)).to(getattr(torch, dtype)).to(self.kind)

    def grad_of(self, fn: Callable[..., Any], *tensors: Any) -> list[np.ndarray]:
        inputs = [tensor.detach().clone().requires_grad_() for tensor in tensors]
        fn(*inputs).sum().backward()
        return [self.numbers(tensor.grad) for tensor in inputs]

    def backward(self, loss: Any) -> None:
        loss.backward()

    def trainable(self, tensor: Any) -> Any:
        """A leaf whose gradient `backward` leaves on it."""
        return tensor.detach().clone().requires_grad_()

    def linear(self, num_in: int, num_out: int) -> Any:
        import torch

        return torch.nn.Linear(num_in, num_out)

    def sequence(self, *layers: Any) -> Any:
        import torch

        return torch.nn.Sequential(*layers)

    def embedding(self, num: int, width: int) -> Any:
        import torch

        return torch.nn.Embedding(num, width)

    def dropout(self, tensor: Any, p: float) -> Any:
        import torch

        return torch.nn.functional.dropout(tensor, p)

    def rand(self, size: tuple[int, ...]) -> Any:
        import torch

        return torch.rand(size)

    def weight_name(self) -> str:
        return "weight"

    def model(self) -> Any:
        """Two linear layers under `first` and `second.inner`, and a buffer `scale`."""
        import torch

        class Inner(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = torch.nn.Linear(4, 2)

            def forward(self, x: Any) -> Any:
                return self.inner(x)

        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = torch.nn.Linear(3, 4)
                self.second = Inner()
                self.register_buffer("scale", torch.ones(2))

            def forward(self, x: Any, factor: Any = 1.0) -> Any:
                return self.second(self.first(x).tanh()) * self.scale * factor

        return Model()

    def tied_model(self) -> Any:
        """`a.weight` and `b.weight` are one parameter."""
        import torch

        model = torch.nn.Module()
        model.a = torch.nn.Linear(3, 3)
        model.b = torch.nn.Linear(3, 3)
        model.b.weight = model.a.weight
        return model

    def train_step(self, model: Any, *inputs: Any) -> dict[str, np.ndarray]:
        """Gradients by parameter name of one step of `model(*inputs).sum()`, also left on the parameters."""
        for parameter in model.parameters():
            parameter.grad = None
        model(*inputs).sum().backward()
        return {name: self.numbers(p.grad) for name, p in model.named_parameters() if p.grad is not None}

    def own_checkpoint(self) -> Any:
        """The framework's own function for recomputation."""
        import torch.utils.checkpoint

        return torch.utils.checkpoint.checkpoint

    def set_grad(self, parameter: Any, values: Any) -> None:
        parameter.grad = None if values is None else self.tensor(values)

    def get_grad(self, parameter: Any) -> np.ndarray:
        return self.numbers(parameter.grad)


class MindSporeBackend(Backend):
    name = "mindspore-cpu"
    title = "MindSpore CPU"

    def missing(self) -> str:
        return "" if importlib.util.find_spec("mindspore") else "MindSpore is not installed"

    @functools.cached_property
    def platform(self) -> Any:
        from hyper_parallel.platform.mindspore.platform import MindSporePlatform

        return MindSporePlatform()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        _ = self.platform  # sets the framework up (blocking launches on the CPU)
        from mindspore.graph.api import _pynative_executor

        _pynative_executor.set_grad_flag(False)
        yield
        _pynative_executor.set_grad_flag(False)

    def tensor(self, values: Any, dtype: str = "float32") -> Any:
        import mindspore as ms

        name = {"bool": "bool_"}.get(dtype, dtype)
        return ms.Tensor(np.asarray(values)).astype(getattr(ms, name))

    def grad_of(self, fn: Callable[..., Any], *tensors: Any) -> list[np.ndarray]:
        import mindspore as ms

        positions = tuple(range(len(tensors)))
        grads = ms.grad(lambda *inputs: fn(*inputs).sum(), grad_position=positions)(*tensors)
        return [self.numbers(grad) for grad in (grads if isinstance(grads, tuple) else (grads,))]

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        from mindspore.graph.api import _pynative_executor

        _pynative_executor.set_grad_flag(True)
        try:
            yield
        finally:
            _pynative_executor.set_grad_flag(False)

    def backward(self, loss: Any) -> None:
        from mindspore import ops
        from mindspore._c_expression import run_backward

        run_backward((loss,), (ops.ones_like(loss),), False, False, (), True, accumulate_grad=True)

    def trainable(self, tensor: Any) -> Any:
        import mindspore as ms

        return ms.Parameter(tensor, name="trainable")

    def linear(self, num_in: int, num_out: int) -> Any:
        from mindspore import nn

        return nn.Dense(num_in, num_out)

    def sequence(self, *layers: Any) -> Any:
        from mindspore import nn

        return nn.SequentialCell(*layers)

    def embedding(self, num: int, width: int) -> Any:
        from mindspore import nn

        return nn.Embedding(num, width)

    def dropout(self, tensor: Any, p: float) -> Any:
        from mindspore import ops

        return ops.dropout(tensor, p)

    def rand(self, size: tuple[int, ...]) -> Any:
        from mindspore import ops

        return ops.rand(*size)

    def model(self) -> Any:
        import mindspore as ms
        from mindspore import nn

        class Inner(nn.Cell):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Dense(4, 2)

            def construct(self, x: Any) -> Any:
                return self.inner(x)

        class Model(nn.Cell):
            def __init__(self) -> None:
                super().__init__()
                self.first = nn.Dense(3, 4)
                self.second = Inner()
                self.register_buffer("scale", ms.Tensor(np.ones(2, np.float32)))

            def construct(self, x: Any, factor: Any = 1.0) -> Any:
                return self.second(self.first(x).tanh()) * self.scale * factor

        return Model()

    def tied_model(self) -> Any:
        from mindspore import nn

        model = nn.Cell()
        model.a = nn.Dense(3, 3)
        model.b = nn.Dense(3, 3)
        model.b.weight = model.a.weight
        return model

    def train_step(self, model: Any, *inputs: Any) -> dict[str, np.ndarray]:
        from mindspore import ops
        from mindspore._c_expression import run_backward
        from mindspore.graph.api import _pynative_executor

        named = list(model.parameters_and_names())
        for _, parameter in named:
            parameter._grad = None
        _pynative_executor.set_grad_flag(True)
        try:
            loss = model(*inputs).sum()
            run_backward((loss,), (ops.ones_like(loss),), False, False, (), True, accumulate_grad=True)
        finally:
            _pynative_executor.set_grad_flag(False)
        return {name: self.numbers(p._grad) for name, p in named if p._grad is not None}

    def own_checkpoint(self) -> Any:
        import mindspore as ms

        return ms.recompute

    def set_grad(self, parameter: Any, values: Any) -> None:
        parameter._grad = None if values is None else self.tensor(values)

    def get_grad(self, parameter: Any) -> np.ndarray:
        return self.numbers(parameter._grad)


ALL: list[Backend] = [TorchBackend("cpu"), TorchBackend("cuda"), MindSporeBackend()]


def check_nothing_left() -> None:
    """Process-wide state of the platform layer is as it was; put back so that one leak fails one test."""
    from hyper_parallel.platform.interface import EXISTING_COMM_GROUPS

    left = [
        name
        for name in ("current_grad_handle", "post_grad_handle_process", "grad_sync_stream")
        if getattr(Platform, name) is not None
    ]
    Platform.current_grad_handle = Platform.post_grad_handle_process = Platform.grad_sync_stream = None
    groups = list(EXISTING_COMM_GROUPS)
    EXISTING_COMM_GROUPS.clear()
    chosen = selection._state.chosen
    selection._forget()
    assert not [name for name in left if name != "grad_sync_stream"], f"gradient reduction left pending: {left}"
    assert not groups, f"communication groups left: {groups}"
    assert chosen is None, "a platform was left chosen: choose platforms in fresh interpreters"
    import sys

    if "torch" in sys.modules:
        from torch.nn.modules import module as torch_module

        hooks = {
            name: value
            for name, value in vars(torch_module).items()
            if name.startswith("_global_") and name.endswith("hooks") and isinstance(value, dict) and value
        }
        assert not hooks, f"global module hooks left: {hooks}"
