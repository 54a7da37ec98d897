"""What PyTorch is and can do on this machine; `hyper-parallel doctor` runs it as a process of its own.

`python -m hyper_parallel.platform.torch.probe` tells all but one thing. With `--bfloat16` it tells only whether a
bfloat16 matrix product runs on the CPU: on some virtual machines oneDNN takes instructions there that kill the process.
"""

from __future__ import annotations

import statistics
import sys
import warnings
from typing import Any

from hyper_parallel.platform.probe_report import Facts, first_line, run_stages

LINK_BYTES = 256 * 2**20
NUM_LINK_REPEATS = 5

_BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")


def main(arguments: list[str]) -> int:
    if arguments == ["--bfloat16"]:
        return run_stages("torch", [("import", _import), ("bfloat16 matrix product", _multiply_bfloat16)])
    return run_stages(
        "torch",
        [
            ("import", _import),
            ("first operator", _run_operator),
            ("communication backends", _list_backends),
            ("accelerators", _list_accelerators),
            ("link bandwidth", _measure_links),
        ],
    )


def _import(facts: Facts) -> None:
    import torch

    facts["version"] = str(torch.__version__)
    # A ROCm build calls itself `hip` and serves the same `torch.cuda` names.
    facts["cuda_build"] = torch.version.cuda or getattr(torch.version, "hip", None)


def _run_operator(facts: Facts) -> None:
    import torch

    weight = torch.ones(8, 8, requires_grad=True)
    (weight @ weight).sum().backward()
    facts["num_threads"] = torch.get_num_threads()


def _multiply_bfloat16(facts: Facts) -> None:
    import torch

    # The three of them reach oneDNN by different paths, and a batch this size is enough to leave its reference kernels.
    matrix = torch.ones(64, 64, dtype=torch.bfloat16)
    batch = torch.ones(2, 64, 64, dtype=torch.bfloat16)
    products = torch.mm(matrix, matrix), torch.nn.functional.linear(matrix, matrix), torch.bmm(batch, batch)
    facts["is_right"] = all(bool((product == 64).all()) for product in products)


def _list_backends(facts: Facts) -> None:
    import torch.distributed as dist

    if not dist.is_available():
        facts["backends"] = dict.fromkeys(_BACKENDS, False)
        return
    ask = {name: getattr(dist, f"is_{name}_available", None) for name in _BACKENDS}
    facts["backends"] = {name: bool(is_available and is_available()) for name, is_available in ask.items()}


def _list_accelerators(facts: Facts) -> None:
    facts["accelerators"] = []
    facts["accelerator_error"] = None
    try:
        # PyTorch warns when the driver is too old and then says that there is no device: the warning is the reason.
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kind = _accelerator_kind()
        if kind is not None:
            facts["accelerators"] = _describe_devices(kind)
        elif facts["cuda_build"]:
            facts["accelerator_error"] = str(caught[0].message).splitlines()[0] if caught else _why_no_cuda()
    except Exception as error:  # PyTorch on the CPU is still usable; the doctor shows the reason
        facts["accelerator_error"] = first_line(error)


def _accelerator_kind() -> str | None:
    import torch

    if torch.cuda.is_available():
        return "cuda"
    accelerator = getattr(torch, "accelerator", None)  # there from 2.6
    if accelerator is not None and accelerator.is_available():
        return str(accelerator.current_accelerator().type)
    return None


def _why_no_cuda() -> str | None:
    import torch

    try:
        torch.cuda.init()
    except Exception as error:  # its message is the answer
        return first_line(error)
    return None


def _device_module(kind: str) -> Any:
    import torch

    return getattr(torch, kind)


def _describe_devices(kind: str) -> list[Facts]:
    module = _device_module(kind)
    return [_describe_device(module, kind, index) for index in range(module.device_count())]


def _describe_device(module: object, kind: str, index: int) -> Facts:
    properties = module.get_device_properties(index) if hasattr(module, "get_device_properties") else None
    free_bytes, total_bytes = module.mem_get_info(index) if hasattr(module, "mem_get_info") else (None, None)
    major, minor = getattr(properties, "major", None), getattr(properties, "minor", None)
    return {
        "kind": kind,
        "index": index,
        "name": str(getattr(properties, "name", kind)),
        "memory_total_bytes": total_bytes,
        "memory_free_bytes": free_bytes,
        "capability": f"{major}.{minor}" if isinstance(major, int) else None,
    }


def _measure_links(facts: Facts) -> None:
    facts["links"] = []
    facts["link_error"] = None
    try:
        for device in facts["accelerators"]:
            module = _device_module(device["kind"])
            if hasattr(module, "Stream") and hasattr(module, "Event"):
                facts["links"].append(_measure_link(module, device["kind"], device["index"]))
    except Exception as error:  # a full device is no reason to call PyTorch broken
        facts["link_error"] = first_line(error)


def _measure_link(module: Any, kind: str, index: int) -> Facts:
    """Measure the bytes per second between pinned host memory and one device.

    The figure is the median of a few copies timed by events.
    """
    import torch

    def new_pinned() -> Any:
        return torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)

    def new_on_device() -> Any:
        return torch.empty(LINK_BYTES, dtype=torch.uint8, device=torch.device(kind, index))

    with module.device(index):
        up, down = (new_on_device(), new_pinned()), (new_pinned(), new_on_device())
        streams = [module.Stream(), module.Stream()]

        def run(copies: list[tuple[Any, Any]]) -> float:
            """Copy once per stream, all released by one event; return the milliseconds until the last has ended."""
            start = module.Event(enable_timing=True)
            ends = [module.Event(enable_timing=True) for _ in copies]
            start.record()
            for (target, source), stream, end in zip(copies, streams, ends, strict=False):
                stream.wait_event(start)
                with module.stream(stream):
                    target.copy_(source, non_blocking=True)
                    end.record()
            module.synchronize()
            return max(float(start.elapsed_time(end)) for end in ends)

        def measure(copies: list[tuple[Any, Any]]) -> float:
            run(copies)  # the first copy also maps pages
            return LINK_BYTES / (statistics.median(run(copies) for _ in range(NUM_LINK_REPEATS)) / 1000)

        return {
            "kind": kind,
            "index": index,
            "host_to_device_bytes_per_s": measure([up]),
            "device_to_host_bytes_per_s": measure([down]),
            "both_each_way_bytes_per_s": measure([up, down]),
        }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
