"""All layouts of a mesh, to try everything with."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hyper_parallel import DeviceMesh, Layout


def all_layouts(mesh: DeviceMesh, ndim: int, ops: Sequence[str] = ()) -> list[Layout]:
    """Every layout of a tensor of `ndim` dims: each axis splits a dim (in every order), or is partial by one of `ops`, or neither."""
    found = []
    for uses in itertools.product([*range(ndim), *ops, None], repeat=mesh.ndim):
        partial = {axis: use for axis, use in zip(mesh.axis_names, uses, strict=True) if isinstance(use, str)}
        of_dim = [[axis for axis, use in zip(mesh.axis_names, uses, strict=True) if use == dim] for dim in range(ndim)]
        orders = itertools.product(*(itertools.permutations(axes) for axes in of_dim))
        found += [Layout(mesh, axes_per_dim, partial) for axes_per_dim in orders]
    return found
