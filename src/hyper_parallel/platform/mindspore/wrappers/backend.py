"""The regions and wrappers of MindSpore, as the core asks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from mindspore import nn

from hyper_parallel.core.activation_checkpoint.backend import ActivationsBackend
from hyper_parallel.platform.mindspore.regions.checkpoint import checkpoint
from hyper_parallel.platform.mindspore.wrappers.activation_wrapper import list_wrappers
from hyper_parallel.platform.mindspore.wrappers.checkpoint_wrapper import checkpoint_wrapper
from hyper_parallel.platform.mindspore.wrappers.replacement import apply_activation_checkpointing
from hyper_parallel.platform.mindspore.wrappers.swap_wrapper import offload_wrapper, swap_wrapper


class MindSporeActivations:
    """What `ActivationsBackend` asks for. Each function checks what it is given: a user may have given it."""

    folder: ClassVar[str] = ActivationsBackend.folder
    checkpoint = staticmethod(checkpoint)  # speed: one call less per region

    def checkpoint_wrapper(self, module: nn.Cell, **options: Any) -> nn.Cell:
        return checkpoint_wrapper(module, **options)

    def swap_wrapper(self, module: nn.Cell, policy_fn: Callable[[Any], Any] | None) -> nn.Cell:
        return swap_wrapper(module, policy_fn)

    def offload_wrapper(self, module: nn.Cell) -> nn.Cell:
        return offload_wrapper(module)

    def apply(
        self,
        model: nn.Cell,
        wrapper_fn: Callable[..., Any],
        check_fn: Callable[[Any], Any],
        auto_wrap_policy: object,
    ) -> None:
        apply_activation_checkpointing(model, wrapper_fn, check_fn, auto_wrap_policy)

    def list_wrappers(self, model: nn.Cell) -> list[tuple[str, nn.Cell]]:
        return list(list_wrappers(model))


BACKEND: ActivationsBackend = MindSporeActivations()
