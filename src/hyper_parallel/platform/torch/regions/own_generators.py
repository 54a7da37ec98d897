"""Two threads that draw from the same generators at the same time, one of which recomputes regions: each goes on with its own numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel._base.errors import StateError
from hyper_parallel.platform.torch.regions.op_traits import traits_of
from hyper_parallel.platform.torch.regions.random_state import OwnGenerators, drawing


class _DrawingMode(TorchDispatchMode):
    """Ops that draw, outside of regions as well, do it under the lock, and so from this thread's own generators."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not traits_of(func).is_random:
            return func(*args, **(kwargs or {}))
        _refuse_recomputation_by_pytorch(func)
        with drawing:
            return func(*args, **(kwargs or {}))


def _refuse_recomputation_by_pytorch(func: object) -> None:
    """PyTorch's checkpoint sets the default generators for as long as it recomputes, and knows nothing of a lock."""
    frame = sys._getframe()
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        if frame.f_code.co_name in _RECOMPUTING and frame.f_code.co_filename == _CHECKPOINT_FILE:
            raise StateError(
                "PyTorch's checkpoint cannot recompute random numbers while the other side of an overlap may draw.",
                expected="a region of hyper_parallel, which recomputes its own numbers",
                got=f"{func} in a recomputation of torch.utils.checkpoint",
                do="Use `hp.checkpoint` or `hp.checkpoint_wrapper` for what draws, or preserve_rng_state=False and no dropout.",
            )


_RECOMPUTING = ("recompute_fn", "backward")
_CHECKPOINT_FILE = torch.utils.checkpoint.__file__


@contextmanager
def own_generators(*, are_kept: bool) -> Iterator[None]:
    """A block in which the generators of this thread go on from where they are now, whatever others draw or set meanwhile.

    `are_kept`: afterwards they are everybody's. Without regions that draw nobody sets a generator, and nothing is done: a mode costs microseconds per op.
    """
    if not drawing.is_used_by_regions:
        yield
        return
    with drawing:
        own = OwnGenerators()
    before = drawing.set_own(own)
    try:
        with _DrawingMode():
            yield
    finally:
        drawing.set_own(before)
        if are_kept:
            with drawing:
                own.keep()
