"""What MindSpore is and can do on this machine; `hyper-parallel doctor` runs it as a process of its own."""

from __future__ import annotations

import sys
from typing import Any

from hyper_parallel.platform.probe_report import Facts, first_line, run_stages


def main() -> int:
    return run_stages(
        "mindspore",
        [
            ("import", _import),
            ("first operator", _run_operator),
            ("accelerators", _list_accelerators),
            ("communication backends", _list_backends),
        ],
    )


def _import(facts: Facts) -> None:
    import mindspore

    facts["version"] = str(mindspore.__version__)


def _run_operator(facts: Facts) -> None:
    import mindspore
    import numpy as np

    ones = mindspore.Tensor([1.0, 1.0])
    # With NumPy 2 the first operator fails, and a NumPy number as an operand fails for ever.
    doubled = ((ones + ones) * np.float32(2)).asnumpy()
    if doubled.tolist() != [4.0, 4.0]:
        raise ArithmeticError(f"(1 + 1) * 2 gave {doubled.tolist()}")


def _list_accelerators(facts: Facts) -> None:
    import mindspore

    facts["accelerators"] = []
    facts["accelerator_error"] = None
    facts["device_target"] = str(mindspore.get_context("device_target"))
    try:
        for kind in ("Ascend", "GPU"):
            if mindspore.hal.is_available(kind):
                devices = range(mindspore.hal.device_count(kind))
                facts["accelerators"] += [_describe_device(mindspore, kind, index) for index in devices]
    except Exception as error:  # MindSpore on the CPU is still usable; the doctor shows the reason
        facts["accelerator_error"] = first_line(error)


def _describe_device(mindspore: Any, kind: str, index: int) -> Facts:
    properties = mindspore.hal.get_device_properties(index, kind)
    return {
        "kind": kind.lower(),
        "index": index,
        "name": str(mindspore.hal.get_device_name(index, kind)),
        "memory_total_bytes": getattr(properties, "total_memory", None),
        "memory_free_bytes": getattr(properties, "free_memory", None),
        "capability": None,
    }


def _list_backends(facts: Facts) -> None:
    kinds = {device["kind"] for device in facts["accelerators"]}
    # mccl serves the CPU and is part of every package; the others come with the device's own software.
    facts["backends"] = {"mccl": True, "hccl": "ascend" in kinds, "nccl": "gpu" in kinds}


if __name__ == "__main__":
    sys.exit(main())
