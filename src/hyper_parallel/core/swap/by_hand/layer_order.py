"""Which layer runs after which, as told by hand.

When the backward of the second begins, what the first put aside starts to come back.

What belongs to a layer: the storages that join a group after it began and before the next layer that was told of, in
the same thread. So a layer inside a layer has its own, and the outer one has the rest.

Nothing is stuck on a module, and nothing here keeps a module or a storage alive.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias, final

from hyper_parallel.core.swap.by_hand import storage as moves
from hyper_parallel.core.swap.by_hand.storage import Storage
from hyper_parallel.platform.opaque import Module

_Joined: TypeAlias = "list[weakref.ref[Storage]]"  # the storages of one forward of one layer


class _Thread(threading.local):
    """What one thread's forward has put aside so far."""

    def __init__(self) -> None:
        self.joined: weakref.WeakKeyDictionary[Any, _Joined] = (
            weakref.WeakKeyDictionary()
        )  # first -> of its last forward
        self.open: _Joined | None = None  # of the layer that began last
        self.before: weakref.WeakKeyDictionary[Any, list[_Joined]] = (
            weakref.WeakKeyDictionary()
        )  # second -> of its firsts


@final
class LayerOrder:
    """Pairs of layers. The platform's hooks call the three methods in the middle."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._firsts: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
        self._thread = _Thread()

    def pair(self, first: object, second: object) -> None:
        with self._lock:
            self._firsts.setdefault(second, weakref.WeakSet()).add(first)

    def first_begins(self, module: Module) -> None:
        self._thread.joined[module] = self._thread.open = []

    def second_begins(self, module: Module) -> None:
        with self._lock:
            firsts = list(self._firsts.get(module, ()))
        thread = self._thread
        joined = [thread.joined[first] for first in firsts if first in thread.joined]
        thread.before[module] = joined
        if any(thread.open is storages for storages in joined):
            thread.open = None

    def second_ends(self, module: Module) -> Callable[[], None] | None:
        """Return what to call when the backward of this forward begins; None if nothing was put aside before it."""
        joined = [ref for storages in self._thread.before.pop(module, []) for ref in storages]
        if not joined:
            return None

        def launch() -> None:
            moves.launch_load_of_what_is_away([storage for ref in joined if (storage := ref()) is not None])

        return launch

    def note_joined(self, storage: Storage) -> None:
        """Note that a storage has joined a group in this thread."""
        joined = self._thread.open
        if joined is not None:
            joined[:] = [ref for ref in joined if ref() not in (None, storage)]
            joined.append(weakref.ref(storage))


ORDER = LayerOrder()
