"""What regions and wrappers ask of a framework.

Each framework has one object that does it: `BACKEND` in `wrappers/backend.py` of its folder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from hyper_parallel.platform.opaque import Module

__all__ = ["ActivationsBackend"]


class ActivationsBackend(Protocol):
    """One framework's regions and wrappers.

    Options are the framework's own; what they mean is told in `region.py` and `wrap.py`.
    """

    folder: ClassVar[str] = "wrappers.backend"

    def checkpoint(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Any:
        """Run `function(*args)` as a region."""

    def checkpoint_wrapper(self, module: Module, **options: Any) -> Module: ...

    def swap_wrapper(self, module: Module, policy_fn: Callable[[Any], Any] | None) -> Module: ...

    def offload_wrapper(self, module: Module) -> Module: ...

    def apply(
        self,
        model: Module,
        wrapper_fn: Callable[..., Any],
        check_fn: Callable[[Any], Any],
        auto_wrap_policy: object,
    ) -> None:
        """Replace the modules in `model` that are chosen by wrapped ones."""

    def list_wrappers(self, model: Module) -> list[tuple[str, Module]]:
        """List the wrappers in `model` with their names, an outer one before those inside it."""
