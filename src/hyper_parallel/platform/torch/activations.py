"""What backward needs: regions, contexts and wrappers.

Each is made in `activation_checkpoint`, which is loaded when the first of them is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch.utils.checkpoint


def _features() -> Any:
    """Load the package that has them by their public names.

    Not before the first is used: that package is made of the platform.
    """
    from hyper_parallel.platform.torch import activation_checkpoint

    return activation_checkpoint


class Activations:
    @property
    def checkpoint(self) -> Callable[..., Any]:
        """The function that runs a region."""
        return _features().checkpoint

    @property
    def noop_context_fn(self) -> Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]:
        """A function that gives two contexts that do nothing."""
        return torch.utils.checkpoint.noop_context_fn

    @staticmethod
    def create_selective_checkpoint_contexts(
        policy_fn_or_list: object, allow_cache_entry_mutation: bool = False
    ) -> Any:
        return _features().create_selective_checkpoint_contexts(policy_fn_or_list, allow_cache_entry_mutation)

    @staticmethod
    def async_save_on_cpu(policy_fn: Callable[[torch.Tensor], Any] | None = None) -> Any:
        return _features().AsyncSaveOnCpu(policy_fn)

    @staticmethod
    def ckpt_wrapper(
        module: object, checkpoint_fn: Callable[..., Any] | None = None, **checkpoint_fn_kwargs: Any
    ) -> Any:
        """Make a module whose forward is a region, run by `checkpoint_fn(module, *args, **kwargs)` with these keywords.

        Without a function PyTorch's own non-reentrant checkpoint runs it, unless there is something that only this
        package's `checkpoint` can do (`policy_fn`, `swap_inputs`) or that the wrapper decides (`checkpoint_impl`).
        """
        if checkpoint_fn is None and not {"policy_fn", "swap_inputs", "checkpoint_impl"} & checkpoint_fn_kwargs.keys():
            checkpoint_fn = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
        return _features().checkpoint_wrapper(module, checkpoint_fn=checkpoint_fn, **checkpoint_fn_kwargs)

    @staticmethod
    def swap_wrapper(module: object, policy_fn: Callable[[Any], Any] | None = None) -> Any:
        return _features().swap_wrapper(module, policy_fn)
