"""What sharded data parallel asks of a framework, beside the memory of a unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.parallel.sharding.memory import UnitMemory
from hyper_parallel.core.parallel.sharding.precision import MixedPrecision
from hyper_parallel.core.parallel.sharding.unit import Unit
from hyper_parallel.platform.opaque import Module

__all__ = ["DataAxes", "ShardingBackend"]


@dataclass(frozen=True)
class DataAxes:
    """The axes of a mesh over which a batch is cut: parameters are cut along `axis`, copied along `replicate_axis`."""

    mesh: DeviceMesh
    axis: str
    replicate_axis: str | None


class ShardingBackend(Protocol):
    """A framework's part."""

    folder: ClassVar[str] = "parallel.sharding.backend"

    def memory(
        self, modules: Sequence[Module], axes: DataAxes, precision: MixedPrecision
    ) -> tuple[UnitMemory, tuple[Unit, ...]]:
        """Turn the modules' parameters into shards, but for those that other units have already.

        Returns: their memory, and the units that have parameters which these modules use as well.
        """

    def follow(self, unit: Unit, modules: Sequence[Module], precision: MixedPrecision) -> None:
        """Have the unit told of forwards and backwards of the modules from now on."""

    def units_in(self, module: Module) -> list[Unit]:
        """List the units of a module and of those in it, the outer ones first."""

    def is_sharded(self, module: Module) -> bool:
        """Whether this very module is one of a unit's."""

    def name_of(self, module: Module) -> str:
        """Name a module for errors."""

    def native(self, module: Module, axes: DataAxes, precision: MixedPrecision, *, zero: int, prefetch: int) -> Module:
        """Let the framework's own implementation shard the module."""
