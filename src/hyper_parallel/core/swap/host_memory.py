"""How much memory the host has for this process.

That is the machine's own account, and the limits of the control groups around the process.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class HostMemory(NamedTuple):
    total_bytes: int
    available_bytes: int
    limit_bytes: int | None  # what the tightest control group still has room for; None: no limit


def read_host_memory(root: str | os.PathLike[str] = "/") -> HostMemory:
    """Read the memory of the host as it is now. `root` is where `proc` and `sys` are found, for tests."""
    base = Path(root)
    fields = _fields(base / "proc/meminfo")
    total = fields.get("MemTotal", 0) * 1024
    available = fields.get("MemAvailable", fields.get("MemFree", 0)) * 1024
    if not total:  # not Linux
        total = available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rooms = [room for group in _groups(base) if (room := _room(group, total)) is not None]
    return HostMemory(total, available, min(rooms, default=None))


def num_local_processes() -> int:
    """Return how many processes a launcher started on this machine: they share its memory. 1 without a launcher."""
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(int(value), 1) if value.isdigit() else 1


class _Group(NamedTuple):
    folder: Path
    limit: str
    used: str
    reclaimable: str  # the field of memory.stat: cached file pages count as used and go when memory is needed


def _groups(base: Path) -> list[_Group]:
    """Find the control groups of this process, each with all those around it: any of them may be the tight one."""
    found = []
    for line in _text(base / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = base / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = base / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        found += [_Group(top.joinpath(*parts[:depth]), *names) for depth in range(len(parts), -1, -1)]
    return found


def _room(group: _Group, total: int) -> int | None:
    limit, used = _text(group.folder / group.limit).strip(), _text(group.folder / group.used).strip()
    # No file: not a group here (a container shows its own as the top). "max", or more than there is: no limit.
    if not limit.isdigit() or int(limit) >= total:
        return None
    reclaimable = _fields(group.folder / "memory.stat").get(group.reclaimable, 0)
    return max(int(limit) - (int(used) if used.isdigit() else 0) + reclaimable, 0)


def _fields(path: Path) -> dict[str, int]:
    """Read the lines that have a name and a number."""
    pairs = (line.replace(":", " ").split() for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
