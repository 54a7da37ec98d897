"""The mesh: ranks in an array whose axes have names.

What a mesh is (ranks, names, coordinates, sub-meshes of a given rank) is pure. What it is *for this process* (its
coordinate, its groups) is asked of the platform, inside the call, so that a mesh of a thousand ranks can be planned for
on a laptop.

Once communication was started, the world is known: a mesh with ranks that it does not have, or on devices that this
machine does not have, is refused when it is made. Before, it is refused when a tensor is to lie on it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, StateError, describe
from hyper_parallel._base.whole_numbers import as_int
from hyper_parallel.core.dtensor.interned import Interned
from hyper_parallel.core.dtensor.mesh_arguments import axis_names_of, ranks_of, shape_of
from hyper_parallel.platform.opaque import Group
from hyper_parallel.platform.selection import communicating_platform, device_type_here, started_world_size

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import AxesOfDim, Layout, PartialAxes

__all__ = ["DeviceMesh", "as_mesh", "current_mesh", "init_device_mesh"]

_made: dict[tuple[object, ...], DeviceMesh] = {}
_entered: ContextVar[tuple[DeviceMesh, ...]] = ContextVar("entered meshes", default=())


class DeviceMesh(Interned):
    """An array of world ranks with named axes. Equal arguments give the same object.

    Args:
        device_type: where the tensors live, such as "cpu", "cuda" or "npu".
        mesh: the ranks, as nested lists or an array; or the shape, if `rank_list` is given.
        mesh_dim_names: one name per axis; "axis0", "axis1", ... without.
        rank_list: the ranks in row-major order, for a `mesh` that is a shape.

    Raises:
        ValueError: ranks that repeat, are negative or do not fill the shape; names that repeat or do not match the
            axes.
        RuntimeError: communication was started, and there are not so many processes, or no such devices.

    Example:
        >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        >>> mesh.coordinate_of(2), mesh.ranks_along("tp", 2)
        ((1, 0), (2, 3))
    """

    __slots__ = (
        "_axis_indices",
        "_coordinates",
        "_layouts",
        "_strides",
        "axis_names",
        "device_type",
        "ranks",
        "shape",
    )  # fmt: skip
    device_type: str
    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    ranks: tuple[int, ...]  # row-major: the last axis varies fastest
    _axis_indices: dict[str, int]
    _coordinates: dict[int, tuple[int, ...]]
    _layouts: dict[Any, Any]  # layouts of this mesh, filled by layout.py
    _strides: tuple[int, ...]

    def __new__(
        cls,
        device_type: str,
        mesh: object,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        rank_list: Sequence[int] | None = None,
    ) -> DeviceMesh:
        if not isinstance(device_type, str) or not device_type:
            raise ArgumentTypeError(
                "A mesh needs the type of its devices.", expected='a name such as "cuda"', got=describe(device_type)
            )
        shape, ranks = ranks_of(mesh, rank_list)
        names = axis_names_of(mesh_dim_names, shape)
        made = cls._interned(device_type, shape, names, ranks)
        made._check_possible()
        return made

    @classmethod
    def _interned(cls, *key: Any) -> DeviceMesh:
        found = _made.get(key)
        return found if found is not None else _made.setdefault(key, cls._make(*key))

    @classmethod
    def _make(
        cls, device_type: str, shape: tuple[int, ...], axis_names: tuple[str, ...], ranks: tuple[int, ...]
    ) -> DeviceMesh:
        made = object.__new__(cls)
        made._fill(
            device_type=device_type,
            shape=shape,
            axis_names=axis_names,
            ranks=ranks,
            _axis_indices={name: index for index, name in enumerate(axis_names)},
            _coordinates=dict(zip(ranks, itertools.product(*map(range, shape)), strict=True)),
            _layouts={},
            _strides=tuple(math.prod(shape[index + 1 :]) for index in range(len(shape))),
        )
        return made

    # -- for any rank -------------------------------------------------------------------------------------------------

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        """Return the axis names, by the name of the argument."""
        return self.axis_names

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Return the shape, by the name of the argument."""
        return self.shape

    @property
    def rank_list(self) -> tuple[int, ...]:
        """Return the ranks in row-major order, by the name of the argument."""
        return self.ranks

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def size(self, axis: str | int | None = None) -> int:
        """Return the number of ranks, of one axis or of all."""
        return len(self.ranks) if axis is None else self.shape[self.axis_index(axis)]

    def axis_index(self, axis: str | int) -> int:
        """Return the position of an axis, which is given by its name or by its position.

        Raises:
            ValueError: there is no such axis.
        """
        if isinstance(axis, str):
            index = self._axis_indices.get(axis)
            if index is not None:
                return index
        elif (place := as_int(axis)) is not None and -self.ndim <= place < self.ndim:
            return place % self.ndim
        raise ArgumentError(
            "The mesh has no such axis.",
            expected=f"one of {', '.join(map(repr, self.axis_names))}",
            got=describe(axis),
            where=repr(self),
            do="Name an axis of this mesh, or give the mesh that name in `mesh_dim_names`.",
        )

    def coordinate_of(self, rank: int) -> tuple[int, ...]:
        """Return where a rank is in the mesh.

        Raises:
            ValueError: the mesh does not have this rank.
        """
        place = as_int(rank)
        found = None if place is None else self._coordinates.get(place)
        if found is None:
            raise ArgumentError(
                "The mesh does not have this rank.",
                expected=f"one of {_some(self.ranks)}",
                got=describe(rank),
                where=repr(self),
            )
        return found

    def has_rank(self, rank: int) -> bool:
        return as_int(rank) in self._coordinates

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """Return the rank at a coordinate.

        Raises:
            ValueError: the coordinate lies outside of the mesh.
        """
        places = [as_int(at) for at in coordinate] if isinstance(coordinate, (tuple, list)) else []
        inside = [at for at, size in zip(places, self.shape, strict=False) if at is not None and 0 <= at < size]
        if not len(inside) == len(places) == self.ndim:
            raise ArgumentError(
                "The coordinate lies outside of the mesh.",
                expected=f"one below {self.shape}", got=describe(coordinate), where=repr(self),
            )  # fmt: skip
        return self.ranks[sum(at * stride for at, stride in zip(inside, self._strides, strict=True))]

    def ranks_along(self, axes: str | int | Sequence[str | int], rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` on these axes alone, itself included.

        With several axes the last varies fastest.
        """
        indices = self._indices_of(axes)
        coordinate = self.coordinate_of(rank)
        first = sum(
            at * self._strides[index] for index, at in enumerate(coordinate) if index not in indices
        )  # fmt: skip
        steps = itertools.product(
            *([self._strides[index] * at for at in range(self.shape[index])] for index in indices)
        )
        return tuple(self.ranks[first + sum(step)] for step in steps)

    def submesh(self, axes: str | int | Sequence[str | int], rank: int) -> DeviceMesh:
        """Return the mesh of these axes, in this order, that `rank` is in."""
        indices = self._indices_of(axes)
        return DeviceMesh._interned(
            self.device_type,
            tuple(self.shape[index] for index in indices),
            tuple(self.axis_names[index] for index in indices),
            self.ranks_along(axes, rank),
        )

    def flatten(self, name: str | None = None) -> DeviceMesh:
        """Return the same ranks in the same order on one axis.

        `mesh["dp", "cp"].flatten("dp_cp")` joins two of several.

        Its name is that of all axes, joined by "_", unless told.
        """
        shape = (len(self.ranks),)
        names = axis_names_of(("_".join(self.axis_names) if name is None else name,), shape)
        return DeviceMesh._interned(self.device_type, shape, names, self.ranks)

    def layout(self, *dims: AxesOfDim, partial: PartialAxes = ()) -> Layout:
        """Make a layout on this mesh.

        For each tensor dim an axis name, several from the outermost split inwards, or None.

        Example:
            >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            >>> mesh.layout("dp", None, partial={"tp": "sum"})
            Layout(dp, -; partial sum over tp)
        """
        from hyper_parallel.core.dtensor.layout import Layout

        return Layout(self, dims, partial)

    def _indices_of(self, axes: str | int | Sequence[str | int]) -> tuple[int, ...]:
        listed = (axes,) if isinstance(axes, str) or not hasattr(axes, "__iter__") else axes
        indices = tuple(self.axis_index(axis) for axis in listed)
        if len(set(indices)) != len(indices) or not indices:
            raise ArgumentError(
                "A choice of mesh axes names each once, and at least one.", got=describe(axes), where=repr(self)
            )
        return indices

    # -- for this process ---------------------------------------------------------------------------------------------

    def get_rank(self) -> int:
        """Return the world rank of this process; 0 in a single one."""
        return int(communicating_platform().get_rank())

    def get_coordinate(self) -> tuple[int, ...] | None:
        """Return where this process is, or None if the mesh does not have it."""
        return self._coordinates.get(self.get_rank())

    def check_started(self) -> None:
        """Refuse a mesh that has ranks beyond the world as it is now; a world that was not started has one rank.

        Raises:
            RuntimeError: the mesh has ranks that the world does not have.
        """
        self._check_fits(int(communicating_platform().get_world_size()))

    def _check_fits(self, world_size: int) -> None:
        if max(self.ranks) >= world_size:
            raise StateError(
                "The mesh has ranks that were not started.",
                expected=f"{max(self.ranks) + 1} processes",
                got=f"{world_size}",
                where=repr(self),
                do="Start more processes and call `init_process_group` in each, or make the mesh smaller.",
            )

    def _check_possible(self) -> None:
        """Refuse a mesh that this world or machine cannot have, as far as that is known.

        Who has not started anything may plan for any machine.
        """
        world_size = started_world_size()
        if world_size is not None:
            self._check_fits(world_size)
        if self.device_type in ("cpu", "meta") or (world_size is None and self.ranks != (0,)):
            return
        here = device_type_here()
        if here is not None and here != self.device_type and {here, self.device_type} != {"cuda", "gpu"}:
            raise StateError(
                "The mesh is of devices that this machine does not have.",
                expected=f'"{here}"',
                got=f'"{self.device_type}"',
                where=repr(self),
                do=f'Make it a mesh of "{here}", or run this where there are such devices (`hyper-parallel doctor` '
                "shows what is here).",
            )

    def get_local_rank(self, axis: str | int | None = None) -> int:
        """Return this process's position on an axis; a mesh of one axis needs no name.

        Raises:
            RuntimeError: the mesh does not have this process.
        """
        index = self._only_axis() if axis is None else self.axis_index(axis)
        return self.coordinate_of(self._rank_inside())[index]

    def get_group(self, axes: str | int | Sequence[str | int] | None = None) -> Any:
        """Return the framework's group of the ranks that differ from this one on these axes alone.

        A group's own order is the ascending one of its ranks, whatever their order in the mesh. Every rank of the group
        has to ask.

        Raises:
            RuntimeError: the mesh does not have this process, or has ranks that the world does not have.
        """
        rank = self._rank_inside()
        self.check_started()
        platform = communicating_platform()
        return platform.create_group(list(self.ranks_along(self._only_axis() if axes is None else axes, rank)))

    def __getitem__(self, axes: str | tuple[str, ...]) -> DeviceMesh:
        """Return the sub-mesh of these axes that this process is in.

        Raises:
            RuntimeError: the mesh does not have this process.
        """
        return self.submesh(axes, self._rank_inside())

    @staticmethod
    def from_group(
        group: Group, device_type: str, mesh: object = None, *, mesh_dim_names: Sequence[str] | None = None
    ) -> DeviceMesh:
        """Make the mesh over an existing group.

        Or over several, one per axis, which this process is in; `mesh` has the ranks then.

        `get_group` answers these groups from now on.

        Raises:
            ValueError: several groups and no `mesh`, or groups that are not the axes of `mesh`.
        """
        platform = communicating_platform()
        groups = list(group) if isinstance(group, (list, tuple)) else [group]
        members = [tuple(int(rank) for rank in platform.get_process_group_ranks(member)) for member in groups]
        if mesh is None:
            if len(groups) != 1:
                raise ArgumentError(
                    "Several groups do not say which ranks the mesh has.",
                    expected="`mesh`, an array of ranks with one axis per group", got=f"{len(groups)} groups alone",
                )  # fmt: skip
            mesh = list(members[0])
        made = DeviceMesh(device_type, mesh, mesh_dim_names=mesh_dim_names)
        rank = made._rank_inside()
        expected = [made.ranks_along(axis, rank) for axis in range(made.ndim)]
        if [sorted(ranks) for ranks in members] != [sorted(ranks) for ranks in expected]:
            raise ArgumentError(
                "The groups are not the axes of the mesh.",
                expected=f"groups of the ranks {expected}", got=str(members), where=repr(made),
            )  # fmt: skip
        for member in groups:
            platform.mark_created_groups(member)
        return made

    def to_torch(self) -> Any:
        """Return PyTorch's `DeviceMesh` with the same ranks, names and groups."""
        from hyper_parallel.platform.torch.dtensor import mesh_to_torch

        return mesh_to_torch(self)

    @staticmethod
    def from_torch(mesh: object) -> DeviceMesh:
        """Make the mesh of a PyTorch `DeviceMesh`; its groups are used."""
        from hyper_parallel.platform.torch.dtensor import mesh_from_torch

        made = mesh_from_torch(mesh)
        if not isinstance(made, DeviceMesh):
            raise ArgumentTypeError("No mesh came out of the conversion.", expected="a DeviceMesh", got=describe(made))
        return made

    def _rank_inside(self) -> int:
        rank = self.get_rank()
        if rank not in self._coordinates:
            raise StateError(
                "The mesh does not have this process.",
                expected=f"one of the ranks {_some(self.ranks)}",
                got=str(rank),
                where=repr(self),
                do="Let the other processes call it, or ask for any rank with `submesh`, `ranks_along` or "
                "`coordinate_of`.",
            )
        return rank

    def _only_axis(self) -> int:
        if self.ndim != 1:
            raise ArgumentError(
                "A mesh of several axes does not know which one is meant.",
                expected=f"one of {', '.join(map(repr, self.axis_names))}", got="none", where=repr(self),
            )  # fmt: skip
        return 0

    # -- as an object -------------------------------------------------------------------------------------------------

    def __enter__(self) -> DeviceMesh:
        """Make this the mesh of `layout("dp", None)` in the block."""
        _entered.set((*_entered.get(), self))
        return self

    def __exit__(self, *_exc: object) -> None:
        _entered.set(_entered.get()[:-1])

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in zip(self.axis_names, self.shape, strict=True))
        is_plain = self.ranks == tuple(range(len(self.ranks)))
        return f"DeviceMesh({self.device_type}, {axes}{'' if is_plain else f', ranks {_some(self.ranks)}'})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.device_type, self.shape, self.axis_names, self.ranks)


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    rank_list: Sequence[int] | None = None,
) -> DeviceMesh:
    """Make a mesh of a shape, over the ranks 0, 1, 2, ... or those of `rank_list`, in row-major order.

    Starts no process and no group: a group is made when it is first asked for.

    Raises:
        ValueError: sizes below 1, ranks that do not fill the shape or repeat, names that repeat or do not match the
            axes.
        RuntimeError: communication was started, and there are not so many processes, or no such devices.

    Example:
        >>> init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        DeviceMesh(cpu, dp=2, tp=4)
    """
    shape = shape_of(mesh_shape)
    ranks = range(math.prod(shape)) if rank_list is None else rank_list
    return DeviceMesh(device_type, shape, mesh_dim_names=mesh_dim_names, rank_list=ranks)


def as_mesh(value: object, what: str) -> DeviceMesh:
    """Return a mesh of this package for one of it or of PyTorch, whose groups are used then.

    PyTorch's is known by its class's name: nothing is imported.

    Raises:
        TypeError: it is none; `what` says what for.
    """
    if isinstance(value, DeviceMesh):
        return value
    kind = type(value)
    if kind.__name__ == "DeviceMesh" and kind.__module__.partition(".")[0] == "torch":
        return DeviceMesh.from_torch(value)
    raise ArgumentTypeError(what, expected="a hp.DeviceMesh, or PyTorch's", got=describe(value))


def current_mesh() -> DeviceMesh | None:
    """Return the mesh of the innermost `with mesh:` around this call, or None."""
    entered = _entered.get()
    return entered[-1] if entered else None


def _rebuild(
    device_type: str, shape: tuple[int, ...], axis_names: tuple[str, ...], ranks: tuple[int, ...]
) -> DeviceMesh:
    # Not by the class, which checks the world: what was saved in a larger one can be read in this one.
    return DeviceMesh._interned(device_type, shape, axis_names, ranks)


def _some(ranks: tuple[int, ...]) -> str:
    return str(list(ranks)) if len(ranks) <= 16 else f"[{', '.join(map(str, ranks[:12]))}, …] ({len(ranks)})"
