"""Whether this thread is running a region's function again, and the hooks of this package that are around it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from mindspore import saved_tensors_hooks


class _Thread(threading.local):
    def __init__(self) -> None:
        self.num_replays = 0
        self.packs: list[Callable[[Any], Any]] = []


_thread = _Thread()


def is_replaying() -> bool:
    """Whether a region's function runs again in this thread: inner regions and swap wrappers are plain calls then."""
    return _thread.num_replays > 0


class replaying:  # noqa: N801 - used like a function
    """A block in which this thread runs a region's function again."""

    __slots__ = ("_packs",)

    def __enter__(self) -> None:
        _thread.num_replays += 1
        # Hooks around the one who runs backward are not those around the region.
        self._packs = _thread.packs
        _thread.packs = []

    def __exit__(self, *_error: object) -> None:
        _thread.num_replays -= 1
        _thread.packs = self._packs


def pack_around() -> Callable[[Any], Any] | None:
    """What the innermost hooks of this package around here pack a tensor with; None without any.

    MindSpore does not tell which hooks are set, so hooks of others around a region do not get its inputs.
    """
    return _thread.packs[-1] if _thread.packs else None


class Hooks(saved_tensors_hooks):
    """Saved-tensor hooks that regions inside of them find. `pack` gives objects with `tensor()`, as does `pack_input` for their inputs."""

    def __init__(
        self,
        pack: Callable[[Any], Any],
        unpack: Callable[[Any], Any],
        pack_input: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(pack, unpack)
        self._pack_input = pack_input or pack

    def __enter__(self) -> None:
        super().__enter__()
        _thread.packs.append(self._pack_input)

    def __exit__(self, *error: Any) -> None:
        if _thread.packs:
            _thread.packs.pop()
        super().__exit__(*error)
