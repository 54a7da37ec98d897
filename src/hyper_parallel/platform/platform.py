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

# The platform of this process: None until `get_platform()` or its kin has chosen one. They give what is assigned here
# from then on; None starts over.
platform: Platform | None = None

__all__ = [
    "platform",
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
