"""`Layout`: which mesh axes split which tensor dim, and on which axes the values are partial."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel._base.whole_numbers import as_int
from hyper_parallel.core.dtensor.interned import Interned
from hyper_parallel.core.dtensor.mesh import DeviceMesh, as_mesh, current_mesh
from hyper_parallel.core.dtensor.placements import Partial, Placement, Replicate, Shard, as_placement, check_op

__all__ = ["AxesOfDim", "Layout", "PartialAxes", "check_same_mesh", "layout"]

AxesOfDim: TypeAlias = "str | Sequence[str] | None"
PartialAxes: TypeAlias = "Mapping[str, str] | Iterable[tuple[str, str]] | Iterable[str] | str"

_MOST_DIMS = 1000  # more than any framework has


class Layout(Interned):
    """Says how a tensor lies on a mesh. Equal arguments give the same object: dictionaries find it by its address.

    Args:
        mesh: the mesh.
        axes_per_dim: for each tensor dim the axis that splits it, or several from the outermost split inwards, or None.
        partial: the axes on which values are partial: `{"tp": "max"}`, pairs of axis and op, or axis names alone for
            sums.

    Ops of several partial axes are applied from the last axis of the mesh to the first (this matters only where they do
    not commute, such as a sum of maxima).

    Raises:
        ValueError: an axis that the mesh lacks, that is used twice, or that is both sharded and partial; an unknown op.

    Example:
        >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        >>> Layout(mesh, ("dp", None), {"tp": "sum"}).placements
        (Shard(0), Partial('sum'))
    """

    __slots__ = (
        "_dim_of",
        "_partial_op",
        "_placements",
        "axes_per_dim",
        "is_replicated",
        "mesh",
        "ndim",
        "partial",
        "replicated_axes",
        "varying_axes",
    )  # fmt: skip
    mesh: DeviceMesh
    axes_per_dim: tuple[tuple[str, ...], ...]
    partial: tuple[tuple[str, str], ...]  # (axis, op), in the order of the mesh
    ndim: int  # number of dims that the tensor has
    varying_axes: tuple[str, ...]  # axes of several ranks, sharded or partial: their ranks hold different values
    replicated_axes: tuple[str, ...]  # all other axes: their ranks hold the same values
    is_replicated: bool  # there are no varying axes
    _dim_of: dict[str, int]
    _partial_op: dict[str, str]
    _placements: tuple[Placement, ...] | None

    def __new__(cls, mesh: DeviceMesh, axes_per_dim: Sequence[AxesOfDim], partial: PartialAxes = ()) -> Layout:
        mesh = as_mesh(mesh, "A layout needs a mesh.")
        axes = _axes_per_dim(axes_per_dim)
        ops = _partial_pairs(partial)
        found = mesh._layouts.get((axes, ops))
        if found is None:
            _check(mesh, axes, ops)
            ops = tuple(sorted(ops, key=lambda pair: mesh.axis_index(pair[0])))
            found = mesh._layouts.get((axes, ops))
            if found is None:
                found = mesh._layouts.setdefault((axes, ops), cls._make(mesh, axes, ops))
        made: Layout = found
        return made

    @classmethod
    def _make(cls, mesh: DeviceMesh, axes: tuple[tuple[str, ...], ...], ops: tuple[tuple[str, str], ...]) -> Layout:
        dim_of = {axis: dim for dim, names in enumerate(axes) for axis in names}
        partial_op = dict(ops)
        varying = tuple(
            axis
            for axis, size in zip(mesh.axis_names, mesh.shape, strict=True)
            if size > 1 and (axis in dim_of or axis in partial_op)
        )
        made = object.__new__(cls)
        made._fill(
            mesh=mesh,
            axes_per_dim=axes,
            partial=ops,
            ndim=len(axes),
            varying_axes=varying,
            replicated_axes=tuple(axis for axis in mesh.axis_names if axis not in varying),
            is_replicated=not varying,
            _dim_of=dim_of,
            _partial_op=partial_op,
            _placements=_placements(mesh, axes, dim_of, partial_op),
        )
        return made

    @classmethod
    def from_placements(cls, mesh: DeviceMesh, placements: Sequence[Placement], ndim: int) -> Layout:
        """Make the layout of one placement per mesh axis, for a tensor of `ndim` dims.

        Axes that split one dim do so in mesh order.

        Raises:
            ValueError: another number of placements than axes, or a dim that the tensor does not have.
        """
        mesh = as_mesh(mesh, "A layout needs a mesh.")
        dims = as_int(ndim)
        if dims is None or not 0 <= dims <= _MOST_DIMS:
            raise ArgumentError(
                "`ndim` is the number of the tensor's dims.", expected=f"0 to {_MOST_DIMS}", got=describe(ndim)
            )
        ndim = dims
        if not hasattr(placements, "__iter__"):
            raise ArgumentTypeError(
                "Placements come as a list, one per mesh axis.", expected="such as [Shard(0)]", got=describe(placements)
            )
        placements = tuple(placements)
        key = (placements, ndim)
        try:
            found = mesh._layouts.get(key)
        except TypeError:  # something that has no hash is no placement either
            found = None
        if found is None:
            found = mesh._layouts.setdefault(key, _from_placements(mesh, placements, ndim))
        made: Layout = found
        return made

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Return one placement per mesh axis.

        Raises:
            ValueError: axes split one dim in another order than that of the mesh, which placements cannot say.
        """
        if self._placements is None:
            raise ArgumentError(
                "This layout has no placements: they split a dim by the axes in the order of the mesh.",
                expected=f"axes in the order {', '.join(self.mesh.axis_names)}",
                got=repr(self),
                do="Pass the layout itself, or redistribute to one whose axes are in the order of the mesh.",
            )
        return self._placements

    @property
    def has_placements(self) -> bool:
        """Say whether `placements` can say what this layout says."""
        return self._placements is not None

    def axes_of(self, dim: int) -> tuple[str, ...]:
        """Return the axes that split a dim, outermost first.

        Raises:
            ValueError: the tensor has no such dim.
        """
        place = as_int(dim)
        if place is None or not -self.ndim <= place < self.ndim:
            raise ArgumentError(
                "The tensor has no such dim.", expected=f"a dim of {self.ndim}", got=describe(dim), where=repr(self)
            )
        return self.axes_per_dim[place]

    def dim_of(self, axis: str) -> int | None:
        """Return the dim that an axis splits, or None."""
        return self._dim_of.get(_checked_name(axis))

    def partial_op(self, axis: str) -> str | None:
        """Return the reduction that is due on an axis, or None."""
        return self._partial_op.get(_checked_name(axis))

    def replace(self, *, axes_per_dim: Sequence[AxesOfDim] | None = None, partial: PartialAxes | None = None) -> Layout:
        """Return this layout with other axes per dim, or other partial axes."""
        return Layout(
            self.mesh,
            self.axes_per_dim if axes_per_dim is None else axes_per_dim,
            self.partial if partial is None else partial,
        )

    def with_dims(self, *dims: AxesOfDim) -> Layout:
        """Return this layout with other axes per dim and the same partial ones."""
        return Layout(self.mesh, dims, self.partial)

    def without_partial(self, *axes: str) -> Layout:
        """Return the layout once the reductions over these axes are done; without any, over all."""
        for axis in axes:
            self.mesh.axis_index(axis)
        return Layout(
            self.mesh, self.axes_per_dim, tuple(pair for pair in self.partial if axes and pair[0] not in axes)
        )

    def __repr__(self) -> str:
        dims = ", ".join("·".join(names) or "-" for names in self.axes_per_dim) or "scalar"
        ops: dict[str, list[str]] = {}
        for axis, op in self.partial:
            ops.setdefault(op, []).append(axis)
        partial = "".join(f"; partial {op} over {'·'.join(axes)}" for op, axes in ops.items())
        return f"Layout({dims}{partial})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Layout, (self.mesh, self.axes_per_dim, self.partial)


