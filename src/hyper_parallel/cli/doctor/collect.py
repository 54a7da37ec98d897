"""All facts of this machine in one call."""

from __future__ import annotations

import os

from hyper_parallel._version import __version__
from hyper_parallel.cli.doctor.facts import ONEDNN_VARIABLE, Facts, Package
from hyper_parallel.cli.doctor.frameworks import ask_frameworks, version_of
from hyper_parallel.cli.doctor.host import read_host, read_memory
from hyper_parallel.platform import HYPER_PARALLEL_PLATFORM

VARIABLES = (
    HYPER_PARALLEL_PLATFORM,
    ONEDNN_VARIABLE,
    "OMP_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "ASCEND_RT_VISIBLE_DEVICES",
)

_PACKAGES = {
    "numpy": "arrays, needed by the package itself",
    "scipy": "the planner's solver",
    "safetensors": "checkpoint files",
    "rich": "this command",
    "typer": "this command",
}


def collect() -> Facts:
    """Look at this machine; takes a few seconds, most of them spent in importing the frameworks."""
    torch, mindspore, bfloat16 = ask_frameworks()
    return Facts(
        package_version=__version__,
        host=read_host(),
        memory=read_memory(),
        torch=torch,
        mindspore=mindspore,
        bfloat16=bfloat16,
        packages=tuple(Package(name, version_of(name), purpose) for name, purpose in _PACKAGES.items()),
        environment={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )
