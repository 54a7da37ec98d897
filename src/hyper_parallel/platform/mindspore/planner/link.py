"""How fast a device's memory is copied to where it is swapped to, and back; measured by the engine's own copies."""

from __future__ import annotations

import statistics
import time
from typing import Any

import mindspore
from mindspore import mint

from hyper_parallel.core.planner.model.profile import Link
from hyper_parallel.platform.mindspore.planner.meters import is_cpu
from hyper_parallel.platform.mindspore.swap import engines as swap_engines
from hyper_parallel.platform.mindspore.swap.device import flat
from hyper_parallel.platform.mindspore.swap.storages import unseen

_NUM_COPIES = 5  # the first does not count: it makes what the others find
_DEVICE_BYTES = 256 * 1024**2
_CPU_BYTES = 4 * 1024**2


def measure_link(device: str) -> Any:
    """Measure the link of a device.

    None where nothing can be swapped: no directory is configured on a CPU.
    """
    found = swap_engines.engine_of(device)
    if found is None:
        return None
    engine = found[0]
    num_bytes = _CPU_BYTES if is_cpu(device) else _DEVICE_BYTES
    outs, ins = [], []
    for _ in range(_NUM_COPIES):
        with unseen():
            source = mint.empty((num_bytes,), dtype=mindspore.uint8)
        slot = engine.hold(flat(source), num_bytes, engine.device.current_stream(), "measuring the link")
        _synchronize(device)
        begin = time.perf_counter()
        if not engine.launch_offload(slot):
            return None
        engine.join()
        middle = time.perf_counter()
        engine.wait_offload(slot)
        del source
        handle = engine.new_handle(slot)
        _synchronize(device)
        again = time.perf_counter()
        engine.launch_load(handle)
        engine.acquire(handle)
        engine.join()
        _synchronize(device)
        ins.append(time.perf_counter() - again)
        outs.append(middle - begin)
        del handle, slot
    rates = [num_bytes / (statistics.median(times[1:]) * 1e3) for times in (outs, ins)]
    return Link(out_bytes_per_ms=rates[0], in_bytes_per_ms=rates[1])


def _synchronize(device: str) -> None:
    if not is_cpu(device):
        mindspore.runtime.synchronize()
