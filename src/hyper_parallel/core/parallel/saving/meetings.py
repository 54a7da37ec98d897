"""The meetings of this process, counted: ranks that make the same calls find each other by the number.

A meeting that any rank has given up is passed over by all, so that ranks that were apart come together again.
"""

from __future__ import annotations

import os
from typing import Any

from hyper_parallel._base.errors import ArgumentError, StateError, describe
from hyper_parallel.core.parallel.saving.backend import SavingBackend
from hyper_parallel.core.parallel.saving.meeting import Meeting, Store, prefix_of

__all__ = ["new_meeting"]

_last: list[Any] = [None, 0]  # the store of the world, and the number of its last meeting


def new_meeting(call: str, backend: SavingBackend, path: object, timeout: object) -> Meeting:
    """Begin the next meeting of all ranks; of this process alone where no communication was started."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ArgumentError("`timeout` is a time in seconds.", expected="more than 0", got=describe(timeout))
    rank, num_ranks = backend.rank(), backend.num_ranks()
    store: Store | None = None
    held: object = None
    number = 0
    if num_ranks > 1:
        found = backend.store()
        if found is None:
            raise StateError(
                f"`{call}` needs the store at which ranks meet, and there is none.",
                expected="communication that was started by `init_process_group()`",
                where=f"rank {rank} of {num_ranks}",
            )
        store, held = found
        if _last[0] is not store:
            _last[:] = [store, 0]
        number = _last[1] + 1
        while int(store.add(f"{prefix_of(number)}over", 0)) > 0:
            number += 1
        _last[1] = number
    where = os.fspath(path) if isinstance(path, (str, os.PathLike)) else describe(path)
    return Meeting(call, store, rank, num_ranks, number, float(timeout), str(where), held)
