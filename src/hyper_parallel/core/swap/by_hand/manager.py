"""`SwapManager`: groups of storages by name, for programs that say themselves when something moves.

No program has to: what `swap_wrapper`, `MUST_SWAP` and `swap_inputs` save moves by itself, in an order that is learned.

A group holds its storages weakly. Who computes with a storage holds it (a graph holds that of its forward), so what a
forward put aside goes with the forward, however it ends, and its group is unknown again. Names are kept for living
storages only.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar, final

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, StateError, describe
from hyper_parallel.core.swap import engines
from hyper_parallel.core.swap.by_hand import storage as moves
from hyper_parallel.core.swap.by_hand.layer_order import ORDER
from hyper_parallel.core.swap.by_hand.storage import Storage
from hyper_parallel.core.swap.by_hand.tensor import ByHandBackend
from hyper_parallel.platform import platform_of
from hyper_parallel.platform.opaque import Stream
from hyper_parallel.platform.selection import backend

_MIN_REFERENCES = 64  # fewer dead ones are not worth a look


@final
class SwapManager:
    """The one manager of this process; `SwapManager()` gives it. Every call may come from any thread.

    The four moves act on all storages of a group, or raise and act on none. `copy_stream` takes the place of the
    engine's own stream and means nothing on the CPU; a wait is always one of the current stream.

    Example:
        >>> import torch
        >>> from hyper_parallel import Storage, SwapTensor
        >>> manager, storage = SwapManager(), Storage()
        >>> storage.swap_storage["out"].append(SwapTensor(torch.ones(3), "layers.0, out"))
        >>> manager.add_storage("layers.0", storage)
        >>> manager.launch_offload("layers.0")
        >>> manager.wait_offload("layers.0")
    """

    _instance: ClassVar[SwapManager | None] = None
    _making: ClassVar[threading.Lock] = threading.Lock()

    _lock: threading.Lock
    _groups: dict[str, list[weakref.ref[Storage]]]  # in the order of joining
    _num_references: int  # in _groups, dead ones included
    _next_look: int  # at how many of them the dead ones are sorted out
    _thread: threading.local

    def __new__(cls) -> SwapManager:
        with cls._making:
            if cls._instance is None:
                self = super().__new__(cls)
                self._lock = threading.Lock()
                self._groups = {}
                self._num_references = 0
                self._next_look = _MIN_REFERENCES
                self._thread = threading.local()
                cls._instance = self
            return cls._instance

    def __reduce__(self) -> tuple[type[SwapManager], tuple[()]]:
        return SwapManager, ()  # a copy is the one instance, too

    # -- groups -------------------------------------------------------------------------------------------------------

    def add_storage(self, group: str, storage: Storage) -> None:
        """Let a storage join a group; twice is once. The group does not keep it alive.

        Raises:
            TypeError, ValueError: `group` is no name, or `storage` no `Storage`.
        """
        _check_name(group)
        if not isinstance(storage, Storage):
            raise ArgumentTypeError("A group holds storages.", expected="a Storage", got=describe(storage))
        with self._lock:
            self._forget_dead()
            references = self._groups.setdefault(group, [])
            if any(ref() is storage for ref in references):
                return
            references.append(weakref.ref(storage))
            self._num_references += 1
        ORDER.note_joined(storage)

    def launch_offload(self, group: str, copy_stream: Any = None) -> None:
        """Launch the copies to slower memory. What `AsyncSaveOnCpu` saved is on its way already.

        Raises:
            ValueError: no storage of that group is alive.
            RuntimeError: a tensor of it is in a state that does not allow this; nothing was launched.
        """
        with self._named(group) as storages:
            moves.launch_offload(storages, copy_stream)

    def wait_offload(self, group: str, copy_stream: Stream = None) -> None:
        """Make the current stream wait for those copies, and let go of the tensors. Raises as `launch_offload`."""
        with self._named(group) as storages:
            moves.wait_offload(storages)

    def launch_load(self, group: str, copy_stream: Any = None) -> None:
        """Launch the copies back, last tensor first. Raises as `launch_offload`."""
        with self._named(group) as storages:
            moves.launch_load(storages, copy_stream)

    def wait_load(self, group: str, copy_stream: Stream = None) -> None:
        """Make the current stream wait for the copies back. Raises as `launch_offload`."""
        with self._named(group) as storages:
            moves.wait_load(storages)

    def get_current_group_name(self) -> str:
        """Return the group that the storages of this thread join; empty, as at first, if there is none."""
        name: str = getattr(self._thread, "name", "")
        return name

    def set_current_group_name(self, name: str) -> None:
        """Let the storages of this thread's next `AsyncSaveOnCpu` blocks join a group; an empty name: none.

        It is this thread's alone: two models may run their forwards at the same time.
        """
        _check_name(name)
        self._thread.name = name

    def set_forward_prefetch_layer(self, first: object, second: object) -> None:
        """Tell that module `second` runs after `first`; to repeat it changes nothing.

        When the backward of `second` begins, the loads of what joined groups from the start of `first` to the start of
        `second` are launched, so that for these groups `wait_load` alone is to be called. Without a group there is
        nothing to tell: the order of what moves by itself is learned.

        Raises:
            TypeError, ValueError: one of them is no module.
        """
        for module in (first, second):
            if module is None:
                raise ArgumentError("`set_forward_prefetch_layer` needs two modules.", got="None")
        call = "set_forward_prefetch_layer"
        platform = platform_of(first, call=call)
        platform_of(second, call=call)
        backend(platform, ByHandBackend, call).hook_order(first, second)
        ORDER.pair(first, second)

    # -- numbers ------------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return what was moved since the process started, over all devices, and what is reserved now.

        Bytes out and in (`offloaded_bytes`, `loaded_bytes`) and their copies (`num_offloads`, `num_loads`);
        `num_late_loads`, which were not there when they were needed; `num_window_waits`, how often compute waited for
        room; how long compute stood still for late loads (`load_stall_ms`) and for offloads (`offload_stall_ms`: for
        room in the window, or because a program waited by hand); `peak_in_flight_bytes`; what stayed on the device
        (`kept_bytes`) and why (`kept`: reason -> how many); `pool_used_bytes` and `pool_reserved_bytes` by tier.
        """
        used: dict[str, int] = {"host": 0, "disk": 0}
        reserved: dict[str, int] = {"host": 0, "disk": 0}
        numbers = engines.total_stats().as_dict()  # looks for finished copies first
        for managed in engines.all_engines().values():
            for tier in managed.engine.tiers:
                used[tier.name] += tier.used_bytes
                reserved[tier.name] += tier.reserved_bytes
        return {**numbers, "pool_used_bytes": used, "pool_reserved_bytes": reserved}

    # -- inside -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _named(self, group: str) -> Iterator[list[Storage]]:
        """Give the living storages of a group; errors inside the block name the group."""
        _check_name(group)
        with self._lock:
            storages = _living(self._groups.get(group, []))
            known = [] if storages else sorted(name for name, references in self._groups.items() if _living(references))
        if not storages:
            raise ArgumentError(
                f"Group {group!r} is unknown: no storage of it is alive.",
                expected=f"one of {', '.join(map(repr, known))}" if known else "a group that a storage has joined",
                got=repr(group),
                do="Call `add_storage` first, and hold the storage as long as its group is used.",
            )
        try:
            yield storages
        except StateError as error:
            where = f"group {group!r}" if error.where is None else f"group {group!r}, {error.where}"
            raise type(error)(error.what, expected=error.expected, got=error.got, where=where, do=error.do) from error

    def _forget_dead(self) -> None:
        if self._num_references < self._next_look:
            return
        alive = {name: [ref for ref in references if ref() is not None] for name, references in self._groups.items()}
        self._groups = {name: references for name, references in alive.items() if references}
        self._num_references = sum(map(len, self._groups.values()))
        self._next_look = max(2 * self._num_references, _MIN_REFERENCES)


def _living(references: list[weakref.ref[Storage]]) -> list[Storage]:
    return [storage for ref in references if (storage := ref()) is not None]


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise ArgumentTypeError("A group is called by its name.", expected="a str", got=describe(name))
