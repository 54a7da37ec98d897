"""`fully_shard` and `accumulate`: what a user calls."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel._base.whole_numbers import as_int
from hyper_parallel.core.dtensor.mesh import DeviceMesh, as_mesh
from hyper_parallel.core.parallel.sharding.accumulation import accumulating
from hyper_parallel.core.parallel.sharding.backend import DataAxes, ShardingBackend
from hyper_parallel.core.parallel.sharding.order import ORDER
from hyper_parallel.core.parallel.sharding.precision import MixedPrecision
from hyper_parallel.core.parallel.sharding.unit import Unit
from hyper_parallel.platform import platform_of
from hyper_parallel.platform.opaque import Module
from hyper_parallel.platform.selection import backend

__all__ = ["accumulate", "fully_shard", "units_in"]

_ENGINES = ("hyper_parallel", "fsdp2")


def fully_shard(
    module: Module | Sequence[Module],
    *,
    mesh: DeviceMesh,
    axis: str = "dp",
    replicate_axis: str | None = None,
    zero: int = 3,
    precision: MixedPrecision | None = None,
    prefetch: int = 1,
    engine: str = "hyper_parallel",
) -> Any:
    """Cut a module's parameters over the ranks of a mesh axis, and gather them when forward and backward need them.

    Parameters of inner modules that were sharded before stay with those: call it for each block, then for the model.
    Make the optimizer afterwards. Gradients are the mean over the ranks, as of one process with the whole batch.

    Args:
        module: what is gathered together; or several modules.
        mesh: the ranks.
        axis: along which parameters are cut.
        replicate_axis: along which all ranks have the same parts, and gradients are added up as well.
        zero: 3 lets go of whole parameters after forward and gathers them again for backward. 2 keeps them until the
            step ends. 1 also adds up gradients on each rank over the step, and sends them once.
        precision: dtypes to compute and to send gradients in.
        prefetch: how many units are gathered ahead of the one that computes.
        engine: "fsdp2" leaves it to PyTorch's own implementation.

    Returns: the same module.

    Example:
        >>> import torch
        >>> import hyper_parallel as hp
        >>> mesh = hp.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        >>> model = hp.fully_shard(torch.nn.Linear(2, 2), mesh=mesh)
        >>> model.weight.layout
        Layout(dp, -)
    """
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    if not modules:
        raise ArgumentError("There is nothing to shard.", expected="a module, or several", got="an empty list")
    axes = _checked_axes(mesh, axis, replicate_axis)
    precision = MixedPrecision() if precision is None else precision
    if not isinstance(precision, MixedPrecision):
        raise ArgumentTypeError("`precision` says dtypes.", expected="hp.MixedPrecision", got=describe(precision))
    stage, ahead = as_int(zero), as_int(prefetch)
    if stage not in (1, 2, 3):
        raise ArgumentError("`zero` is a stage of ZeRO.", expected="1, 2 or 3", got=describe(zero))
    if ahead is None or ahead < 0:
        raise ArgumentError("`prefetch` is a number of units.", expected="0 or more", got=describe(prefetch))
    found = _backend(modules[0])
    if engine not in _ENGINES:
        raise ArgumentError("There is no such engine.", expected=" or ".join(_ENGINES), got=describe(engine))
    if engine == "fsdp2":
        for part in modules:
            found.native(part, axes, precision, zero=stage, prefetch=ahead)
        return module
    _check_not_sharded(found, modules)
    memory, borrowed = found.memory(modules, axes, precision)
    name = ", ".join(found.name_of(part) for part in modules)
    unit = Unit(name, memory, ORDER, zero=stage, prefetch=ahead)
    unit.borrowed = borrowed
    found.follow(unit, modules, precision)
    return module


def units_in(module: Module) -> list[Unit]:
    """List the units of a module and of those in it, the outer ones first."""
    return _backend(module).units_in(module)


def accumulate(
    module: Module, *, last: bool, weight: float | None = None, reduce: str | None = None
) -> AbstractContextManager[None]:
    """Run one microbatch of several that make one step of a sharded module.

    Gradients are given to the shards when the last one ends. An error inside drops what was added up: begin the step
    again.

    Args:
        module: the model, or any part of it that has all sharded parts in it.
        last: whether this is the last microbatch of the step.
        weight: what its gradients count, such as its number of valid tokens on this rank: the result is
            sum(weight * gradient) / sum(weight) over ranks and microbatches. Without, microbatches add up as they do in
            one process, and each rank counts the same.
        reduce: "each" sends gradients after each microbatch, "last" once. As `zero` says without.

    Example:
        for number, batch in enumerate(batches):
            with hp.accumulate(model, last=number == len(batches) - 1, weight=count_tokens(batch)):
                loss_of(model, batch).backward()
    """
    if reduce not in (None, "each", "last"):
        raise ArgumentError("`reduce` says when gradients are sent.", expected='"each" or "last"', got=describe(reduce))
    return accumulating(units_in(module), last=last, weight=weight, reduce=reduce)


def _backend(module: Module) -> ShardingBackend:
    return backend(platform_of(module), ShardingBackend, "fully_shard")


def _checked_axes(mesh: DeviceMesh, axis: str, replicate_axis: str | None) -> DataAxes:
    mesh = as_mesh(mesh, "`fully_shard` needs a mesh.")
    mesh.axis_index(axis)
    if replicate_axis is not None:
        mesh.axis_index(replicate_axis)
        if replicate_axis == axis:
            raise ArgumentError(
                "Parameters are cut along one axis and copied along another.",
                expected=f"an axis other than {axis!r}",
                got=repr(replicate_axis),
            )
    mesh.check_started()
    rank = mesh.get_rank()
    ranks = mesh.ranks_along(axis, rank)
    if list(ranks) != sorted(ranks):
        raise ArgumentError(
            "The ranks along the data axis are not in ascending order.",
            expected=str(sorted(ranks)),
            got=str(list(ranks)),
            where=repr(mesh),
            do="Make the mesh with ascending ranks along this axis.",
        )
    return DataAxes(mesh, axis, replicate_axis)


def _check_not_sharded(found: ShardingBackend, modules: Sequence[Module]) -> None:
    for part in modules:
        if found.is_sharded(part):
            raise ArgumentError("This module is sharded already.", got=found.name_of(part))
