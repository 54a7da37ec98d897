"""A tensor that autograd saved and the engine moves, as the `SwapTensor` that shows it.

Example: after `with AsyncSaveOnCpu() as block: loss = f(x)` the first swapped tensor is
`block.storage.swap_storage[0][0]`. Its `state` is where it is now. The four calls may hurry it along; backward does
what was not called.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from hyper_parallel._base.errors import StateError
from hyper_parallel.core.swap.device import Buffer
from hyper_parallel.core.swap.engine import SwapEngine
from hyper_parallel.core.swap.slot import Handle, Slot
from hyper_parallel.core.swap.states import SlotState


class Residual(Protocol):
    """What autograd keeps in place of the tensor; the frameworks' `saved_tensors` make it."""

    @property
    def engine(self) -> SwapEngine: ...

    @property
    def handle(self) -> Handle: ...

    def seen_in(self, buffer: Buffer) -> Any:
        """Return the tensor, over a buffer that has the contents of its storage."""


class SavedByAutograd:
    """One residual, held weakly: it lives and dies with its graph, whoever looks at it.

    No call raises because of the state: what was to be done is done already, or backward will do it.
    """

    __slots__ = ("_label", "_residual")

    def __init__(self, residual: Residual, label: object) -> None:
        self._residual = weakref.ref(residual)
        self._label = label

    @property
    def is_alive(self) -> bool:
        return self._residual() is not None

    @property
    def state(self) -> SlotState:
        return self._slot().state

    def wait_offload(self) -> None:
        self._living().engine.wait_offload(self._slot())

    def launch_load(self, copy_stream: Any) -> None:
        engine = self._living().engine
        engine.launch_early(self._slot(), None if copy_stream is None else engine.device.stream_of(copy_stream))

    def wait_load(self) -> None:
        self._living().engine.wait_loads([self._slot()])

    def value(self) -> Any:
        """Return the tensor, if it is on the device; a load that is under way is waited for."""
        residual, slot = self._living(), self._slot()
        if slot.state is SlotState.H2D:
            self.wait_load()
        buffer = slot.buffer if slot.source is None else slot.source
        if buffer is None:
            raise StateError(
                "The value is not on the device.",
                expected="state device, d2h or h2d",
                got=f"state {slot.state.value}",
                where=str(self._label),
                do="Call async_load() first.",
            )
        return residual.seen_in(buffer)

    def _slot(self) -> Slot:
        return self._living().handle.slot

    def _living(self) -> Residual:
        residual = self._residual()
        if residual is None:
            raise StateError(
                "The graph that saved this tensor is gone, and the tensor with it.",
                where=str(self._label),
                do="Look at it between forward and backward, or run backward with retain_graph=True.",
            )
        return residual
