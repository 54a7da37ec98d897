"""What the engine did, in numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class SwapStats:
    """Counted since the process started."""

    offloaded_bytes: int = 0
    loaded_bytes: int = 0
    num_offloads: int = 0
    num_loads: int = 0
    num_late_loads: int = 0  # not there yet when backward asked for them
    num_window_waits: int = 0  # how often compute was made to wait for an offload
    peak_in_flight_bytes: int = 0  # most bytes of sources held for copies under way
    kept_bytes: int = 0  # eligible, and left on the device
    kept: Counter[str] = field(default_factory=Counter)  # why -> how many

    def add(self, other: SwapStats) -> None:
        for each in fields(self):
            mine, theirs = getattr(self, each.name), getattr(other, each.name)
            setattr(self, each.name, max(mine, theirs) if each.name.startswith("peak") else mine + theirs)

    def as_dict(self) -> dict[str, Any]:
        return {**{each.name: getattr(self, each.name) for each in fields(self)}, "kept": dict(self.kept)}
