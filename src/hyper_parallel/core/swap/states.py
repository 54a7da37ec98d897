"""The states of a slot and the changes between them, as data."""

from __future__ import annotations

from enum import Enum

from hyper_parallel._base.errors import StateError


class SlotState(Enum):
    """Where the contents of a storage are."""

    DEVICE = "device"  # on the device: the source that was kept, or a buffer that was loaded
    D2H = "d2h"  # on the device, and a copy to a block is under way
    HOST = "host"  # in a block of host memory, nothing on the device
    DISK = "disk"  # in a block of a file, nothing on the device
    H2D = "h2d"  # in a block, and a copy to a buffer is under way
    NON_TENSOR = "non_tensor"  # a value without a storage: it never moves


class Change(Enum):
    """What happens to a slot."""

    LAUNCH_OFFLOAD = "launch the offload"
    FINISH_OFFLOAD = "finish the offload"
    FAIL_OFFLOAD = "fail the offload"
    LAUNCH_LOAD = "launch the load"
    FINISH_LOAD = "finish the load"
    DROP_BUFFER = "drop the buffer"


# Without an entry a change is illegal. HOST stands for wherever the block is: `after` answers DISK for a block of a
# file.
TRANSITIONS: dict[tuple[SlotState, Change], SlotState] = {
    (SlotState.DEVICE, Change.LAUNCH_OFFLOAD): SlotState.D2H,
    (SlotState.D2H, Change.FINISH_OFFLOAD): SlotState.HOST,
    (SlotState.D2H, Change.FAIL_OFFLOAD): SlotState.DEVICE,
    (SlotState.HOST, Change.LAUNCH_LOAD): SlotState.H2D,
    (SlotState.DISK, Change.LAUNCH_LOAD): SlotState.H2D,
    (SlotState.H2D, Change.FINISH_LOAD): SlotState.DEVICE,
    (SlotState.H2D, Change.DROP_BUFFER): SlotState.HOST,
    (SlotState.DEVICE, Change.DROP_BUFFER): SlotState.HOST,
}


def after(state: SlotState, change: Change, *, label: object, on_disk: bool = False) -> SlotState:
    """Return the state after a change; raise StateError where the table has none."""
    new = TRANSITIONS.get((state, change))
    if new is None:
        legal = sorted(s.value for s, c in TRANSITIONS if c is change)
        raise StateError(
            f"Cannot {change.value} now.",
            expected="state " + " or ".join(legal),
            got=f"state {state.value}",
            where=str(label),
        )
    return SlotState.DISK if on_disk and new is SlotState.HOST else new
