"""The platform layer: one meaning for tensors, modules, autograd, streams and communication on both frameworks."""

from hyper_parallel.platform.platform import (
    EXISTING_COMM_GROUPS,
    HYPER_PARALLEL_PLATFORM,
    HYPER_PARALLEL_PLATFORM_MINDSPORE,
    HYPER_PARALLEL_PLATFORM_TORCH,
    Platform,
    PlatformType,
    get_mindspore_platform,
    get_platform,
    get_torch_platform,
    platform_of,
)

__all__ = [
    "EXISTING_COMM_GROUPS",
    "HYPER_PARALLEL_PLATFORM",
    "HYPER_PARALLEL_PLATFORM_MINDSPORE",
    "HYPER_PARALLEL_PLATFORM_TORCH",
    "Platform",
    "PlatformType",
    "get_mindspore_platform",
    "get_platform",
    "get_torch_platform",
    "platform_of",
]
