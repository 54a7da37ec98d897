"""Machines that do not exist, for checks and rendering."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyper_parallel.cli.doctor.facts import Accelerator, Bfloat16, Facts, Framework, Host, Link, Memory, Package
from hyper_parallel.platform import PlatformType

GIB = 2**30


@pytest.fixture
def machine() -> Facts:
    """PyTorch on a CPU, nothing to complain about."""
    return Facts(
        package_version="0.1.0",
        host=Host(
            python="3.11.7",
            python_path="/opt/python/bin/python",
            system="Some Linux 1, Linux 6.1 x86_64",
            cpu="Some CPU",
            num_cores=16,
            num_usable_cores=16,
            nvidia_driver=None,
        ),
        memory=Memory(
            total_bytes=64 * GIB,
            available_bytes=60 * GIB,
            limit_bytes=None,
            locked_limit_bytes=None,
            shared_bytes=32 * GIB,
            temp_path="/scratch",
            temp_free_bytes=100 * GIB,
        ),
        torch=Framework(PlatformType.PYTORCH, is_installed=True, version="2.13.0+cpu", backends={"gloo": True}),
        mindspore=Framework(PlatformType.MINDSPORE),
        bfloat16=Bfloat16.WORKS,
        packages=(Package("numpy", "2.1.0", "arrays"), Package("scipy", None, "the solver")),
        environment={},
    )


@pytest.fixture
def machine_with_both(machine: Facts) -> Facts:
    """PyTorch and MindSpore on a CPU."""
    return replace(
        machine,
        mindspore=Framework(
            PlatformType.MINDSPORE, is_installed=True, version="2.10.0", device_target="CPU", backends={"mccl": True}
        ),
        packages=(Package("numpy", "1.26.4", "arrays"),),
    )


@pytest.fixture
def machine_with_gpu(machine: Facts) -> Facts:
    """PyTorch with one CUDA device."""
    torch = replace(
        machine.torch,
        version="2.13.0+cu130",
        cuda_build="13.0",
        accelerators=(Accelerator("cuda", 0, "Some GPU", 80 * GIB, 79 * GIB, "9.0"),),
        links=(Link("cuda", 0, 55.1e9, 54.9e9, 48.0e9),),
        backends={"gloo": True, "nccl": True, "mpi": False},
    )
    return replace(machine, torch=torch, host=replace(machine.host, nvidia_driver="580.1"))
