"""`Platform`, its type, and the functions that choose it."""

from hyper_parallel.platform.interface import EXISTING_COMM_GROUPS, Platform, PlatformType
from hyper_parallel.platform.selection import (
    HYPER_PARALLEL_PLATFORM,
    HYPER_PARALLEL_PLATFORM_MINDSPORE,
    HYPER_PARALLEL_PLATFORM_TORCH,
    get_mindspore_platform,
    get_platform,
    get_torch_platform,
    platform_of,
)

__all__ = [
    "Platform",
    "PlatformType",
    "EXISTING_COMM_GROUPS",
    "HYPER_PARALLEL_PLATFORM",
    "HYPER_PARALLEL_PLATFORM_MINDSPORE",
    "HYPER_PARALLEL_PLATFORM_TORCH",
    "get_platform",
    "get_torch_platform",
    "get_mindspore_platform",
    "platform_of",
]