def layout(*dims: AxesOfDim, mesh: DeviceMesh | None = None, partial: PartialAxes = ()) -> Layout:
    """Make a layout by axis names: for each tensor dim a name, several from the outermost split inwards, or None.

    The mesh is `mesh`, or that of the `with mesh:` around the call.

    Raises:
        ValueError: there is no mesh, or the names do not fit it.

    Example:
        >>> mesh = DeviceMesh("cpu", [[[0, 1], [2, 3]]], mesh_dim_names=("dp", "cp", "tp"))
        >>> layout("dp", ("cp", "tp"), None, mesh=mesh)
        Layout(dp, cp·tp, -)
    """
    chosen = current_mesh() if mesh is None else mesh
    if chosen is None:
        raise ArgumentError(
            "A layout needs a mesh.",
            expected="`mesh=...`, or a `with mesh:` block around the call",
            got="neither",
            do="Write `mesh.layout(...)`, or pass the mesh.",
        )
    return Layout(as_mesh(chosen, "A layout needs a mesh."), dims, partial)


def _checked_name(axis: object) -> str:
    if not isinstance(axis, str):
        raise ArgumentTypeError("A mesh axis is given by its name.", expected="a text", got=describe(axis))
    return axis


def check_same_mesh(first: Layout, second: Layout) -> None:
    """Raise where two layouts are of different meshes."""
    if first.mesh is not second.mesh:
        raise ArgumentError(
            "The layouts are of different meshes.",
            expected=f"both on {first.mesh}",
            got=f"{second} on {second.mesh}",
            do="Make both layouts on one mesh; a sub-mesh is another mesh than the whole.",
        )


