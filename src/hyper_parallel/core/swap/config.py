"""The settings of swapping, for the process or for a `with` block.

Settings are layers: the first is the process's, and each `with configure_swap(...)` puts one on top until it ends. The
topmost counts, for every thread: activations saved by one thread are loaded by another, so a setting of one thread
would not mean much.

Invariant: `_layers` is never empty; it is replaced whole, so that `current_config` reads it without a lock.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel._base.files import checked_path
from hyper_parallel.core.swap.disk import check_directory
from hyper_parallel.core.swap.host_memory import num_local_processes, read_host_memory
from hyper_parallel.core.swap.sizes import parse_size

KIB, MIB, GIB = 1024, 1024**2, 1024**3
MIN_BYTES = {"host": MIB, "disk": 64 * KIB}  # smaller storages are not worth a copy, by the tier they would go to
_ON_FULL = ("wait", "keep")


@dataclass(frozen=True)
class SwapConfig:
    """One setting. None means: from the machine, by the functions below, when needed; for `check`: no check."""

    host_budget: int | None = None
    disk_dir: str | None = None
    disk_budget: int | None = None
    window_bytes: int | None = None
    prefetch_bytes: int | None = None
    min_bytes: int | None = None
    on_full: Literal["wait", "keep"] = "wait"
    check: str | None = None


class _Layer:
    def __init__(self, config: SwapConfig) -> None:
        self.config = config


class SwapSetting:
    """What `configure_swap` returns: `with` makes the setting end with the block."""

    def __init__(self, config: SwapConfig) -> None:
        self.config = config
        self._entered: list[_Layer] = []
        with _lock:
            self._under = _layers[-1]
            self._before = self._under.config
            self._under.config = config
            try:
                _notify(config)
            except BaseException:
                self._under.config = self._before  # who cannot follow refuses, and those who have followed hear of it
                with contextlib.suppress(Exception):
                    _notify(self._before)
                raise

    def undo(self) -> None:
        """Bring back what counted before this call, unless another call has changed it since."""
        with _lock:
            if self._under.config is self.config:
                self._under.config = self._before
                if _layers[-1] is self._under:
                    _notify(self._before)

    def __enter__(self) -> SwapConfig:
        global _layers
        with _lock:
            if self._under.config is self.config:
                self._under.config = self._before  # what lies below the block is as it was before the call
            layer = _Layer(self.config)
            self._entered.append(layer)
            _layers = (*_layers, layer)
        return self.config

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        global _layers
        with _lock:
            mine = self._entered.pop()
            was_on_top = _layers[-1] is mine
            # Only this layer goes, wherever it is: blocks of two threads may overlap and end in any order.
            _layers = tuple(layer for layer in _layers if layer is not mine)
            if was_on_top:
                _notify(_layers[-1].config)


_layers: tuple[_Layer, ...] = (_Layer(SwapConfig()),)
_callbacks: tuple[Callable[[SwapConfig], None], ...] = ()
# Held while callbacks run, so that they hear of changes in order. They may configure again (it is reentrant), but must
# not wait for a thread that does.
_lock = threading.RLock()


def configure_swap(
    *,
    host_budget: int | str | None = None,
    disk_dir: str | os.PathLike[str] | None = None,
    disk_budget: int | str | None = None,
    window_bytes: int | str | None = None,
    prefetch_bytes: int | str | None = None,
    min_bytes: int | str | None = None,
    on_full: Literal["wait", "keep"] = "wait",
    check: str | None = None,
    **unknown: Any,
) -> SwapSetting:
    """Set how activations are swapped: for the process, at once; as a context manager, until the `with` block ends.

    A call states the whole setting: what is left out has its default, not what an earlier call said. None means "from
    the machine". A `with` block holds for all threads while it lasts. A call that raises changes nothing.

    Args:
        host_budget: pinned host memory, at most. 60 % of what is available, shared by the processes of this machine.
        disk_dir: a directory for what does not fit there; on a CPU, for everything. None: no disk.
        disk_budget: bytes of files in it, at most. 80 % of the free space.
        window_bytes: memory of activations that are still being copied out. At most 512 MiB, less on small devices;
            half of it is used until bursts turn out to need more.
        prefetch_bytes: memory of activations that came back before they were asked for. At most 512 MiB, less on small
            devices; an eighth of it is used until loads turn out to come late. What the next group needs also comes
            where it fits below the highest point that was reached already.
        min_bytes: smaller ones stay. 1 MiB for the host, 64 KiB for the disk.
        on_full: when the window is full, "wait" for a copy (the memory promise holds), or "keep" the next activation on
            the device (no time is lost).
        check: "values" compares recomputed values with a checksum of the originals; "values:16" in every 16th call of
            each region only.

    Sizes are bytes or texts such as "8GiB".

    Raises:
        ValueError: a value cannot be used; the message names what can.
        TypeError: a value of another type, or an unknown keyword.

    Example:
        >>> with configure_swap(host_budget="8GiB", on_full="keep") as config:
        ...     config.host_budget
        8589934592
    """
    if unknown:
        raise _unknown_keyword(next(iter(unknown)))
    return SwapSetting(
        SwapConfig(
            host_budget=_budget(
                host_budget, "host_budget", "Leave it out for the default; to swap nothing, wrap nothing."
            ),
            disk_dir=_directory(disk_dir),
            disk_budget=_disk_budget(disk_budget, disk_dir),
            window_bytes=_size(window_bytes, "window_bytes"),
            prefetch_bytes=_size(prefetch_bytes, "prefetch_bytes"),
            min_bytes=_size(min_bytes, "min_bytes"),
            on_full=_one_of(on_full, _ON_FULL, "on_full"),
            check=_check(check),
        )
    )


def current_config() -> SwapConfig:
    """Return the setting that counts now."""
    return _layers[-1].config


def on_change(callback: Callable[[SwapConfig], None]) -> Callable[[], None]:
    """Call `callback` with every new setting, in order; return the function that ends this.

    One that raises makes a call of `configure_swap` fail and change nothing.
    """
    global _callbacks
    with _lock:
        _callbacks = (*_callbacks, callback)

    def forget() -> None:
        global _callbacks
        with _lock:
            _callbacks = tuple(other for other in _callbacks if other is not callback)

    return forget


# -- what None means --------------------------------------------------------------------------------------------------


def default_host_budget(
    total_bytes: int, available_bytes: int, *, limit_bytes: int | None = None, num_processes: int = 1
) -> int:
    """Return 60 % of the memory that is there for us, divided by the processes of the machine; at least one byte.

    Pinned memory cannot be swapped out by the system: taking all of it would have another process killed.
    """
    room = min(total_bytes, available_bytes)
    if limit_bytes is not None:
        room = min(room, limit_bytes)
    return max(room * 6 // 10 // num_processes, 1)


def machine_host_budget() -> int:
    """Return `default_host_budget` of this machine, now."""
    memory = read_host_memory()
    return default_host_budget(
        memory.total_bytes,
        memory.available_bytes,
        limit_bytes=memory.limit_bytes,
        num_processes=num_local_processes(),
    )


def default_disk_budget(free_bytes: int, *, num_processes: int = 1) -> int:
    """Return 80 % of the free space, divided by the processes of the machine; at least one byte."""
    return max(free_bytes * 8 // 10 // num_processes, 1)


def machine_disk_budget(directory: str) -> int:
    """Return `default_disk_budget` of the disk of `directory`, now."""
    try:
        disk = os.statvfs(directory)
    except OSError as error:
        check_directory(directory)  # it was there when it was configured: says what has become of it
        raise ArgumentError(
            "disk_dir cannot be read.", got=f"{directory} ({error.strerror})", do="Name another one."
        ) from error
    return default_disk_budget(disk.f_bavail * disk.f_frsize, num_processes=num_local_processes())


def default_window_bytes(device_bytes: int) -> int:
    """Return 512 MiB on devices of 40 GiB and more; 1/80 of smaller ones, but at least 64 MiB.

    A larger one buys no speed: where the link is behind, compute waits for it sooner or later.
    """
    return min(max(device_bytes // 80, 64 * MIB), GIB // 2)


def default_prefetch_bytes(device_bytes: int) -> int:
    """Return 512 MiB on devices of 40 GiB and more; 1/80 of smaller ones, but at least 32 MiB."""
    return min(max(device_bytes // 80, 32 * MIB), GIB // 2)


def default_min_bytes(tier: str) -> int:
    """Return the smallest storage that is worth a copy to the tier of this name."""
    return MIN_BYTES[tier]


# -- checking ---------------------------------------------------------------------------------------------------------


def _notify(config: SwapConfig) -> None:
    for callback in _callbacks:
        callback(config)


def _size(value: object, name: str) -> int | None:
    return None if value is None else parse_size(value, name)


def _budget(value: object, name: str, advice: str) -> int | None:
    num_bytes = _size(value, name)
    if num_bytes == 0:
        raise ArgumentError(
            f"{name} leaves no room at all.", expected="more than 0 bytes", got=describe(value), do=advice
        )
    return num_bytes


def _directory(value: object) -> str | None:
    if value is None:
        return None
    try:
        path = checked_path(value)
    except ArgumentTypeError:
        raise ArgumentTypeError(
            "disk_dir is no path.", expected="a str or os.PathLike, or None", got=describe(value)
        ) from None
    except ArgumentError as error:
        raise ArgumentError("disk_dir names no directory.", expected=error.expected, got=error.got) from None
    check_directory(path)
    return os.path.abspath(path)  # the working directory may change


def _disk_budget(value: object, directory: object) -> int | None:
    num_bytes = _budget(value, "disk_budget", "Leave out disk_dir to use no disk.")
    if num_bytes is not None and directory is None:
        raise ArgumentError(
            "disk_budget without disk_dir.", got=f"disk_budget={value!r}", do="Name a directory with disk_dir as well."
        )
    return num_bytes


def _one_of(value: object, accepted: tuple[Any, ...], name: str) -> Any:
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in accepted):
        expected = " or ".join(repr(choice) for choice in accepted)
        raise ArgumentError(f"{name} has no such choice.", expected=expected, got=describe(value))
    return value


def _check(value: object) -> str | None:
    name, _, every = value.partition(":") if isinstance(value, str) else ("", "", "")
    if value is not None and (name != "values" or (every and not (every.isdecimal() and int(every) > 0))):
        raise ArgumentError(
            "check is not known.", expected='None, "values", or "values:16" for every 16th call', got=describe(value)
        )
    return None if value is None else str(value)


def _unknown_keyword(name: str) -> ArgumentTypeError:
    accepted = list(SwapConfig.__dataclass_fields__)
    close = difflib.get_close_matches(name, accepted, n=1)
    return ArgumentTypeError(
        f"configure_swap has no option {name!r}.",
        expected="one of " + ", ".join(accepted),
        got=name,
        do=f"Did you mean {close[0]}?" if close else None,
    )
