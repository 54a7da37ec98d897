"""The meetings of this process, counted: ranks that make the same calls find each other by the number."""

from __future__ import annotations

import itertools
import os
from hyper_parallel._base.errors import ArgumentError, StateError, describe
from hyper_parallel.core.parallel.saving.backend import SavingBackend
from hyper_parallel.core.parallel.saving.meeting import Meeting, Store

__all__ = ["new_meeting"]

_numbers = itertools.count(1)


def new_meeting(call: str, backend: SavingBackend, path: object, timeout: object) -> Meeting:
    """Begin the next meeting of all ranks; of this process alone where no communication was started."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ArgumentError("`timeout` is a time in seconds.", expected="more than 0", got=describe(timeout))
    number, rank, num_ranks = next(_numbers), backend.rank(), backend.num_ranks()
    store: Store | None = None
    if num_ranks > 1:
        store = backend.store()
        if store is None:
            raise StateError(
                f"`{call}` needs the store at which ranks meet, and there is none.",
                expected="communication that was started by `init_process_group()`",
                where=f"rank {rank} of {num_ranks}",
            )
    where = os.fspath(path) if isinstance(path, (str, os.PathLike)) else describe(path)
    return Meeting(call, store, rank, num_ranks, number, float(timeout), str(where))
