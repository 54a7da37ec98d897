"""Answers to functions that ask about a tensor, and need no rule."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel._base.errors import StateError
from hyper_parallel.core.dtensor.gradients import gradient_divisor
from hyper_parallel.platform.torch.dtensor.tensor import DIRECT, DTensor, _any_local, _as_gradient, _laid_out

__all__: list[str] = []

# Answered by the local tensor: they are about its kind, not its values or its shape.
_OF_LOCAL = """
is_floating_point is_complex is_signed is_inference is_conj is_neg element_size get_device is_pinned is_same_size_
type_ dense_dim_ _is_view
"""
_OF_LOCAL_PROPERTIES = """
is_cuda is_cpu is_meta is_mps is_sparse is_sparse_csr is_quantized is_nested is_xla is_xpu is_mkldnn is_vulkan is_maia
itemsize names_ output_nr _backward_hooks _post_accumulate_grad_hooks _version _base is_ipu is_mtia
"""
_NO_MEMORY = """
data_ptr untyped_storage storage _typed_storage storage_offset numpy __array__ __dlpack__ share_memory_ set_ resize_
"""


def _asked_of_local(name: str) -> Any:
    def answer(x: DTensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(_any_local(x), name)(*args, **kwargs)

    return answer


def _property_of_local(name: str) -> Any:
    return lambda x: getattr(_any_local(x), name)


def _no_memory(name: str) -> Any:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise StateError(
            f"A distributed tensor has no memory of its own for `{name}`.",
            do="Use `x.to_local()` for this rank's part, or `x.full_tensor()` for the whole.",
        )

    return refuse


def _compatible(x: object, y: object) -> bool:
    """Say whether `x.data = y` can be done: a module asks before it changes dtype or device of its parameters."""
    if not (isinstance(x, DTensor) and isinstance(y, DTensor)):
        return False
    # False between devices such as "cpu" and "meta": then the module makes a new parameter.
    return bool(torch._has_compatible_shallow_copy_type(_any_local(x), _any_local(y)))


def _fill() -> None:
    for name in _OF_LOCAL.split():
        for owner in (torch.Tensor, torch):
            if callable(getattr(owner, name, None)):
                DIRECT[getattr(owner, name)] = _asked_of_local(name)
    for name in _OF_LOCAL_PROPERTIES.split():
        if hasattr(torch.Tensor, name):
            DIRECT[getattr(torch.Tensor, name).__get__] = _property_of_local(name)
    for name in _NO_MEMORY.split():
        if hasattr(torch.Tensor, name):
            DIRECT[getattr(torch.Tensor, name)] = _no_memory(name)
    DIRECT[torch._has_compatible_shallow_copy_type] = _compatible
    DIRECT[torch.Tensor.size] = lambda x, dim=None: x.shape if dim is None else x.shape[dim]
    DIRECT[torch.Tensor.dim] = DIRECT[torch.Tensor.ndimension] = lambda x: x.ndim
    DIRECT[torch.Tensor.numel] = DIRECT[torch.numel] = DIRECT[torch.Tensor.nelement] = lambda x: x._spec.num_elements
    DIRECT[torch.is_tensor] = lambda x: True
    DIRECT[torch.Tensor.is_contiguous] = lambda x, memory_format=torch.contiguous_format: _any_local(x).is_contiguous()
    DIRECT[torch.Tensor.__bool__] = lambda x: bool(x.item())
    DIRECT[torch.Tensor.__float__] = lambda x: float(x.item())
    DIRECT[torch.Tensor.__int__] = lambda x: int(x.item())
    DIRECT[torch.Tensor.__index__] = lambda x: x.item().__index__()
    DIRECT[torch.Tensor.__format__] = lambda x, spec: format(x.item(), spec) if x.ndim == 0 else repr(x)
    DIRECT[torch.Tensor.__contains__] = lambda x, value: bool((x == value).sum().item())
    DIRECT[torch.Tensor.__hash__] = lambda x: id(x)
    DIRECT[torch.Tensor.register_hook] = lambda x, hook: x.register_hook(hook)
    DIRECT[torch.allclose] = DIRECT[torch.Tensor.allclose] = lambda x, y, *a, **k: torch.allclose(
        x.full_tensor(), y.full_tensor(), *a, **k
    )
    DIRECT[torch.equal] = DIRECT[torch.Tensor.equal] = lambda x, y: torch.equal(x.full_tensor(), y.full_tensor())
    DIRECT[torch.is_floating_point] = lambda x: _any_local(x).is_floating_point()
    DIRECT[torch.autograd.grad] = _grad


def _given(grad: object, of: object) -> Any:
    """Return the local gradient that backward begins with; None where the framework's own one is right."""
    if not isinstance(of, DTensor):
        return grad
    if grad is not None:
        return _laid_out(grad, of, "a gradient")
    divisor = gradient_divisor(of._spec.layout)
    return None if divisor == 1 else torch.ones_like(of._local) / divisor  # rule G4


def _grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: object = None,
    **options: Any,
) -> tuple[Any, ...]:
    """Call `torch.autograd.grad` on local tensors."""
    results = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    wanted = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    given: list[Any] = [None] * len(results)
    if grad_outputs is not None:
        given = [grad_outputs] if isinstance(grad_outputs, torch.Tensor) else list(grad_outputs)
    given = [_given(grad, result) for grad, result in zip(given, results, strict=True)]
    found = torch.autograd.grad(
        [result._local if isinstance(result, DTensor) else result for result in results],
        [tensor._local if isinstance(tensor, DTensor) else tensor for tensor in wanted],
        given,
        retain_graph,
        create_graph,
        allow_unused=allow_unused,
        **options,
    )
    return tuple(
        _as_gradient(grad, tensor) if isinstance(tensor, DTensor) and grad is not None else grad
        for grad, tensor in zip(found, wanted, strict=True)
    )


_fill()
