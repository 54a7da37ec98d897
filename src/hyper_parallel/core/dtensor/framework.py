"""Which framework's distributed tensors are meant."""

from __future__ import annotations

__all__ = ["framework_folder"]


def framework_folder() -> str:
    """The package that has the DTensor of the framework this process works on."""
    from hyper_parallel.platform.selection import communicating_platform

    return f"hyper_parallel.platform.{communicating_platform().platform_type.value}.dtensor"
