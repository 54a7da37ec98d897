"""The part of a distributed tensor that this process has, for every framework.

Where the process is on the mesh, what it holds, and with whom it talks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hyper_parallel._base.errors import ArgumentError, StateError
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh, as_mesh
from hyper_parallel.core.dtensor.placements import Placement
from hyper_parallel.core.dtensor.redistribution.platform_transport import LocalTensors, PlatformTransport
from hyper_parallel.core.shard.communication_log import note
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.arguments import check_size

__all__ = ["as_layout", "checked_spec", "mesh_coordinate", "noted_transport"]


def mesh_coordinate(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return where this process is on a mesh.

    Raises:
        RuntimeError: the mesh does not have it, or has ranks that were not started.
    """
    mesh.check_started()
    found = mesh.get_coordinate()
    if found is None:
        raise StateError(
            "A distributed tensor was used by a process that its mesh does not have.",
            expected=f"one of the ranks {list(mesh.ranks)}",
            got=str(mesh.get_rank()),
            where=repr(mesh),
            do="Leave this process out of the call, or make the mesh larger.",
        )
    return found


def noted_transport(platform: object, tensors: LocalTensors, mesh: DeviceMesh) -> PlatformTransport:
    """Return the collectives of a platform, each of which is told to the communication log."""

    def noted(kind: str, ranks: tuple[int, ...], num_bytes: int) -> None:
        coordinates = [mesh.coordinate_of(rank) for rank in ranks]
        axes = tuple(
            axis for i, axis in enumerate(mesh.axis_names) if len({coordinate[i] for coordinate in coordinates}) > 1
        )
        note(kind, axes, num_bytes)

    return PlatformTransport(platform, tensors, noted)


def as_layout(mesh: DeviceMesh | Any, placements: Sequence[Placement] | Layout | None, ndim: int) -> Layout:
    """Make a layout from placements; without any the tensor is replicated."""
    if isinstance(mesh, Layout):
        return mesh
    if isinstance(placements, Layout):
        return placements
    mesh = as_mesh(mesh, "A distributed tensor lies on a mesh.")
    if placements is None:
        return Layout(mesh, ((),) * ndim)
    return Layout.from_placements(mesh, placements, ndim)


def checked_spec(local: Any, layout: Layout, shape: Sequence[int] | None, run_check: bool) -> Spec:
    """Return the spec of a part; the global shape is taken to be even where none is given.

    Raises:
        ValueError: the part does not have the shape that layout and global shape give it; with `run_check` also on
            other ranks.
    """
    mine = tuple(local.shape)
    if layout.ndim != len(mine):
        raise ArgumentError(
            "The layout has other dims than the tensor.", expected=f"{len(mine)} dims", got=repr(layout)
        )
    coordinate = mesh_coordinate(layout.mesh)
    parts = [math.prod(layout.mesh.size(axis) for axis in axes) for axes in layout.axes_per_dim]
    whole = check_size(shape, "shape") if shape is not None else tuple(n * p for n, p in zip(mine, parts, strict=True))
    spec = Spec(layout, whole)
    expected = spec.local_shape_at(coordinate)
    problem = None if expected == mine else f"{list(mine)}, where {spec} has {list(expected)}"
    if run_check:
        _check_on_all_ranks(str(local.dtype), spec, problem, is_shape_given=shape is not None)
    elif problem is not None:
        raise ArgumentError(
            "The part does not have the shape that its layout gives it.",
            expected=f"{list(expected)} of {spec}",
            got=str(list(mine)),
            where=f"rank {layout.mesh.get_rank()}",
            do="Pass the global shape: `from_local(..., shape=...)`.",
        )
    return spec


def _check_on_all_ranks(dtype: str, spec: Spec, problem: str | None, is_shape_given: bool) -> None:
    """Raise on every rank where one of them differs, and name it."""
    platform = get_platform()
    mesh = spec.layout.mesh
    mine = (mesh.get_rank(), dtype, spec.shape, problem)
    found: list[Any] = [mine]
    if len(mesh.ranks) > 1:
        found = [None] * len(mesh.ranks)
        platform.all_gather_object(found, mine, platform.create_group(list(mesh.ranks)))
    wrong = [f"rank {rank}: {text}" for rank, _, _, text in found if text is not None]
    if not wrong and len({(dtype, shape) for _, dtype, shape, _ in found}) > 1:
        wrong = [f"rank {rank}: {dtype}{list(shape)}" for rank, dtype, shape, _ in found]
    if wrong:
        hint = "" if is_shape_given else " Where the parts are uneven, pass `shape`, the global shape."
        raise ArgumentError(
            "The parts of the ranks do not make one tensor.",
            expected=f"parts of {spec}, and one dtype",
            got="; ".join(wrong),
            do=f"Give every rank its part of the same tensor.{hint}",
        )
