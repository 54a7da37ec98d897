"""Values of a region that go through the swap engine."""

from __future__ import annotations

from typing import Any

from mindspore import Tensor

from hyper_parallel.platform.mindspore.regions.saved_tensors import Swapped, swapped
from hyper_parallel.platform.mindspore.swap import engines as swap_engines
from hyper_parallel.platform.mindspore.swap.storages import Look, storage_bytes


class RegionSwap:
    """The engine and group of one region call."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._places: dict[str, Any] = {}

    def swap(self, tensor: Tensor, what: str) -> Swapped | None:
        """Hand a value to the engine of its device; None if it is too small, or nothing there can be swapped."""
        place = self.place(str(tensor.device))
        if place is None or storage_bytes(tensor) < place[2]:
            return None
        engine, group, _ = place
        return swapped(engine, group, tensor, lambda: f"{what}, {Look.of(tensor)}")

    def place(self, device: str) -> Any:
        """Engine, group and smallest size on a device; None if nothing there can be swapped."""
        if device not in self._places:
            found = swap_engines.engine_of(device)
            self._places[device] = None if found is None else (found[0], found[0].new_group(self._key), found[1])
        return self._places[device]

    def expect(self, slots: list[Any]) -> None:
        """Backward will ask for these first, in this order: replay needs them."""
        for place in self._places.values():
            if place is not None:
                place[0].expect(place[1], slots)
