"""Sharded data parallel's PyTorch part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from hyper_parallel._base.errors import ArgumentError, StateError
from hyper_parallel.core.parallel.sharding.backend import DataAxes, ShardingBackend
from hyper_parallel.core.parallel.sharding.order import ORDER
from hyper_parallel.core.parallel.sharding.precision import MixedPrecision
from hyper_parallel.core.parallel.sharding.unit import Unit
from hyper_parallel.platform.torch.dtypes import to_dtype
from hyper_parallel.platform.torch.parallel.sharding.hooks import UnitHooks, units_in
from hyper_parallel.platform.torch.parallel.sharding.memory import TorchUnitMemory
from hyper_parallel.platform.torch.parallel.sharding.parameters import (
    UnitParameter,
    found_parameters,
    sharded_spec,
)


class TorchSharding:
    """See `ShardingBackend`."""

    folder: ClassVar[str] = ShardingBackend.folder

    def memory(
        self, modules: Sequence[nn.Module], axes: DataAxes, precision: MixedPrecision
    ) -> tuple[TorchUnitMemory, tuple[Unit, ...]]:
        names = [""] if len(modules) == 1 else [f"{number}" for number in range(len(modules))]
        own, given, borrowed = [], [], []
        device, known = _device(axes), _known_parameters()
        for name, parameter, places in found_parameters(modules, names, self.is_sharded):
            if id(parameter) not in known:
                _check_has_no_hooks(name, parameter)
                spec, part = sharded_spec(name, parameter, axes.mesh, axes.axis)
                own.append(UnitParameter(name, parameter, places, spec, part))
                given.append(parameter)
                continue
            unit, owner = known[id(parameter)]
            added = [place for place in places if not any(place.is_same(other) for other in owner.places)]
            unit.memory.add_places(owner, added)
            borrowed.append(unit)
        made = TorchUnitMemory(_name(modules), own, given, axes.mesh, axes.axis, axes.replicate_axis, precision, device)
        made.show_shards()
        for module in modules:
            _move_buffers(module, device)
        return made, tuple(dict.fromkeys(borrowed))

    def follow(self, unit: Unit, modules: Sequence[nn.Module], precision: MixedPrecision) -> None:
        UnitHooks(unit, modules, precision)

    def units_in(self, module: nn.Module) -> list[Unit]:
        return units_in(module)

    def is_sharded(self, module: nn.Module) -> bool:
        holders = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
        return any(isinstance(hooks, UnitHooks) and hooks.unit is not None for hooks in holders)

    def name_of(self, module: nn.Module) -> str:
        return type(module).__name__

    def native(
        self, module: nn.Module, axes: DataAxes, precision: MixedPrecision, *, zero: int, prefetch: int
    ) -> nn.Module:
        from torch.distributed.fsdp import MixedPrecisionPolicy
        from torch.distributed.fsdp import fully_shard as native

        if zero == 1:
            raise ArgumentError(
                'engine="fsdp2" sends gradients after each microbatch.', expected="zero=2 or zero=3", got="zero=1"
            )
        names = [name for name in (axes.replicate_axis, axes.axis) if name is not None]
        dtypes = [None if name is None else to_dtype(name) for name in vars(precision).values()]
        native(
            module,
            mesh=axes.mesh[tuple(names)].to_torch(),
            reshard_after_forward=zero == 3,
            mp_policy=MixedPrecisionPolicy(*dtypes),
        )
        return module


def _known_parameters() -> dict[int, tuple[Any, UnitParameter]]:
    """All parameters that have units: shards, and what they were made of, which other modules may still hold."""
    found: dict[int, tuple[Any, UnitParameter]] = {}
    for unit in ORDER.units():
        memory: Any = unit.memory
        for parameter in memory.parameters:
            found[id(parameter.shard)] = unit, parameter
            given = parameter.given()
            if given is not None:
                found[id(given)] = unit, parameter
    return found


def _device(axes: DataAxes) -> torch.device:
    kind = axes.mesh.device_type
    if kind == "cpu" or not torch.accelerator.is_available():
        return torch.device(kind)
    return torch.device(kind, torch.accelerator.current_device_index())


def _name(modules: Sequence[nn.Module]) -> str:
    return ", ".join(type(module).__name__ for module in modules)


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for inner in module.modules():
        for name, buffer in inner._buffers.items():
            if buffer is not None and buffer.device.type != "meta":
                inner._buffers[name] = buffer.to(device)


def _check_has_no_hooks(name: str, parameter: nn.Parameter) -> None:
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise StateError(
            "A parameter has hooks, which its shard would not have.",
            where=name,
            do="Call `hp.fully_shard` first, and register hooks on the shards: these get the shard's gradient.",
        )


BACKEND: ShardingBackend = TorchSharding()
