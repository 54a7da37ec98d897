"""What regions can do, and what they take of the host: a plan counts on the one, and its time on the other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Abilities:
    """What the regions of a framework can do. Both are False where a profile does not say.

    Attributes:
        loads_by_region: how much may be loaded ahead is set for the backward of each region, and not once for all
        turn_is_clear: the engine hears of the last region, so that none of its offloads is under way in the turn; see
            P4
    """

    loads_by_region: bool = False
    turn_is_clear: bool = False


@dataclass(frozen=True)
class HostCost:
    """What one region takes of a step beside the ops that it runs again: Python, where the device waits for the host.

    Attributes:
        region_ms: of a region in a plan that swaps; 0 where the device does not wait
        without_copies_ms: of one in a plan that swaps nothing, whose regions need not watch every op; None: nobody
            measured it
    """

    region_ms: float
    without_copies_ms: float | None = None
