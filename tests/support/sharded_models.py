"""Modules of a simulated framework, with units: what a model of `simulated_sharding` is made of.

A body is a list of steps. `Compute` reads the parameters of a unit and is a node of the graph; `Call` runs an inner
module; `Region` runs steps again in backward. `UnitHooks` of the real frameworks is `Module.__call__` here.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from support.simulated_autograd import Autograd, Node
from support.simulated_units import Rank, SimulatedUnitMemory


class StopRerunError(Exception):
    """Everything that was asked for has been made again."""


class Step(Protocol):
    def __call__(self, world: World, value: Node | None) -> Node | None: ...


@dataclass
class World:
    """One rank's model in use.

    Attributes:
        order: the `Order` under test.
        uses: whether this rank has a gradient for a parameter; asked once for each node.
        tick: called before each computation of a forward; tests raise here.
        executed: tokens of the gradients that backward has left.
    """

    autograd: Autograd
    rank: Rank
    order: Any
    uses: Callable[[str], bool]
    tick: Callable[[], None]
    check: Callable[[], None]
    executed: list[tuple[str, int]] = field(default_factory=list)
    regions: list[Region.Forward] = field(default_factory=list)
    computes_until_stop: int | None = None


@dataclass
class Module:
    name: str
    unit: Any  # or None
    body: Sequence[Step] = ()
    hides_outputs: bool = False  # in an object that no hook looks into
    num_outputs: int = 1  # which backward comes to one after the other

    def __call__(self, world: World, value: Node | None) -> Node | None:
        if self.unit is None:
            return self._run(world, value)
        order, unit, now = world.order, self.unit, world.autograd.pass_id
        order.before_forward(unit, now, sys._getframe())
        world.check()
        try:
            output = self._run(world, value)
        except Exception:  # what is none, such as Ctrl-C, is told to no hook
            order.after_forward(unit, None, now)
            world.check()
            raise
        if not world.autograd.records:
            order.after_forward(unit, None, now)
            world.check()
            return None
        outputs = [] if self.hides_outputs or output is None or output is value else [output]
        may_follow = outputs or value is not None or unit.memory.is_trained
        call = unit.add_call(is_rerun=now is not None) if may_follow else None
        if call is not None:
            for each in outputs * self.num_outputs:
                each.hooks.append(_BeforeBackward(world, call))
            if value is not None and not value.is_leaf:
                value.hooks.append(_AfterBackward(world, call))
            unit.memory.is_followed |= not outputs
        order.after_forward(unit, call, now, is_seen=bool(outputs))
        world.check()
        return output

    def _run(self, world: World, value: Node | None) -> Node | None:
        for step in self.body:
            value = step(world, value)
        return value


class _BeforeBackward:
    def __init__(self, world: World, call: Any) -> None:
        self._world, self._call = world, call

    def __call__(self) -> None:
        self._world.order.before_backward(self._call, self._world.autograd.pass_id)
        self._world.check()


class _AfterBackward:
    def __init__(self, world: World, call: Any) -> None:
        self._world, self._call = world, weakref.ref(call)

    def __call__(self) -> None:
        call = self._call()
        if call is not None:
            self._world.order.after_backward(call, self._world.autograd.pass_id)
            self._world.check()


@dataclass
class Compute:
    """Use the parameters of a unit."""

    unit: Any

    def __call__(self, world: World, value: Node | None) -> Node | None:
        world.tick()
        if world.computes_until_stop is not None:
            world.computes_until_stop -= 1
            if world.computes_until_stop < 0:
                raise StopRerunError
        memory: SimulatedUnitMemory = self.unit.memory
        assert memory.is_shown, f"{memory.name}: modules compute with the shards"
        version = memory.version()
        memory.compute(version)
        if not world.autograd.records or (value is None and not memory.is_trained):
            return None
        region = world.regions[-1] if world.regions else None
        node = world.autograd.node([value], lambda: None)
        used = [name for name in memory.parameters if world.uses(name)] if memory.is_trained else []
        unit, number = self.unit, node.number

        def backward() -> None:
            if region is not None:
                region.run_again()
            memory.compute(version)
            for name in used:
                memory.leave(name, number)
                world.executed.append((name, number))
                if memory.is_followed:
                    world.order.gradient_came(unit, world.autograd.pass_id)
                    world.check()

        node.backward = backward
        return node


@dataclass
class Call:
    module: Module

    def __call__(self, world: World, value: Node | None) -> Node | None:
        return self.module(world, value)


@dataclass
class Region:
    """Steps that run again in backward.

    `in_own_pass`: nothing is recorded in forward; backward records anew, and runs a backward of its own. Else what was
    recorded stays, and the first node of it that runs backward begins the rerun, which may stop half way.
    """

    steps: Sequence[Step]
    in_own_pass: bool
    stops_after: int | None = None  # computations

    def __call__(self, world: World, value: Node | None) -> Node | None:
        if not world.autograd.records:
            return self._run(world, value)
        if self.in_own_pass:
            return self._in_own_pass(world, value)
        if value is None:
            value = world.autograd.leaf()
        world.regions.append(Region.Forward(self, world, value))
        try:
            return self._run(world, value)
        finally:
            world.regions.pop()

    def _run(self, world: World, value: Node | None) -> Node | None:
        for step in self.steps:
            value = step(world, value)
        return value

    def _in_own_pass(self, world: World, value: Node | None) -> Node:
        with world.autograd.recording(False):
            self._run(world, value)

        def backward() -> None:
            with world.autograd.recording(True):
                made = self._run(world, world.autograd.leaf())
            assert made is not None
            world.autograd.backward(made)

        return world.autograd.node([value if value is not None else world.autograd.leaf()], backward)

    class Forward:
        """One forward of a region."""

        def __init__(self, region: Region, world: World, value: Node) -> None:
            self._region, self._world, self._value = region, world, value
            self._has_run_again = False

        def run_again(self) -> None:
            if self._has_run_again:
                return
            self._has_run_again = True
            world, region = self._world, self._region
            before, world.regions = world.regions, []
            world.computes_until_stop, outer = region.stops_after, world.computes_until_stop
            try:
                with world.autograd.recording(True):
                    region._run(world, self._value)
            except StopRerunError:
                pass
            finally:
                world.regions, world.computes_until_stop = before, outer
