"""The machine below the frameworks, read from made-up kernel files and from the real ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from hyper_parallel.cli.doctor.host import read_host, read_memory, read_memory_limit, read_nvidia_driver
from hyper_parallel.cli.doctor.units import gibibytes, gigabytes_per_s

GIB = 2**30


def lay_out(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_this_machine_can_be_read():
    host, memory = read_host(), read_memory()
    assert host.python.startswith("3.")
    assert 1 <= host.num_usable_cores <= host.num_cores
    assert host.cpu
    assert memory.total_bytes > memory.available_bytes > 0
    assert memory.limit_bytes is None or memory.limit_bytes < memory.total_bytes
    assert memory.temp_free_bytes > 0


def test_a_machine_without_kernel_files_gives_what_it_can(tmp_path):
    memory = read_memory(tmp_path)
    assert memory.total_bytes is None
    assert memory.limit_bytes is None
    assert memory.shared_bytes is None
    assert read_host(tmp_path).cpu
    assert read_nvidia_driver(tmp_path) is None


def test_memory_and_processor_are_read_from_the_kernel(tmp_path):
    lay_out(
        tmp_path,
        {
            "proc/meminfo": "MemTotal:       1024 kB\nMemFree: 1 kB\nMemAvailable:    512 kB\n",
            "proc/cpuinfo": "processor\t: 0\nmodel name\t: Some CPU @ 2.0GHz\nflags\t\t: a b\n",
            "etc/os-release": 'NAME="X"\nPRETTY_NAME="Some Linux 1"\n',
            "dev/shm/.keep": "",
        },
    )
    memory, host = read_memory(tmp_path), read_host(tmp_path)
    assert (memory.total_bytes, memory.available_bytes) == (2**20, 2**19)
    assert memory.shared_bytes > 0
    assert host.cpu == "Some CPU @ 2.0GHz"
    assert host.system.startswith("Some Linux 1, ")


def test_the_lowest_limit_on_the_way_up_counts_in_version_2(tmp_path):
    lay_out(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            "sys/fs/cgroup/a/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory.max": f"{6 * GIB}\n",
        },
    )
    assert read_memory_limit(tmp_path) == 4 * GIB


def test_a_limit_of_version_1_is_read_although_the_path_is_the_hosts(tmp_path):
    lay_out(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu:/x\n4:memory:/docker/0123\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
        },
    )
    assert read_memory_limit(tmp_path) == 2 * GIB


@pytest.mark.parametrize("text", ["", "garbage", "0::/\n", "4:memory:/\n"])
def test_no_readable_limit_is_none(tmp_path, text):
    lay_out(tmp_path, {"proc/self/cgroup": text})
    assert read_memory_limit(tmp_path) is None


def test_a_limit_above_the_machines_memory_is_no_limit(tmp_path):
    files = {
        "proc/meminfo": "MemTotal: 1024 kB\n",
        "proc/self/cgroup": "4:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert read_memory(lay_out(tmp_path, files)).limit_bytes is None


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82.01  Wed Oct 27 2021\nGCC version: 11\n", "470.82.01"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159  Release Build  (x)\n", "580.159"),
        ("something else\n", None),
    ],
)
def test_the_drivers_version_is_read_from_the_kernel(tmp_path, text, version):
    assert read_nvidia_driver(lay_out(tmp_path, {"proc/driver/nvidia/version": text})) == version


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(None, "unknown"), (8192, "8 KiB"), (64 * 2**20, "64 MiB"), (int(23.5 * GIB), "23.5 GiB"), (2**41, "2.0 TiB")],
)
def test_sizes_are_written_in_powers_of_two(num_bytes, text):
    assert gibibytes(num_bytes) == text


def test_rates_are_written_in_powers_of_ten():
    assert gigabytes_per_s(55e9) == "55.0 GB/s"
