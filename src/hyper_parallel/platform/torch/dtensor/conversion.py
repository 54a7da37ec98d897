"""Conversion to and from PyTorch's own meshes and DTensors. Local tensors are shared, and gradients flow through."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import tensor as native
from torch.distributed.device_mesh import DeviceMesh as NativeMesh

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.placements import Partial, Placement, Shard, as_placement
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.platform import get_torch_platform
from hyper_parallel.platform.arguments import in_our_words
from hyper_parallel.platform.torch.dtensor.tensor import DTensor, wrapped

__all__ = ["from_torch", "mesh_from_torch", "mesh_to_torch", "to_torch"]

_native_meshes: dict[DeviceMesh, NativeMesh] = {}


def mesh_to_torch(mesh: DeviceMesh) -> NativeMesh:
    """Return PyTorch's mesh of the same ranks and names.

    The first call makes its groups, so every rank has to make it.
    """
    found = _native_meshes.get(mesh)
    if found is None:
        ranks = torch.tensor(mesh.ranks).reshape(mesh.shape)
        with in_our_words("to_torch", mesh=mesh):
            found = NativeMesh(mesh.device_type, ranks, mesh_dim_names=mesh.axis_names)
        _native_meshes[mesh] = found
    return found


def mesh_from_torch(mesh: object) -> DeviceMesh:
    """Return the mesh of a PyTorch mesh; its groups are used."""
    if not isinstance(mesh, NativeMesh):
        raise ArgumentTypeError(
            "This is no mesh of PyTorch.", expected="a torch.distributed.device_mesh.DeviceMesh", got=describe(mesh)
        )

    made = DeviceMesh(mesh.device_type, mesh.mesh.tolist(), mesh_dim_names=mesh.mesh_dim_names)
    for axis in range(mesh.mesh.ndim):
        get_torch_platform().mark_created_groups(mesh.get_group(axis))
    _native_meshes.setdefault(made, mesh)
    return made


def to_torch(tensor: DTensor) -> native.DTensor:
    """Return PyTorch's DTensor with the same part."""
    layout = tensor._spec.layout
    placements = [_to_native(placement) for placement in layout.placements]  # raises where placements cannot say it
    mesh = mesh_to_torch(layout.mesh)
    shape = torch.Size(tensor._spec.shape)
    return native.DTensor.from_local(
        tensor.to_local(), mesh, placements, run_check=False, shape=shape, stride=tensor.stride()
    )


def from_torch(tensor: object) -> DTensor:
    """Return the DTensor of one of PyTorch's own, with the same part."""
    if not isinstance(tensor, native.DTensor):
        raise ArgumentTypeError(
            "This is no DTensor of PyTorch.", expected="a torch.distributed.tensor.DTensor", got=describe(tensor)
        )
    mesh = mesh_from_torch(tensor.device_mesh)
    placements = [_from_native(placement) for placement in tensor.placements]
    layout = Layout.from_placements(mesh, placements, tensor.ndim)
    return wrapped(tensor.to_local(), Spec(layout, tuple(tensor.shape)))


def _to_native(placement: Placement) -> Any:
    if isinstance(placement, Shard):
        return native.Shard(placement.dim)
    if isinstance(placement, Partial):
        return native.Partial({"prod": "product"}.get(placement.op, placement.op))
    return native.Replicate()


def _from_native(placement: object) -> Placement:
    found = as_placement(placement)
    if found is None:
        raise ArgumentError(
            "This placement of PyTorch has no counterpart here.",
            expected="Shard, Replicate or Partial",
            got=repr(placement),
        )
    return found
