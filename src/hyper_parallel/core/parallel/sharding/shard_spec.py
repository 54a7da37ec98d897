"""How a shard lies: as the parameter did, and cut by the data axis as well."""

from __future__ import annotations

from collections.abc import Sequence

from hyper_parallel._base.errors import ArgumentTypeError
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.parallel.sharding.cutting import Cut, cut
from hyper_parallel.core.shard.spec import Spec

__all__ = ["shard_spec"]


def shard_spec(
    name: str, inner: Spec | None, local_shape: Sequence[int], mesh: DeviceMesh, axis: str
) -> tuple[Spec, Cut]:
    """Say how a parameter lies on the mesh when the data axis cuts it as well, innermost.

    Args:
        inner: how it lies already; None for a plain one.
        local_shape: of what this rank has of it before the cut.

    Raises:
        TypeError: it lies on another mesh, or is cut by this axis.
    """
    part = cut(local_shape, mesh.size(axis))
    if inner is None:
        axes: tuple[tuple[str, ...], ...] = ((),) * len(part.shape)
        shape = part.shape
    else:
        axes, shape = inner.layout.axes_per_dim, inner.shape
        if not set(inner.layout.mesh.axis_names) <= set(mesh.axis_names) or any(axis in names for names in axes):
            raise ArgumentTypeError(
                "A parameter that is distributed already lies on other axes of the same mesh.",
                expected=f"a layout on axes of {mesh} other than {axis!r}",
                got=repr(inner),
                where=name,
            )
    dims = tuple((*names, axis) if dim == part.dim else names for dim, names in enumerate(axes))
    return Spec(Layout(mesh, dims), shape), part
