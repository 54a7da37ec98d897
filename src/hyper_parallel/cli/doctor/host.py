"""The machine below the frameworks: processor, memory and its limits, driver. Read from the kernel's files.

Every function that reads below `/proc` or `/sys` takes the root of the file system, so that a test can lay out another
machine.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from hyper_parallel.cli.doctor.facts import SHARED_MEMORY_PATH, Host, Memory

ROOT = Path("/")


def read_host(root: Path = ROOT) -> Host:
    num_cores = os.cpu_count() or 1
    # Not on every system; without it every core is taken as usable.
    affinity = getattr(os, "sched_getaffinity", None)
    return Host(
        python=platform.python_version(),
        python_path=sys.executable,
        system=_system(root),
        cpu=_cpu(root),
        num_cores=num_cores,
        num_usable_cores=len(affinity(0)) if affinity else num_cores,
        nvidia_driver=read_nvidia_driver(root),
    )


def read_memory(root: Path = ROOT) -> Memory:
    sizes = _meminfo(root)
    total_bytes = sizes.get("MemTotal")
    limit_bytes = read_memory_limit(root)
    if limit_bytes is not None and total_bytes is not None and limit_bytes >= total_bytes:
        limit_bytes = None
    temp_path = tempfile.gettempdir()
    temp_free_bytes = None
    with contextlib.suppress(OSError):
        temp_free_bytes = shutil.disk_usage(temp_path).free
    return Memory(
        total_bytes=total_bytes,
        available_bytes=sizes.get("MemAvailable"),
        limit_bytes=limit_bytes,
        locked_limit_bytes=_locked_limit(),
        shared_bytes=_shared_bytes(root),
        temp_path=temp_path,
        temp_free_bytes=temp_free_bytes,
    )


def read_memory_limit(root: Path = ROOT) -> int | None:
    """Find the lowest memory limit of this process's control group and those above it, version 1 or 2; None without
    one.
    """
    limits = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        _, controllers, path = parts
        if controllers == "":
            mount, file_name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            mount, file_name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        # Inside a container the path may be the host's, and then only the mount itself is there to read.
        folder = mount / path.lstrip("/")
        for group in (folder, *folder.parents):
            value = _text(group / file_name).strip()
            if value.isdigit():
                limits.append(int(value))
            if group == mount:
                break
    return min(limits, default=None)


def read_nvidia_driver(root: Path = ROOT) -> str | None:
    """Find the version of the NVIDIA driver that the kernel has loaded, None without one."""
    found = re.search(r"\s(\d{3,}\.\d+(?:\.\d+)?)\s", _text(root / "proc/driver/nvidia/version"))
    if found:
        return found[1]
    # Some containers hide the file and still have the driver's own tool.
    tool = shutil.which("nvidia-smi") if root == ROOT else None
    if tool is None:
        return None
    try:
        answer = subprocess.run(
            [tool, "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = answer.stdout.split() if answer.returncode == 0 else []
    return lines[0] if lines else None


def _system(root: Path) -> str:
    pretty = re.search(r'^PRETTY_NAME="?([^"\n]+)', _text(root / "etc/os-release"), re.MULTILINE)
    kernel = f"{platform.system()} {platform.release()} {platform.machine()}"
    return f"{pretty[1]}, {kernel}" if pretty else kernel


def _cpu(root: Path) -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", _text(root / "proc/cpuinfo"), re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def _meminfo(root: Path) -> dict[str, int]:
    rows = re.findall(r"^(\w+):\s+(\d+) kB$", _text(root / "proc/meminfo"), re.MULTILINE)
    return {name: int(kibibytes) * 1024 for name, kibibytes in rows}


def _locked_limit() -> int | None:
    try:
        import resource
    except ImportError:  # not a POSIX system
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _shared_bytes(root: Path) -> int | None:
    try:
        return shutil.disk_usage(root / SHARED_MEMORY_PATH.lstrip("/")).total
    except OSError:
        return None


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
