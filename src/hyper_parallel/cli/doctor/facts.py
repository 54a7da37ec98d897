"""What the doctor knows of a machine: plain values, so that checks and rendering need no machine to be tested."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from hyper_parallel.platform import PlatformType

SHARED_MEMORY_PATH = "/dev/shm"  # noqa: S108 - its size is looked at, nothing is written there
ONEDNN_VARIABLE = "ONEDNN_MAX_CPU_ISA"
ONEDNN_CURE = "AVX512_CORE_FP16"

# The first version that this package works with.
OLDEST_VERSIONS = {PlatformType.PYTORCH: (2, 8), PlatformType.MINDSPORE: (2, 10)}


@dataclass(frozen=True)
class Host:
    python: str
    python_path: str
    system: str
    cpu: str
    num_cores: int
    num_usable_cores: int
    """Cores that this process may run on; a container or `taskset` can make it fewer than there are."""
    nvidia_driver: str | None
    """Version of the kernel's NVIDIA driver, None without one."""


@dataclass(frozen=True)
class Memory:
    total_bytes: int | None
    available_bytes: int | None
    limit_bytes: int | None
    """The control group's limit, None if there is none below `total_bytes`."""
    locked_limit_bytes: int | None
    """What this process may lock (pin) by itself, None if unlimited."""
    shared_bytes: int | None
    """Size of /dev/shm, None without one."""
    temp_path: str
    temp_free_bytes: int | None


@dataclass(frozen=True)
class Accelerator:
    kind: str
    index: int
    name: str
    memory_total_bytes: int | None = None
    memory_free_bytes: int | None = None
    capability: str | None = None


@dataclass(frozen=True)
class Link:
    """Copies between pinned host memory and one device. `both_each_way` is one direction's share while both run."""

    kind: str
    index: int
    host_to_device_bytes_per_s: float
    device_to_host_bytes_per_s: float
    both_each_way_bytes_per_s: float


@dataclass(frozen=True)
class Framework:
    """One framework, as its probe saw it.

    Invariant: `stopped_at` is None exactly if the probe came to its end; then `error` is None too.
    """

    platform: PlatformType
    is_installed: bool = False
    version: str | None = None
    stopped_at: str | None = None
    """The stage in which the probe ended before its end: `import`, `first operator`, …"""
    error: str | None = None
    cuda_build: str | None = None
    device_target: str | None = None
    accelerators: tuple[Accelerator, ...] = ()
    accelerator_error: str | None = None
    backends: Mapping[str, bool] = field(default_factory=dict)
    links: tuple[Link, ...] = ()
    link_error: str | None = None

    @property
    def is_importable(self) -> bool:
        return self.is_installed and self.stopped_at != "import"

    @property
    def is_recent_enough(self) -> bool:
        version = release_of(self.version)
        return version is None or version >= OLDEST_VERSIONS[self.platform]

    @property
    def is_usable(self) -> bool:
        return self.is_installed and self.stopped_at is None and self.is_recent_enough


class Bfloat16(Enum):
    """Whether PyTorch multiplies bfloat16 matrices on this CPU, and what `ONEDNN_MAX_CPU_ISA` has to do with it."""

    WORKS = "works"
    CURED = "works because the variable is set"
    NEEDS_CURE = "kills the process unless the variable is set"
    INCURABLE = "fails with and without the variable"
    UNKNOWN = "not tried"


@dataclass(frozen=True)
class Package:
    name: str
    version: str | None
    purpose: str


@dataclass(frozen=True)
class Facts:
    package_version: str
    host: Host
    memory: Memory
    torch: Framework
    mindspore: Framework
    bfloat16: Bfloat16
    packages: tuple[Package, ...]
    environment: Mapping[str, str]
    """The variables that this package, the frameworks or a check look at, as far as they are set."""

    @property
    def frameworks(self) -> tuple[Framework, Framework]:
        """Both, in the order in which `get_platform()` tries them."""
        return self.mindspore, self.torch

    def framework(self, platform: PlatformType) -> Framework:
        return self.torch if platform is PlatformType.PYTORCH else self.mindspore

    def package(self, name: str) -> str | None:
        return next((package.version for package in self.packages if package.name == name), None)


def release_of(version: str | None) -> tuple[int, int] | None:
    """Read `(2, 13)` from `2.13.0+cpu`; None if the text does not start so."""
    parts = (version or "").split("+")[0].split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return None
    return int(parts[0]), int(parts[1])
