"""What the engine did, in numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class SwapStats:
    """Counted since the process started or `reset` was called; read it through `SwapManager().stats()`."""

    offloaded_bytes: int = 0
    loaded_bytes: int = 0
    num_offloads: int = 0
    num_loads: int = 0
    num_late_loads: int = 0  # not there yet when backward asked for them
    num_window_waits: int = 0  # how often compute was made to wait for an offload
    peak_in_flight_bytes: int = 0  # most bytes of sources held for copies under way
    kept_bytes: int = 0  # eligible, and left on the device
    kept: Counter[str] = field(default_factory=Counter)  # why -> how many

    def as_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "kept": dict(self.kept)}
