"""The engines of this process, one per device, kept in step with the configuration.

An engine lives as long as the process: its streams and its pinned memory are expensive. Configuration changes its
limits and the budget of its tier; another disk directory means another engine, while tensors that went to the old
directory come back from there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from hyper_parallel.core.swap import config as settings
from hyper_parallel.core.swap.arena import PinnedArena
from hyper_parallel.core.swap.config import SwapConfig
from hyper_parallel.core.swap.device import SwapDevice
from hyper_parallel.core.swap.disk import DiskTier
from hyper_parallel.core.swap.engine import Limits, SwapEngine
from hyper_parallel.core.swap.staged import StagedDevice, StagedDisk
from hyper_parallel.core.swap.stats import SwapStats


class Managed(NamedTuple):
    """An engine with what configuration changes about it."""

    engine: SwapEngine
    tier: PinnedArena | DiskTier
    device_bytes: int
    default_budget: int  # of the tier, where the configuration names none


_lock = threading.Lock()
_engines: dict[str, Managed] = {}
_retired = SwapStats()  # of engines that are gone
_NO_LIMIT = 1 << 62  # the load staging is never larger than the largest storage


def host_engine(
    name: str,
    make_device: Callable[[], SwapDevice],
    new_slab: Callable[[int], Any],
    free_slab: Callable[[Any], None],
    memory_of: Callable[[Any], memoryview],
    device_bytes: int,
) -> tuple[SwapEngine, int]:
    """Return the engine of an accelerator and the smallest storage that is worth a copy.

    It swaps to pinned memory and, past that budget, to the configured directory. `memory_of`: the bytes of a block of
    one part.
    """

    def build(config: SwapConfig) -> Managed:
        default = settings.machine_host_budget()
        arena = PinnedArena(new_slab, free_slab, config.host_budget or default, max_parts=16)
        return Managed(SwapEngine(make_device(), [arena], _limits(config, device_bytes)), arena, device_bytes, default)

    def staging(num_bytes: int) -> PinnedArena:
        return PinnedArena(new_slab, free_slab, num_bytes, max_parts=1)

    found = _find(name, "host", build)
    _attach_disk(found[0], staging, memory_of)
    return found


def _attach_disk(
    engine: SwapEngine, staging: Callable[[int], PinnedArena], memory_of: Callable[[Any], memoryview]
) -> None:
    """Let the tier below pinned memory be the directory that is configured now, if any."""
    config = settings.current_config()
    with _lock:
        below = next((tier for tier in engine.tiers if isinstance(tier, StagedDisk)), None)
        if (None if below is None else below.directory) == config.disk_dir:
            return
        above = [tier for tier in engine.tiers if not isinstance(tier, StagedDisk)]
        if config.disk_dir is None:
            engine.tiers = above
            return
        if not isinstance(engine.device, StagedDevice):
            engine.device = StagedDevice(engine.device, staging(_NO_LIMIT), memory_of)
        budget = config.disk_budget or settings.machine_disk_budget(config.disk_dir)
        engine.tiers = [
            *above,
            StagedDisk(DiskTier(config.disk_dir, budget), staging(max(engine.limits.window_bytes, 1))),
        ]


def disk_engine(make_device: Callable[[], SwapDevice], device_bytes: int) -> tuple[SwapEngine, int] | None:
    """Return the engine of the CPU, which swaps to files; None while no directory is configured.

    Without a directory a tensor on the CPU has nowhere to go: swapping does nothing there.
    """
    directory = settings.current_config().disk_dir
    if directory is None:
        return None

    def build(config: SwapConfig) -> Managed:
        default = settings.machine_disk_budget(directory)
        tier = DiskTier(directory, config.disk_budget or default)
        return Managed(SwapEngine(make_device(), [tier], _limits(config, device_bytes)), tier, device_bytes, default)

    return _find(f"cpu, {directory}", "disk", build)


def all_engines() -> dict[str, Managed]:
    with _lock:
        return dict(_engines)


def total_stats() -> SwapStats:
    """Add up the numbers of all engines."""
    total = SwapStats()
    total.add(_retired)
    for managed in all_engines().values():
        managed.engine.add_stats_to(total)
    return total


def _find(name: str, tier_name: str, build: Callable[[SwapConfig], Managed]) -> tuple[SwapEngine, int]:
    config = settings.current_config()
    with _lock:
        managed = _engines.get(name)
        if managed is None:
            managed = _engines[name] = build(config)
    return managed.engine, config.min_bytes if config.min_bytes is not None else settings.default_min_bytes(tier_name)


def _limits(config: SwapConfig, device_bytes: int) -> Limits:
    window, prefetch = config.window_bytes, config.prefetch_bytes
    return Limits(
        settings.default_window_bytes(device_bytes) if window is None else window,
        settings.default_prefetch_bytes(device_bytes) if prefetch is None else prefetch,
        config.on_full,
        first_window_bytes=settings.default_window_bytes(device_bytes) // 2 if window is None else window,
    )


def _follow(config: SwapConfig) -> None:
    for managed in all_engines().values():
        managed.engine.limits = _limits(config, managed.device_bytes)
        budget = config.host_budget if isinstance(managed.tier, PinnedArena) else config.disk_budget
        managed.tier.budget_bytes = budget or managed.default_budget
    _close_left_directories(config)


def _close_left_directories(config: SwapConfig) -> None:
    """Close the files of a directory that is no longer configured, once nothing is in them any more."""
    with _lock:
        for name, managed in list(_engines.items()):
            engine = managed.engine
            disks = [tier for tier in engine.tiers if isinstance(tier, (DiskTier, StagedDisk))]
            left = [tier for tier in disks if tier.directory != config.disk_dir]
            if not left:
                continue
            engine.join()  # copies of graphs that are gone already hold their blocks until they are done
            for tier in left:
                if tier.used_bytes == 0:
                    engine.tiers = [other for other in engine.tiers if other is not tier]
                    tier.close()
            if not engine.tiers:  # an engine of the CPU: a directory was all it had
                _retired.add(engine.stats)
                del _engines[name]


settings.on_change(_follow)
