"""The question which framework's distributed tensors are meant, where no tensor is there to tell."""

from __future__ import annotations

from hyper_parallel.platform.selection import bind, communicating_platform

__all__ = ["framework_folder"]


def framework_folder(since: str) -> str:
    """Return the package that has the DTensor of the framework this process works on.

    The process is bound to that framework from now on, because of the call or import `since`: what is made from its
    classes does not work with the other framework's tensors.
    """
    communicating_platform()
    return f"hyper_parallel.platform.{bind(since).platform_type.value}.dtensor"
