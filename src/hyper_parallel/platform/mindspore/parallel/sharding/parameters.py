"""One parameter of a unit: its shard, the whole tensor, and where cells hold it."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from mindspore import Parameter, Tensor, mint, nn
from mindspore.graph.api import _no_grad

from hyper_parallel._base.errors import StateError, describe
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.parallel.sharding.cutting import Cut
from hyper_parallel.core.parallel.sharding.shard_spec import shard_spec
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.platform.mindspore.communication import Communication
from hyper_parallel.platform.mindspore.dtensor import DTensor
from hyper_parallel.platform.mindspore.dtensor.tensor import as_parameter, wrapped
from hyper_parallel.platform.mindspore.parallel.sharding.raw import resize

__all__ = [
    "Place",
    "UnitParameter",
    "check_not_recomputed",
    "check_optimizers",
    "found_parameters",
    "recomputed",
    "sharded_spec",
]


_set_info = Tensor.param_info.__set__


class Place(NamedTuple):
    """Where a cell holds a parameter."""

    cell: nn.Cell
    name: str

    def is_same(self, other: Place) -> bool:
        return self.cell is other.cell and self.name == other.name


class UnitParameter:
    """A parameter of a unit. `shard` is what everybody sees outside of forward; it is one object from then on.

    In forward cells hold a tensor on the memory of the whole one: each forward has its own, since the graph of that
    forward ends there (`graph.py`). A rerun in backward has `plain`.

    Args:
        name: for errors, and in the order of which gradients are sent.
        given: the parameter as the cell had it.
        places: the cells that hold it.
        spec: layout and shape of the shard.
        part: its cut over the data axis; `part.shape` is what cells compute with.
    """

    def __init__(self, name: str, given: Parameter, places: Sequence[Place], spec: Spec, part: Cut) -> None:
        self.name = name
        self.places = list(places)
        self.spec = spec
        self.part = part
        self.inner_spec: Spec | None = given._spec if isinstance(given, DTensor) else None
        self.dtype: Any = given.dtype
        self.given = weakref.ref(given)
        self.shard: Any = None
        self._whole: Tensor = None
        self._plain: Tensor = None
        self._shown: Any = None

    @property
    def local(self) -> Any:
        """This rank's part of the shard: a plain parameter, which optimizers step on."""
        return self.shard._local

    @property
    def is_trained(self) -> bool:
        return bool(self.shard.requires_grad)

    def make_shard(self, given: Any, rank: int) -> None:
        """Make the shard of a rank from the whole parameter, with what was noted on that one."""
        with _no_grad():
            values = (given._local if self.inner_spec is not None else given).data
            if values.is_meta:
                local = mint.empty(self.part.shape_of(rank), dtype=self.dtype, device="meta")
            else:
                if self.part.dim is not None:
                    values = mint.narrow(values, self.part.dim, *self.part.range_of(rank))
                local = Communication.transport.copy(values)
            self.shard = as_parameter(wrapped(local, self.spec), given.name, given.requires_grad)
        self.shard.init = given.init
        for name, value in vars(given).items():
            if name not in vars(self.shard) and name not in _OF_DTENSORS:
                setattr(self.shard, name, value)

    def make_whole(self, dtype: Any) -> None:
        """Make the whole tensor, on memory that is let go of at once; it comes back with each gather."""
        with _no_grad():
            self._whole = mint.empty(self.part.shape, dtype=dtype)
        self.free()

    @property
    def whole(self) -> Tensor:
        return self._whole

    @property
    def whole_bytes(self) -> int:
        return math.prod(self.part.shape) * int(self._whole.itemsize)

    def allocate(self) -> None:
        resize(self._whole, self.whole_bytes)

    def free(self) -> None:
        resize(self._whole, 0)

    # -- shown ---------------------------------------------------------------------------------------------------------

    def alias(self) -> Tensor:
        """Make a tensor on the memory of the whole one, in no graph."""
        return self.as_parameter(self._whole.data)

    def as_parameter(self, alias: Any) -> Tensor:
        """Have a tensor taken for a parameter: by cells, which ask for names, and by what keeps activations."""
        alias.__class__ = type(self.local)
        self._note_on(alias)
        return alias

    def _note_on(self, made: Any) -> None:
        # Not as `Parameter` sets it, by which the information would hold the tensor, and with it its graph.
        _set_info(made, self.local.param_info)
        for name, value in vars(self.local).items():
            vars(made).setdefault(name, value)
        made.init = None

    def show(self, value: Any) -> None:
        self._shown = value
        for cell, name in self.places:
            cell._params[name] = value

    def show_alias(self, alias: Tensor) -> None:
        """Have cells compute with a tensor on the memory of the whole one."""
        if self.inner_spec is not None:
            alias = wrapped(alias, self.inner_spec, type(self.shard))
            self._note_on(alias)
        self.show(alias)

    def show_plain(self) -> None:
        """Have cells compute with a tensor that is in no graph: for what keeps none, and for reruns in backward."""
        if self._plain is None or bool(self._plain._requires_grad) is not self.is_trained:
            self._plain = self.alias()
            if self.is_trained:
                self._plain.requires_grad_()
                self._plain.register_hook(self._refuse_gradient)
        self.show_alias(self._plain)

    def _refuse_gradient(self, _: Tensor) -> None:
        # A rerun that is differentiated by itself: its gradients would not come to the unit.
        raise recomputed(self.name)

    def show_shard(self) -> None:
        self.show(self.shard)

    # -- changes from outside ------------------------------------------------------------------------------------------

    def check_in_place(self) -> None:
        """Take over a shard that was put in place of the own one.

        Raises:
            StateError: it is no shard of the same tensor.
        """
        cell, name = self.places[0]
        current: Any = cell._params.get(name)
        if current is self.shard or current is self._shown:
            return
        if not (isinstance(current, DTensor) and isinstance(current, Parameter) and current._spec is self.spec):
            raise StateError(
                "A sharded parameter was replaced by something else.",
                expected=f"a parameter that is a DTensor {self.spec}",
                got=describe(current),
                where=self.name,
                do="Write into the parameter, or call `hp.fully_shard` after the replacement.",
            )
        self.shard = current


