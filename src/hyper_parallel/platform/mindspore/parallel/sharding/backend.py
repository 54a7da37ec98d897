"""Sharded data parallel's MindSpore part."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import mindspore
from mindspore import Parameter, nn

from hyper_parallel._base.errors import ArgumentError, StateError, UnsupportedDeviceError
from hyper_parallel.core.parallel.sharding.backend import DataAxes, ShardingBackend
from hyper_parallel.core.parallel.sharding.order import ORDER
from hyper_parallel.core.parallel.sharding.precision import MixedPrecision
from hyper_parallel.core.parallel.sharding.unit import Unit
from hyper_parallel.platform.mindspore.devices import Devices
from hyper_parallel.platform.mindspore.parallel.sharding.hooks import UnitHooks, hooks_of, units_in
from hyper_parallel.platform.mindspore.parallel.sharding.memory import MindSporeUnitMemory
from hyper_parallel.platform.mindspore.parallel.sharding.parameters import (
    UnitParameter,
    found_parameters,
    sharded_spec,
)
from hyper_parallel.platform.mindspore.regions.graph_mode import refuse_graph_mode

__all__ = ["BACKEND"]


class MindSporeSharding:
    """See `ShardingBackend`."""

    folder: ClassVar[str] = ShardingBackend.folder

    def memory(
        self, modules: Sequence[nn.Cell], axes: DataAxes, precision: MixedPrecision
    ) -> tuple[MindSporeUnitMemory, tuple[Unit, ...]]:
        _check_device()
        refuse_graph_mode("A sharded cell", "its parameters come and go while Python runs")
        names = [""] if len(modules) == 1 else [f"{number}" for number in range(len(modules))]
        own, given, borrowed = [], [], []
        known = _known_parameters()
        for name, parameter, places in found_parameters(modules, names):
            if id(parameter) not in known:
                _check_is_plain(name, parameter)
                spec, part = sharded_spec(name, parameter, axes.mesh, axes.axis)
                own.append(UnitParameter(name, parameter, places, spec, part))
                given.append(parameter)
                continue
            unit, owner = known[id(parameter)]
            added = [place for place in places if not any(place.is_same(other) for other in owner.places)]
            if added:
                owner.places += added
                owner.show_shard()
                borrowed.append(unit)
        name = ", ".join(type(module).__name__ for module in modules)
        made = MindSporeUnitMemory(name, own, given, axes.mesh, axes.axis, axes.replicate_axis, precision)
        made.show_shards()
        return made, tuple(dict.fromkeys(borrowed))

    def follow(self, unit: Unit, modules: Sequence[nn.Cell], precision: MixedPrecision) -> None:
        memory: Any = unit.memory
        known = weakref.ref(unit)
        memory.is_scheduled = lambda: (found := known()) is not None and found.accumulation.is_scheduled
        UnitHooks(unit, modules, precision)

    def units_in(self, module: nn.Cell) -> list[Unit]:
        return units_in(module)

    def is_sharded(self, module: nn.Cell) -> bool:
        return bool(hooks_of(module))

    def name_of(self, module: nn.Cell) -> str:
        return type(module).__name__

    def native(
        self, module: nn.Cell, axes: DataAxes, precision: MixedPrecision, *, zero: int, prefetch: int
    ) -> nn.Cell:
        raise ArgumentError(
            "MindSpore has no FSDP2.", expected='engine="hyper_parallel"', got='engine="fsdp2" and a MindSpore cell'
        )


def _known_parameters() -> dict[int, tuple[Unit, UnitParameter]]:
    """All parameters that have units: shards, and what they were made of, which other cells may still hold."""
    found: dict[int, tuple[Unit, UnitParameter]] = {}
    for unit in ORDER.units():
        memory: Any = unit.memory
        if isinstance(memory, MindSporeUnitMemory):
            for parameter in memory.parameters:
                found[id(parameter.shard)] = unit, parameter
                given = parameter.given()
                if given is not None:
                    found[id(given)] = unit, parameter
    return found


def _check_device() -> None:
    if Devices.device_type() != "cpu":
        raise UnsupportedDeviceError(
            "Sharded data parallel on MindSpore is for the CPU.",
            expected="cpu",
            got=Devices.device_type(),
            do="Use PyTorch on this device.",
        )


def _check_is_plain(name: str, parameter: Parameter) -> None:
    if parameter.hooks():
        raise StateError(
            "A parameter has hooks, which its shard would not have.",
            where=name,
            do="Call `hp.fully_shard` first, and register hooks on the shards: these get the shard's gradient.",
        )
    if parameter.init is not None and not parameter.is_meta:  # which `hp.materialize` fills
        raise StateError(
            "A parameter was created without data, and is to be filled later.",
            where=name,
            do="Call `cell.init_parameters_data()` first.",
        )
    if parameter.dtype in (mindspore.float8_e4m3fn, mindspore.float8_e5m2):
        raise StateError("MindSpore's CPU cannot compute with this dtype.", got=str(parameter.dtype), where=name)


BACKEND: ShardingBackend = MindSporeSharding()
