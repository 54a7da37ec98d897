"""The errors that a handle raises when it is asked and cannot answer."""

from __future__ import annotations

from hyper_parallel._base.errors import StateError
from hyper_parallel.core.swap.slot import Slot


def changed_in_place(slot: Slot) -> StateError:
    return StateError(
        "A tensor saved for backward was changed in place before it was copied.",
        expected=f"version {slot.saved_version}",
        got=f"version {slot.changed}",
        where=str(slot.label),
        do="Replace the in-place call after it by one that makes a new tensor, or let the policy keep this tensor.",
    )


def not_loaded(slot: Slot, error: BaseException) -> StateError:
    return StateError(
        "A tensor saved for backward could not be brought back.",
        got=str(error).splitlines()[0] if str(error) else type(error).__name__,
        where=str(slot.label),
        do="Run the step again; look at the disk if it happens twice.",
    )