# What a DTensor notes on itself: of the given parameter, not of its shard.
_OF_DTENSORS = frozenset({"_local", "_spec", "_values", "_origin", "_ties", "_view_of", "_local_tensor"})


def check_optimizers(parameters: Sequence[UnitParameter]) -> None:
    """Raise where an optimizer was made before its parameters were sharded: it would train tensors that nobody uses."""
    replaced = {id(given): parameter for parameter in parameters if (given := parameter.given()) is not None}
    if not replaced:
        return
    for optimizer in [found for found in gc.get_objects() if issubclass(type(found), nn.Optimizer)]:
        for parameter in optimizer.parameters:
            if id(parameter) in replaced:
                raise StateError(
                    "An optimizer was made before its parameters were sharded: it would not train them.",
                    where=f"{type(optimizer).__name__}, {replaced[id(parameter)].name}",
                    do="Make it after `hp.fully_shard`, of `[p.to_local() for p in model.trainable_params()]`.",
                )


def found_parameters(cells: Sequence[nn.Cell], names: Sequence[str]) -> Iterator[tuple[str, Parameter, list[Place]]]:
    """Give every parameter of some cells once, with all places in them.

    What a normalization writes to in forward is left alone, as all that is no weight.

    Raises:
        StateError: a cell holds parameters in a list, which would not be replaced by their shards.
    """
    found: dict[int, tuple[str, Parameter, list[Place]]] = {}
    seen: set[tuple[int, str]] = set()
    for cell, prefix in zip(cells, names, strict=True):
        for path, inner in cell.cells_and_names(name_prefix=prefix):
            check_not_recomputed(inner, path)
            _check_no_lists(inner, path)
            for name, parameter in inner._params.items():
                if parameter is None or (id(inner), name) in seen or name in _WRITTEN_IN_FORWARD:
                    continue
                seen.add((id(inner), name))
                full = f"{path}.{name}" if path else name
                found.setdefault(id(parameter), (full, parameter, []))[2].append(Place(inner, name))
    yield from found.values()


_WRITTEN_IN_FORWARD = ("moving_mean", "moving_variance")  # of MindSpore's batch normalizations


def check_not_recomputed(cell: nn.Cell, path: str, *, with_inner: bool = False) -> None:
    """Raise where a cell, or one in it, has `recompute()`."""
    if cell._recompute_cell is not None:
        raise recomputed(path or type(cell).__name__)
    if with_inner:
        for name, inner in cell._cells.items():
            if inner is not None:
                check_not_recomputed(inner, f"{path}.{name}", with_inner=True)


def recomputed(where: str) -> StateError:
    return StateError(
        "MindSpore's `Cell.recompute()` and `recompute(..., use_reentrant=True)` run a backward of their own, for the "
        "parameters that the cell had before: those of a sharded cell would lose gradients.",
        where=where,
        do="Use `hp.checkpoint_wrapper(cell)`, or call `mindspore.recompute(cell, x, use_reentrant=False)`.",
    )


def _check_no_lists(cell: nn.Cell, path: str) -> None:
    for name, value in (*vars(cell).items(), *cell._params_list.items()):
        if name.startswith("_"):
            continue
        if isinstance(value, (list, tuple)) and any(isinstance(item, Parameter) for item in value):
            raise StateError(
                "A cell holds parameters in a list, in which they cannot be replaced by their shards.",
                expected="parameters that are attributes of their own",
                got=describe(value),
                where=f"{path}.{name}" if path else name,
                do="Hold each of them as an attribute, or leave this cell out.",
            )


def sharded_spec(name: str, given: Parameter, mesh: DeviceMesh, axis: str) -> tuple[Spec, Cut]:
    """Say how the shard of a parameter lies.

    Raises:
        TypeError: it lies on another mesh.
    """
    if isinstance(given, DTensor):
        return shard_spec(name, given._spec, tuple(given._local.shape), mesh, axis)
    return shard_spec(name, None, tuple(given.shape), mesh, axis)
