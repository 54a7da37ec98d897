"""The DTensor of the framework that this process works on, under its fixed path; the class itself is in `platform/`."""

from __future__ import annotations

import importlib
from typing import Any

from hyper_parallel.core.dtensor.framework import framework_folder
from hyper_parallel.platform import platform_of


def distribute_tensor(tensor: Any, mesh: Any, placements: Any = None) -> Any:
    """Return the part of a whole tensor that belongs to this rank.

    Every rank has the tensor; nothing is communicated, and gradients flow to it.

    Args:
        tensor: of either framework.
        mesh: a `DeviceMesh`, or a `Layout` instead of both.
        placements: one per mesh axis, or a layout; replicated without.

    Raises:
        ValueError: a placement does not fit.
    """
    folder = f"hyper_parallel.platform.{platform_of(tensor).platform_type.value}.dtensor"
    return importlib.import_module(folder).distribute_tensor(tensor, mesh, placements)


def __getattr__(name: str) -> Any:
    # Only when it is asked for: the class is a subclass of the framework's own, and importing this must not choose one.
    if name == "DTensor":
        return importlib.import_module(framework_folder("import DTensor")).DTensor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
