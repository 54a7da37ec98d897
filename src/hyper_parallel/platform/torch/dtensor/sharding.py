"""What `shard_module` and `custom_shard` need of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.shard.decision import tied_axes
from hyper_parallel.core.shard.local_parts import checked_spec
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.platform.torch.dtensor.making import distribute_tensor
from hyper_parallel.platform.torch.dtensor.tensor import DTensor, wrapped

__all__ = ["call_on_shards", "distribute_buffers"]


def distribute_buffers(module: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Every buffer becomes a replicated DTensor: plain tensors do not mix with distributed ones."""
    for each in module.modules():
        for name, buffer in each._buffers.items():
            if buffer is not None and not isinstance(buffer, DTensor):
                each._buffers[name] = distribute_tensor(buffer, mesh)


def call_on_shards(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], mesh: DeviceMesh, out_placements: Any
) -> Any:
    """`fn` on local tensors; the results as DTensors."""
    from hyper_parallel.core.shard.shard_module import as_layout

    is_several = isinstance(out_placements, tuple)
    wanted = out_placements if is_several else (out_placements,)
    # What varies is known from the layouts alone, so the ties can be made before the call.
    outputs = [None if each is None else _spec_of_any_shape(each, mesh, as_layout) for each in wanted]
    locals_ = [arg._tied(tied_axes(arg._spec.layout, outputs)) if isinstance(arg, DTensor) else arg for arg in args]
    result = fn(*locals_, **kwargs)
    results = tuple(result) if is_several else (result,)
    made = [
        value
        if each is None or not isinstance(value, torch.Tensor)
        else wrapped(value, checked_spec(value, as_layout(each, mesh, value.ndim, f"result {index}"), None, False))
        for index, (value, each) in enumerate(zip(results, wanted, strict=True))
    ]
    return tuple(made) if is_several else made[0]


def _spec_of_any_shape(wanted: Any, mesh: DeviceMesh, as_layout: Callable[..., Any]) -> Spec:
    from hyper_parallel.core.dtensor.layout import Layout
    from hyper_parallel.core.dtensor.placements import Placement, Shard

    if isinstance(wanted, Layout):
        ndim = wanted.ndim
    elif any(isinstance(each, Placement) for each in wanted):
        # More dims than any placement names; a negative one counts from an end that is not known yet, and splits all the same.
        ndim = 1 + max([0, *(abs(each.dim) for each in wanted if isinstance(each, Shard))])
    else:
        ndim = len(wanted)
    return Spec(as_layout(wanted, mesh, ndim, "a result"), (1,) * ndim)