def _axes_per_dim(dims: Sequence[AxesOfDim]) -> tuple[tuple[str, ...], ...]:
    if isinstance(dims, str) or not isinstance(dims, Sequence):
        raise ArgumentTypeError(
            "A layout has a list with one entry per tensor dim.", expected='such as ("dp", None)', got=describe(dims)
        )
    axes: list[tuple[str, ...]] = []
    for names in dims:
        if names is None:
            axes.append(())
        elif isinstance(names, str):
            axes.append((names,))
        elif isinstance(names, (tuple, list)) and all(isinstance(name, str) for name in names):
            axes.append(tuple(names))
        else:
            raise ArgumentTypeError(
                "A layout says for each tensor dim by which mesh axes it is split.",
                expected='a name, several such as ("cp", "tp"), or None',
                got=describe(names),
                where=f"dim {len(axes)}",
            )
    return tuple(axes)


def _partial_pairs(partial: PartialAxes) -> tuple[tuple[str, str], ...]:
    if isinstance(partial, str):
        return ((partial, "sum"),)
    if not hasattr(partial, "__iter__"):
        raise ArgumentTypeError(
            "Partial axes are given by name, with their reduction.",
            expected='such as {"tp": "max"}',
            got=describe(partial),
        )
    items: Iterable[Any] = partial.items() if isinstance(partial, Mapping) else partial
    pairs = []
    for item in items:
        if isinstance(item, str):
            pairs.append((item, "sum"))
            continue
        if not isinstance(item, (tuple, list)) or [type(part) for part in item] != [str, str]:
            raise ArgumentTypeError(
                "Partial axes are given by name, with their reduction.",
                expected='such as {"tp": "max"}',
                got=describe(item),
            )
        pairs.append((item[0], item[1]))
    return tuple(pairs)


def _check(mesh: DeviceMesh, axes: tuple[tuple[str, ...], ...], ops: tuple[tuple[str, str], ...]) -> None:
    users: dict[str, str] = {}
    uses = [(axis, f"splits dim {dim}") for dim, names in enumerate(axes) for axis in names]
    uses += [(axis, f"is partial ({op})") for axis, op in ops]
    for axis, use in uses:
        mesh.axis_index(axis)
        if axis in users:
            raise ArgumentError(
                "A layout uses a mesh axis twice.",
                expected="each axis to split one dim, or to be partial",
                got=f"{axis!r} {users[axis]} and {use}",
                where=repr(mesh),
                do="Remove one of them.",
            )
        users[axis] = use
    for _, op in ops:
        check_op(op)


def _from_placements(mesh: DeviceMesh, placements: Sequence[Placement], ndim: int) -> Layout:
    if len(placements) != mesh.ndim:
        raise ArgumentError(
            "The placements do not match the axes of the mesh.",
            expected=f"{mesh.ndim} placements",
            got=f"{len(placements)}: {describe(list(placements))}",
            where=repr(mesh),
            do="Give one placement per mesh axis.",
        )
    axes: list[list[str]] = [[] for _ in range(ndim)]
    partial = []
    for axis, given in zip(mesh.axis_names, placements, strict=True):
        placement = as_placement(given)
        if isinstance(placement, Shard):
            if not -ndim <= placement.dim < ndim:
                raise ArgumentError(
                    "The tensor has no such dim.",
                    expected=f"a dim of the {ndim} that the tensor has",
                    got=f"{placement}",
                    where=f"axis {axis!r} of {mesh}",
                )
            axes[placement.dim].append(axis)
        elif isinstance(placement, Partial):
            partial.append((axis, placement.op))
        elif not isinstance(placement, Replicate):
            raise ArgumentTypeError(
                "A placement is missing.", expected="hp.Shard, hp.Replicate or hp.Partial, or PyTorch's",
                got=describe(given), where=f"axis {axis!r}",
            )  # fmt: skip
    return Layout(mesh, tuple(tuple(names) for names in axes), tuple(partial))


def _placements(
    mesh: DeviceMesh, axes: tuple[tuple[str, ...], ...], dim_of: dict[str, int], partial_op: dict[str, str]
) -> tuple[Placement, ...] | None:
    for names in axes:
        order = [mesh.axis_index(axis) for axis in names if mesh.size(axis) > 1]
        if order != sorted(order):
            return None
    return tuple(
        Shard(dim_of[axis]) if axis in dim_of else Partial(partial_op[axis]) if axis in partial_op else Replicate()
        for axis in mesh.axis_names
    )
