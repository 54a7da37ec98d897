"""One parameter of a unit: its shard, the whole tensor, and where modules hold it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from hyper_parallel._base.errors import ArgumentTypeError, StateError, describe
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.parallel.sharding.cutting import Cut
from hyper_parallel.core.parallel.sharding.shard_spec import shard_spec
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.platform.torch.dtensor.tensor import DTensor, wrapped

__all__ = ["Place", "UnitParameter", "check_optimizers", "found_parameters", "sharded_spec"]

# What a DTensor keeps of itself. Everything else was noted on a parameter by somebody, and goes on to its shard.
_OF_DTENSORS = ("_is_param", "_last_grad", "_local", "_origin", "_spec", "_ties", "_values", "_view_of")


class Place(NamedTuple):
    """Where a module holds a parameter."""

    module: nn.Module
    name: str

    def is_same(self, other: Place) -> bool:
        return self.module is other.module and self.name == other.name


class UnitParameter:
    """A parameter of a unit. `shard` is what everybody sees outside of forward, `whole` what modules compute with.

    Both are the same objects from the first step to the last: optimizers, hooks and graphs keep them.

    Args:
        name: for errors, and in the order of which gradients are sent.
        given: the parameter as the module had it.
        places: the modules that hold it.
        spec: layout and shape of the shard.
        part: its cut over the data axis; `part.shape` is what modules compute with.
    """

    def __init__(self, name: str, given: nn.Parameter, places: Sequence[Place], spec: Spec, part: Cut) -> None:
        self.name = name
        self.places = list(places)
        self.spec = spec
        self.part = part
        self.inner_spec: Spec | None = given._spec if isinstance(given, DTensor) else None
        self.dtype: torch.dtype = given.dtype
        self.given = weakref.ref(given)
        self.shard: Any = None
        self.local: torch.Tensor = torch.empty(0)  # this rank's part of the shard, as plain memory
        self.whole: Any = None
        self.whole_local: torch.Tensor = torch.empty(0)
        self.is_followed = False  # whether each gradient of it is told

    def set_shard(self, local: torch.Tensor, like: nn.Parameter) -> None:
        """Make the shard of memory, with what was noted on the parameter that it follows."""
        shard = nn.Parameter(wrapped(local, self.spec), like.requires_grad)
        for name, value in vars(like).items():
            if name not in _OF_DTENSORS:
                setattr(shard, name, value)
        self.shard, self.local = shard, shard._local

    def set_whole(self, local: torch.Tensor, *, requires_grad: bool) -> None:
        given = local if self.inner_spec is None else wrapped(local, self.inner_spec)
        self.whole = nn.Parameter(given, requires_grad)
        self.is_followed = False
        self.whole_local = self.whole if self.inner_spec is None else self.whole._local

    def take_over(self) -> None:
        """Take over a shard that was put in place of the own one, as `load_state_dict(assign=True)` does.

        Raises:
            StateError: it is no shard of the same tensor, or places that share the parameter have different ones.
        """
        found = [place.module._parameters.get(place.name) for place in self.places]
        others = [one for one in found if one is not self.shard and one is not self.whole]
        if others:
            self._take_over(others[0], found)
        self.local = self.shard._local

    def _take_over(self, current: Any, found: Sequence[Any]) -> None:
        if not (isinstance(current, DTensor) and current._spec is self.spec):
            raise StateError(
                "A sharded parameter was replaced by something else.",
                expected=f"a parameter that is a DTensor {self.spec}",
                got=describe(current),
                where=self.name,
                do="Write into the parameter, or call `hp.fully_shard` after the replacement.",
            )
        if any(one is not current and not _is_equal(one, current) for one in found):
            raise StateError(
                "A parameter that several modules share was replaced in some of them.",
                where=", ".join(f"{type(place.module).__name__}.{place.name}" for place in self.places),
                do="Replace it in all of them, or call `hp.fully_shard` after the replacement.",
            )
        with torch.no_grad():  # an optimizer that has the old shard still does not reach the new one's memory
            self.local.data = self.local.detach().clone()
        self.shard = current


def _is_equal(one: Any, other: DTensor) -> bool:
    return isinstance(one, DTensor) and one._spec is other._spec and torch.equal(one._local, other._local)


def check_optimizers(parameters: Sequence[UnitParameter]) -> None:
    """Raise where an optimizer was made before its parameters were sharded: it would train tensors that nobody uses."""
    replaced = {id(given): parameter for parameter in parameters if (given := parameter.given()) is not None}
    if not replaced:
        return
    for optimizer in [found for found in gc.get_objects() if isinstance(found, torch.optim.Optimizer)]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in replaced:
                    raise StateError(
                        "An optimizer was made before its parameters were sharded: it would not train them.",
                        where=f"{type(optimizer).__name__}, {replaced[id(parameter)].name}",
                        do="Make the optimizer after `hp.fully_shard`, of `model.parameters()`.",
                    )


def found_parameters(
    modules: Sequence[nn.Module], names: Sequence[str], is_sharded: Callable[[nn.Module], bool]
) -> Iterator[tuple[str, nn.Parameter, list[Place]]]:
    """Give every parameter of some modules once, with all places in them, but not those inside of sharded modules."""
    found: dict[int, tuple[str, nn.Parameter, list[Place]]] = {}
    seen: set[tuple[int, str]] = set()
    for module, prefix in zip(modules, names, strict=True):
        for path, inner in _modules(module, prefix, is_sharded):
            for name, parameter in inner._parameters.items():
                if parameter is None or (id(inner), name) in seen:
                    continue
                seen.add((id(inner), name))
                full = f"{path}.{name}" if path else name
                found.setdefault(id(parameter), (full, parameter, []))[2].append(Place(inner, name))
    yield from found.values()


def _modules(module: nn.Module, path: str, is_sharded: Callable[[nn.Module], bool]) -> Iterator[tuple[str, nn.Module]]:
    yield path, module
    for name, child in module._modules.items():
        if child is not None and not is_sharded(child):
            yield from _modules(child, f"{path}.{name}" if path else name, is_sharded)


def sharded_spec(name: str, given: nn.Parameter, mesh: DeviceMesh, axis: str) -> tuple[Spec, Cut]:
    """Say how the shard of a parameter lies.

    Raises:
        TypeError: it is a tensor of a class whose parts nobody knows, or lies on another mesh.
    """
    if isinstance(given, DTensor):
        return shard_spec(name, given._spec, tuple(given._local.shape), mesh, axis)
    if type(given.data) is not torch.Tensor:
        raise ArgumentTypeError(
            "Only plain parameters can be sharded, and distributed tensors of this library.",
            expected="a torch.nn.Parameter of a plain tensor",
            got=describe(given),
            where=name,
            do="Turn PyTorch's own DTensors with `hp.DTensor.from_torch`; leave other classes out.",
        )
    return shard_spec(name, None, tuple(given.shape), mesh, axis)
