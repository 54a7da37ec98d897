"""The few words in which one program with distributed tensors is written for both frameworks: tensors from arrays, and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import hyper_parallel as hp
from hyper_parallel.core.dtensor.gradients import gradient_layout


class TorchWords:
    drivers = ("backward",)

    def tensor(self, values: Any) -> Any:
        import torch

        return torch.tensor(np.asarray(values))

    def numbers(self, tensor: Any) -> np.ndarray:
        return (tensor.full_tensor() if isinstance(tensor, hp.DTensor) else tensor).detach().numpy()

    def gradients(self, driver: str, fn: Callable[..., Any], *inputs: Any) -> list[np.ndarray | None]:
        """Of a function with one element as its value; whole ones, also of DTensors."""
        leaves = [each.detach().requires_grad_() for each in inputs]
        fn(*leaves).backward()
        return [None if each.grad is None else self.numbers(each.grad) for each in leaves]


class MindSporeWords:
    drivers = ("value_and_grad", "tape")

    def tensor(self, values: Any) -> Any:
        import mindspore

        return mindspore.Tensor(np.asarray(values))

    def numbers(self, tensor: Any) -> np.ndarray:
        return (tensor.full_tensor() if isinstance(tensor, hp.DTensor) else tensor).asnumpy()

    def gradients(self, driver: str, fn: Callable[..., Any], *inputs: Any) -> list[np.ndarray | None]:
        import mindspore
        from mindspore import ops
        from mindspore._c_expression import run_backward
        from mindspore.graph.api import _pynative_executor

        leaves = [each.detach() if isinstance(each, hp.DTensor) else ops.stop_gradient(each) for each in inputs]
        if driver == "value_and_grad":
            _, found = mindspore.value_and_grad(fn, tuple(range(len(leaves))))(*leaves)
            found = found if isinstance(found, tuple) else (found,)
        else:
            for each in leaves:
                each.requires_grad_()
            _pynative_executor.set_grad_flag(True)
            try:
                total = _local(fn(*leaves))
                wanted = tuple(_local(each) for each in leaves)
                found = run_backward(
                    (total,), (ops.ones_like(total),), False, False, wanted, True, accumulate_grad=False
                )
            finally:
                _pynative_executor.set_grad_flag(False)
        return [None if grad is None else self._whole(grad, each) for grad, each in zip(found, leaves, strict=True)]

    def _whole(self, grad: Any, leaf: Any) -> np.ndarray:
        """Both drivers give this rank's part of a gradient, as a plain tensor."""
        if isinstance(leaf, hp.DTensor):
            grad = hp.DTensor.from_local(grad, gradient_layout(leaf.layout), shape=leaf.shape)
        return self.numbers(grad)


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, hp.DTensor) else tensor


def words() -> Any:
    """Of the framework that this process works on."""
    return {"torch": TorchWords, "mindspore": MindSporeWords}[hp.get_platform().platform_type.value]()


def close(left: Sequence[Any], right: Sequence[Any], tolerance: float = 1e-6) -> bool:
    return all(
        (a is None and b is None) or bool(np.allclose(a, b, rtol=tolerance, atol=tolerance))
        for a, b in zip(left, right, strict=True)
    )
