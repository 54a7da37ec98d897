"""Factories of DTensors: `size` is the global shape, and values do not depend on the mesh."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.dtensor.boxes import Box, box_of
from hyper_parallel.core.dtensor.framework import framework_folder
from hyper_parallel.core.shard._op_dispatch import _OP_DISPATCHER
from hyper_parallel.core.shard.local_parts import as_layout, mesh_coordinate
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.platform.arguments import check_flag, check_size, in_our_words
from hyper_parallel.platform.opaque import Device, Dtype

__all__ = ["empty", "full", "ones", "rand", "randn", "zeros"]


def full(
    size: Sequence[int],
    fill_value: Any,
    mesh: Any,
    placements: object = None,
    *,
    dtype: Any = None,
    device: Any = None,
    requires_grad: bool = False,
) -> Any:
    """Make a DTensor of one value.

    Args:
        size: the global shape.
        fill_value: the value.
        mesh: a `DeviceMesh`, or a `Layout` instead of both.
        placements: one per mesh axis, or a layout; replicated without.
        dtype: the framework's own choice unless told.
        device: that of the mesh unless told.
        requires_grad: whether it is a leaf that learns.
    """

    def make(framework: Any, spec: Spec, box: Box) -> Any:
        with in_our_words("a factory of DTensors", fill_value=fill_value, dtype=dtype, device=device):
            return framework.filled(box.sizes, fill_value, dtype, device, spec.layout.mesh)

    return _made(size, mesh, placements, requires_grad, make)


def ones(
    size: Sequence[int],
    mesh: object,
    placements: object = None,
    *,
    dtype: Dtype = None,
    device: Device = None,
    requires_grad: bool = False,
) -> Any:
    """Make a DTensor of ones. Options are those of `full`."""
    return full(size, 1.0, mesh, placements, dtype=dtype, device=device, requires_grad=requires_grad)


def zeros(
    size: Sequence[int],
    mesh: object,
    placements: object = None,
    *,
    dtype: Dtype = None,
    device: Device = None,
    requires_grad: bool = False,
) -> Any:
    """Make a DTensor of zeros. Options are those of `full`."""
    return full(size, 0.0, mesh, placements, dtype=dtype, device=device, requires_grad=requires_grad)


def empty(
    size: Sequence[int],
    mesh: object,
    placements: object = None,
    *,
    dtype: Dtype = None,
    device: Device = None,
    requires_grad: bool = False,
) -> Any:
    """Make a DTensor of whatever is in memory. Options are those of `full`."""
    return full(size, None, mesh, placements, dtype=dtype, device=device, requires_grad=requires_grad)


def rand(
    size: Sequence[int],
    mesh: object,
    placements: object = None,
    *,
    dtype: Dtype = None,
    device: Device = None,
    requires_grad: bool = False,
) -> Any:
    """Draw uniform random numbers. Options are those of `full`.

    They are the same whatever the mesh: those of one stream over the whole tensor.
    """
    return _drawn("rand", size, mesh, placements, dtype, device, requires_grad)


def randn(
    size: Sequence[int],
    mesh: object,
    placements: object = None,
    *,
    dtype: Dtype = None,
    device: Device = None,
    requires_grad: bool = False,
) -> Any:
    """Draw normal random numbers. Options are those of `full`.

    They are the same whatever the mesh: those of one stream over the whole tensor.
    """
    return _drawn("randn", size, mesh, placements, dtype, device, requires_grad)


def _drawn(
    kind: str, size: Sequence[int], mesh: object, placements: object, dtype: Any, device: Any, requires_grad: bool
) -> Any:
    """Let every rank draw the whole stream, slab by slab, and keep its part.

    That costs time for the sake of one stream, not memory.
    """

    def make(framework: Any, spec: Spec, box: Box) -> Any:
        with in_our_words(kind, dtype=dtype, device=device):
            return framework.drawn(kind, spec, box, dtype, device)

    return _made(size, mesh, placements, requires_grad, make)


def _made(
    size: Sequence[int], mesh: Any, placements: Any, requires_grad: bool, make: Callable[[Any, Spec, Box], Any]
) -> Any:
    size = check_size(size)
    check_flag(requires_grad, "requires_grad")
    layout = as_layout(mesh, placements, len(size))
    spec = Spec(layout.without_partial(), size)
    box = box_of(spec.layout, spec.shape, mesh_coordinate(layout.mesh))
    folder = framework_folder("a factory of DTensors")
    backend = _OP_DISPATCHER.backend_of(importlib.import_module(folder).DTensor)
    made = backend.wrap(make(importlib.import_module(f"{folder}.making"), spec, box), spec)
    if layout.partial:
        made = backend.redistribute(made, layout)
    return made.requires_grad_() if requires_grad else made
