"""One tensor that its owner moves by hand, or (`SwapTensor.saved`) one that autograd saved and the engine moves.

The states are those of a slot (`states.py`), and here they change by the owner's calls alone. Underneath, the engine
may be ahead: it drops a source as soon as its copy is done, while a `SwapTensor` holds the tensor until `wait_offload`.

What cannot be swapped (a parameter, a CPU tensor without a disk directory, a storage that no tier has room for) goes
through the same states with its value kept, so that a program behaves the same wherever it runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol, cast, final

from hyper_parallel._base.errors import ArgumentTypeError, StateError
from hyper_parallel.core.swap.device import Buffer, Event, Stream
from hyper_parallel.core.swap.engine import SwapEngine
from hyper_parallel.core.swap.saved_by_autograd import Residual, SavedByAutograd
from hyper_parallel.core.swap.slot import Handle, Slot
from hyper_parallel.core.swap.states import Change, SlotState, after
from hyper_parallel.platform import platform_of
from hyper_parallel.platform.opaque import Module, Tensor
from hyper_parallel.platform.selection import backend

# In each state one of the calls is legal; it is what an error tells to call.
_NEXT = {
    SlotState.DEVICE: "async_offload()",
    SlotState.D2H: "wait_offload()",
    SlotState.HOST: "async_load()",
    SlotState.DISK: "async_load()",
    SlotState.H2D: "wait_load()",
}


class Parts(NamedTuple):
    """What moving a tensor needs of it."""

    engine: SwapEngine
    source: Buffer  # the whole storage; leads to no autograd node
    num_bytes: int
    key: int  # the same for all living tensors of one storage, and for them only
    rebuild: Callable[[Buffer], Any]  # the tensor again, over another buffer; holds nothing of this one


class Held(Protocol):
    """A tensor without its graph; made by `ByHandBackend.hold`."""

    value: Any
    stream: Any  # the framework's current one when it was held; None where there are none

    def read_version(self) -> int:
        """Return how often the storage was changed in place."""

    def parts(self) -> Parts | None:
        """Return what moving the tensor needs; None if it cannot be swapped."""


class ByHandBackend(Protocol):
    """What moves by hand ask of a framework."""

    folder: ClassVar[str] = "compat.by_hand"

    def hold(self, tensor: Tensor) -> Held:
        """Hold the tensor without its graph, on the current stream."""

    def hook_order(self, first: Module, second: Module) -> None:
        """Have `layer_order` told when the two begin and when the backward of `second` does.

        To call it again changes nothing.
        """


class _Moved(NamedTuple):
    """What is left of a tensor that was copied."""

    engine: SwapEngine
    handle: Handle
    rebuild: Callable[[Buffer], Any]


@final
class SwapTensor:
    """A tensor that moves when it is told to.

    `async_offload` launches its copy to slower memory; `wait_offload` makes the current stream wait for it and lets go
    of the tensor; `async_load` launches the way back; `wait_load` makes the current stream wait for that. A value that
    is no tensor never moves, and the four calls do nothing to it. Make it on the stream that the tensor's memory was
    allocated on.

    It holds the tensor without its graph: `get_val` gives a value that requires no gradient.

    Args:
        tensor: what to move.
        label: names it in errors.

    Example:
        >>> import torch
        >>> activation = SwapTensor(torch.ones(3), "layers.0")
        >>> activation.async_offload()
        >>> activation.wait_offload()
        >>> activation.state.value
        'host'
        >>> activation.async_load()
        >>> activation.wait_load()
        >>> activation.get_val()
        tensor([1., 1., 1.])
    """

    # Invariants, with `held` for `_held is not None` and `moved` for `_moved is not None`:
    #     state is DEVICE               ->  held and not moved
    #     state is D2H                  ->  held
    #     state in (HOST, DISK, H2D)    ->  held != moved      (held: it was kept)
    __slots__ = (
        "__weakref__",
        "_backend",
        "_changed",
        "_held",
        "_kept_since",
        "_lock",
        "_moved",
        "_saved",
        "_saved_version",
        "_state",
        "_value",
        "label",
    )

    def __init__(self, tensor: Tensor, label: object) -> None:
        self.label = label
        self._lock = threading.Lock()
        self._value: Any = None  # of a value that is no tensor
        self._held: Held | None = None
        self._moved: _Moved | None = None
        # Of a value that was to move and stays: what came before the offload that did not happen. Whoever waits for the
        # load comes after it, on any stream, as it would have if the value had moved (O1, O6).
        self._kept_since: tuple[SwapEngine, list[Event]] | None = None
        self._changed: int | None = (
            None  # the version that was found when the tensor was let go of, if it was another one
        )
        self._saved_version = 0
        self._saved: SavedByAutograd | None = None  # then nothing else here is used but the label
        self._backend = _backend_of(tensor)
        if self._backend is None:
            self._value = tensor
            self._state = SlotState.NON_TENSOR
        else:
            self._hold(tensor)
            self._state = SlotState.DEVICE

    @classmethod
    def saved(cls, residual: Residual, label: str) -> SwapTensor:
        """Make what shows a tensor that autograd saved. It moves by itself: the four calls only hurry it along."""
        tensor = cls(None, label)
        tensor._saved = SavedByAutograd(residual, label)
        return tensor

    @property
    def moves_by_itself(self) -> bool:
        return self._saved is not None

    @property
    def state(self) -> SlotState:
        """Tell where the value is, as far as the calls so far say; of what moves by itself, where it is."""
        return self._state if self._saved is None else self._saved.state

    def async_offload(self, copy_stream: object = None) -> None:
        """Launch the copy to slower memory. `copy_stream`: in place of the engine's own; means nothing on the CPU."""
        self._launch_offload(copy_stream, {})

    def wait_offload(self) -> None:
        """Make the current stream wait for the copy, and let go of the tensor.

        Its memory is free if nobody else holds it.
        """
        if self._saved is not None:
            self._saved.wait_offload()
            return
        with self._lock:
            self._next(Change.FINISH_OFFLOAD)
            if self._moved is not None:
                slot = self._moved.handle.slot
                self._moved.engine.wait_offload(slot)
                if slot.source is not None:
                    engine = self._moved.engine
                    self._kept_since = engine, [engine.device.current_stream().record_event()]
                    self._moved = None  # the copy failed: the value stays
                else:
                    self._changed = self._new_version()
                    self._held = None
            self._state = self._next(Change.FINISH_OFFLOAD)

    def async_load(self, copy_stream: object = None) -> None:
        """Launch the copy back to the device. `copy_stream`: as in `async_offload`.

        Raises:
            MemoryError: there is no device memory for it; nothing was launched.
        """
        if self._saved is not None:
            self._saved.launch_load(copy_stream)
            return
        with self._lock:
            self._launch_load(copy_stream)

    def wait_load(self) -> None:
        """Make the current stream wait for the load; then `get_val` has the value.

        Raises:
            RuntimeError: the tensor was changed in place while it was held; or the disk did not give it back, then
                `async_load` tries again.
        """
        if self._saved is not None:
            self._saved.wait_load()
            return
        with self._lock:
            new = self._next(Change.FINISH_LOAD)
            self._check_unchanged()
            if self._moved is not None:
                engine, handle, rebuild = self._moved
                try:
                    buffer = engine.acquire(handle)
                except StateError:
                    self._state = self._next(Change.DROP_BUFFER)
                    raise
                # From here on the memory is that of the tensor alone. The block goes back with the slot (O3).
                self._hold(rebuild(buffer))
                self._moved = None
            elif self._kept_since is not None:
                engine, events = self._kept_since
                for event in events:
                    engine.device.current_stream().wait_event(event)
                self._kept_since = None
            self._state = new

    def get_val(self) -> Any:
        """Return the value, where it is on the device: before `wait_offload`, and after `wait_load`.

        Raises:
            RuntimeError: it is elsewhere, or it was changed in place while it was held.
        """
        if self._saved is not None:
            return self._saved.value()
        with self._lock:
            if self._state is SlotState.NON_TENSOR:
                return self._value
            if self._state not in (SlotState.DEVICE, SlotState.D2H) or self._held is None:
                before = "" if self._state is SlotState.H2D else "async_load() and "
                raise StateError(
                    "The value is not on the device.",
                    expected="state device or d2h",
                    got=f"state {self._state.value}",
                    where=str(self.label),
                    do=f"Call {before}wait_load() first.",
                )
            self._check_unchanged()
            return self._held.value

    def __repr__(self) -> str:
        is_gone = self._saved is not None and not self._saved.is_alive
        return f"<SwapTensor {self.label!s}: {'gone' if is_gone else self.state.value}>"

    # -- for a `Storage`, which moves many ----------------------------------------------------------------------------

    def _check_can(self, change: Change) -> None:
        """Raise if the change is illegal now."""
        self._next(change)

    def _launch_offload(self, copy_stream: object, moved: dict[int, Slot | None]) -> None:
        """Launch the copy, as `async_offload`.

        `moved` has what was launched in the same breath, by storage: a storage moves once, however many look at it.
        """
        with self._lock:
            new = self._next(Change.LAUNCH_OFFLOAD)
            parts = None if self._held is None else self._held.parts()
            if parts is not None:
                if parts.key not in moved:
                    moved[parts.key] = self._launch(parts, copy_stream)
                slot = moved[parts.key]
                if slot is not None:
                    self._moved = _Moved(parts.engine, parts.engine.new_handle(slot), parts.rebuild)
                elif self._held is not None:
                    home = stream_of(parts.engine, self._held.stream)
                    current = parts.engine.device.current_stream()
                    streams = [current] if home is None or home == current else [current, home]
                    self._kept_since = parts.engine, [stream.record_event() for stream in streams]
            self._state = new

    def _launch_load_if_away(self) -> None:
        """Launch the load where `async_load` is legal; do nothing elsewhere."""
        with self._lock:
            if self._state in (SlotState.HOST, SlotState.DISK):
                self._launch_load(None)

    # -- inside; the lock is held -------------------------------------------------------------------------------------

    def _hold(self, tensor: Tensor) -> None:
        held = cast(ByHandBackend, self._backend).hold(tensor)  # what is no tensor is never held
        self._held, self._saved_version = held, held.read_version()

    def _launch_load(self, copy_stream: object) -> None:
        new = self._next(Change.LAUNCH_LOAD)
        if self._moved is not None:
            engine = self._moved.engine
            engine.launch_load(self._moved.handle, stream_of(engine, copy_stream))
        self._state = new

    def _launch(self, parts: Parts, copy_stream: object) -> Slot | None:
        """Launch an offload, and return its slot; None if no tier had room."""
        engine = parts.engine
        stream = stream_of(engine, copy_stream)
        home = None if self._held is None else stream_of(engine, self._held.stream)
        slot = engine.hold(parts.source, parts.num_bytes, home or engine.device.current_stream(), self.label)
        return slot if engine.launch_offload(slot, stream) else None

    def _next(self, change: Change) -> SlotState:
        if self._state is SlotState.NON_TENSOR:
            return self._state
        tier = None if self._moved is None else self._moved.handle.slot.tier
        try:
            return after(self._state, change, label=self.label, on_disk=tier is not None and tier.name == "disk")
        except StateError as error:
            raise StateError(
                error.what,
                expected=error.expected,
                got=error.got,
                where=error.where,
                do=f"In this state call {_NEXT[self._state]}.",
            ) from None

    def _new_version(self) -> int | None:
        """Return what the version was changed to while the tensor was held; None if it was not changed."""
        if self._held is None:
            return self._changed
        version = self._held.read_version()
        return None if version == self._saved_version else version

    def _check_unchanged(self) -> None:
        """Raise if the tensor was changed in place before it was copied.

        It is raised where the value is asked for, not where the change was found: a value nobody reads is no error.
        """
        version = self._new_version()
        if version is not None:
            raise StateError(
                "A tensor was changed in place while a SwapTensor held it.",
                expected=f"version {self._saved_version}",
                got=f"version {version}",
                where=str(self.label),
                do="Replace the in-place call by one that makes a new tensor, or move a clone.",
            )


def stream_of(engine: SwapEngine, stream: object) -> Stream | None:
    """Return a stream of the user's as the engine takes it; None for the engine's own, and on the CPU."""
    return None if stream is None else engine.device.stream_of(stream)


def _backend_of(value: object) -> ByHandBackend | None:
    """Find the platform's part for moves by hand; None for a value that is no tensor."""
    if value is None:
        return None
    try:
        platform = platform_of(value, call="SwapTensor")
    except ArgumentTypeError:
        return None
    if not isinstance(value, platform.Tensor):
        return None
    return backend(platform, ByHandBackend, "SwapTensor")
