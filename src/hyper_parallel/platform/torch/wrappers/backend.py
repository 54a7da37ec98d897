"""The regions and wrappers of PyTorch, as the core asks for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn

from hyper_parallel.core.activation_checkpoint.backend import ActivationsBackend
from hyper_parallel.platform.torch.regions.checkpoint import checkpoint
from hyper_parallel.platform.torch.wrappers.activation_wrapper import list_wrappers
from hyper_parallel.platform.torch.wrappers.checkpoint_wrapper import checkpoint_wrapper
from hyper_parallel.platform.torch.wrappers.replacement import apply_activation_checkpointing
from hyper_parallel.platform.torch.wrappers.swap_wrapper import offload_wrapper, swap_wrapper


class TorchActivations:
    """What `ActivationsBackend` asks for. Each function checks what it is given: a user may have given it."""

    folder: ClassVar[str] = ActivationsBackend.folder
    checkpoint = staticmethod(checkpoint)  # speed: one call less per region

    def checkpoint_wrapper(self, module: nn.Module, **options: Any) -> nn.Module:
        return checkpoint_wrapper(module, **options)

    def swap_wrapper(self, module: nn.Module, policy_fn: Callable[[Any], Any] | None) -> nn.Module:
        return swap_wrapper(module, policy_fn)

    def offload_wrapper(self, module: nn.Module) -> nn.Module:
        return offload_wrapper(module)

    def apply(
        self,
        model: nn.Module,
        wrapper_fn: Callable[..., Any],
        check_fn: Callable[[Any], Any],
        auto_wrap_policy: object,
    ) -> None:
        apply_activation_checkpointing(model, wrapper_fn, check_fn, auto_wrap_policy)

    def list_wrappers(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        return list(list_wrappers(model))


BACKEND: ActivationsBackend = TorchActivations()
