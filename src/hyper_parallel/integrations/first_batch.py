"""The batch that a plan is made with: the first of a loader, without a trace in what is drawn afterwards."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.platform import platform_of
from hyper_parallel.platform.opaque import Module

__all__ = ["first_batch", "generators_kept"]


@contextlib.contextmanager
def generators_kept(model: Module) -> Iterator[None]:
    """Bring Python's, NumPy's and the framework's random generators back to where they were, when the block ends."""
    platform = platform_of(model)
    states = random.getstate(), np.random.get_state(), platform.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        platform.set_rng_state(states[2])


def first_batch(loader: Any, model: Module, where: str) -> Any:
    """Return what the loader gives first. Shuffling and augmentation draw afterwards what they would have drawn.

    Raises:
        ValueError: there is no loader, or it is empty.
    """
    if loader is not None:
        with generators_kept(model):
            for batch in loader:
                return batch
    raise ArgumentError(
        "A memory plan is made with the first batch, and there is none.",
        expected="a loader with at least one batch",
        got="none" if loader is None else "an empty one",
        where=where,
        do="Give the trainer its training data.",
    )
