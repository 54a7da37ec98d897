"""Values of a region that go through the swap engine."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.core.swap.slot import Handle
from hyper_parallel.platform.torch.regions.local_parts import local_tensor, version_of
from hyper_parallel.platform.torch.regions.saved_tensors import living_slot, note_slot, own_part
from hyper_parallel.platform.torch.regions.saved_values import Saved
from hyper_parallel.platform.torch.regions.values import Value
from hyper_parallel.platform.torch.swap import engines as swap_engines
from hyper_parallel.platform.torch.swap.device import flat


class Swapped:
    """A value that the engine has. Whoever reads it does so with a handle of its own, so that the engine knows who still will."""

    __slots__ = ("_engine", "_handle", "slot")

    def __init__(self, engine: Any, slot: Any, group: Any) -> None:
        self._engine = engine
        self.slot = slot
        self._handle = Handle(slot, group)

    def another(self) -> Swapped:
        return Swapped(self._engine, self.slot, self._handle.group)

    def is_changed(self) -> bool:
        self.slot.look_for_change()
        return self.slot.changed is not None

    def memory(self) -> torch.UntypedStorage:
        storage: torch.UntypedStorage = self._engine.acquire(self._handle).untyped_storage()
        return storage


class Arrival:
    """Tells the engine of a region that swaps nothing, or not what backward asks for first: how much it holds, and that backward has got to it.

    Without the one, memory in flight would be there beside all that the last region holds. Without the other, the regions before would be heard of
    only when backward has reached them, which is too late to load for them.
    """

    __slots__ = ("_counted", "_engine", "_group")

    def __init__(self, engine: Any, group: Any) -> None:
        self._engine = engine
        self._group = group
        self._counted: set[int] = set()  # numbers of values: the record has them as long as the forward runs

    def hold(self, value: Value) -> None:
        """Of the region's forward: a value stays until backward, or until the forward is over."""
        if id(value) not in self._counted:
            self._counted.add(id(value))
            self._engine.keep(self._group, value.num_bytes)

    def note(self) -> None:
        self._engine.arrive(self._group)

    def note_replay(self) -> None:
        """The region runs again. If it swapped anything, what is asked for then tells it."""
        if not self._group.slots:
            self._engine.arrive(self._group)

    def end_forward(self) -> None:
        self._counted.clear()
        self._engine.end_forward(self._group)


class RegionSwap:
    """The engines and groups of one region call, one per device. `ahead_bytes`, `ends_forward`: of the groups."""

    def __init__(self, key: str, ahead_bytes: int | None = None, *, ends_forward: bool = False) -> None:
        self._key = key
        self._ends_forward = ends_forward
        self._ahead_bytes = ahead_bytes
        self._places: dict[torch.device, Any] = {}
        self._arrivals: dict[torch.device, Arrival] = {}
        self._engines: dict[torch.device, Any] = {}  # those in use when it was first asked about them
        self.no_engine_on: torch.device | None = None  # one without an engine: nobody need be told of what stays there

    def swap(self, saved: Saved, num_bytes: int, what: object) -> Swapped | None:
        """Hand a value to the engine of its device; None if it is too small, or nothing there can be swapped."""
        alias = local_tensor(saved.alias)
        place = self.place(alias.device)
        if place is None or num_bytes < place[2]:
            return None
        engine, group, _ = place
        part = own_part(alias)
        slot = living_slot(engine, alias, part)
        if slot is None:
            slot = engine.save(flat(alias), num_bytes, group, _Label(what, alias), _Version(alias))
            note_slot(engine, alias, part, slot)
        return Swapped(engine, slot, group)

    def place(self, device: torch.device) -> Any:
        """Engine, group and smallest size on a device; None if nothing there can be swapped."""
        if device not in self._places:
            self._places[device] = self._open(device)
        return self._places[device]

    def arrival(self, device: torch.device) -> Arrival | None:
        """What tells the engine of a residual that is not swapped; None while this forward has swapped nothing on its device."""
        arrival = self._arrivals.get(device)
        if arrival is None:
            if device not in self._engines:  # once: every residual of the region asks
                self._engines[device] = swap_engines.engine_in_use(device)
            found = self._engines[device]
            if found is None:
                self.no_engine_on = device
            place = None if found is None or not found.has_groups() else self.place(device)
            if place is not None:
                arrival = self._arrivals[device] = Arrival(place[0], place[1])
        return arrival

    def expect(self, slots: list[Any]) -> None:
        """Backward will ask for these first, in this order: replay needs them."""
        for place in self._places.values():
            if place is not None:
                place[0].expect(place[1], slots)

    def end_forward(self) -> None:
        """The region's forward is over."""
        for arrival in self._arrivals.values():
            arrival.end_forward()

    def note_replay(self) -> None:
        """Backward has got to the region, which runs again."""
        for arrival in self._arrivals.values():
            arrival.note_replay()

    def note_replayed(self) -> None:
        """The region has run again, and all that its backward needs is there: a high point that the engine would not see otherwise."""
        for place in self._places.values():
            if place is not None:
                place[0].arrive(place[1])

    def _open(self, device: torch.device) -> Any:
        found = swap_engines.engine_of(device)
        if found is None:
            return None
        engine, min_bytes = found
        self._engines[device] = engine
        self.no_engine_on = None
        group = engine.new_group(self._key, self._ahead_bytes, ends_forward=self._ends_forward)
        return engine, group, min_bytes


class _Version:
    """Reads the version of a tensor; holds an alias of it until the engine drops the source."""

    __slots__ = ("_alias",)

    def __init__(self, alias: torch.Tensor) -> None:
        self._alias = alias

    def __call__(self) -> int:
        return version_of(self._alias)


class _Label:
    """Names a value in errors; put into words only when one is raised."""

    __slots__ = ("_dtype", "_shape", "_what")

    def __init__(self, what: object, tensor: torch.Tensor) -> None:
        self._what = what
        self._dtype = tensor.dtype
        self._shape = tensor.shape

    def __str__(self) -> str:
        return f"{self._what}, {str(self._dtype).removeprefix('torch.')}{list(self._shape)}"
