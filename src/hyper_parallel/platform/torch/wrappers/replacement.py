"""Putting wrappers in the place of submodules: `apply_activation_checkpointing`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hyper_parallel.core.activation_checkpoint.replacement import Tree, post_order, replace_submodules, wrap_chosen
from hyper_parallel.platform.arguments import check_module
from hyper_parallel.platform.torch.wrappers.activation_wrapper import children_of
from hyper_parallel.platform.torch.wrappers.checkpoint_wrapper import checkpoint_wrapper


def apply_activation_checkpointing(
    model: nn.Module,
    checkpoint_wrapper_fn: Callable[..., Any] = checkpoint_wrapper,
    check_fn: Callable[[nn.Module], Any] = lambda _: True,
    auto_wrap_policy: object = None,
) -> None:
    """Replace submodules of `model` by wrapped ones, in place; the model itself stays as it is.

    Args:
        model: the model whose submodules are wrapped.
        checkpoint_wrapper_fn: makes the wrapper of a module: `checkpoint_wrapper`, `swap_wrapper`, `offload_wrapper`,
            or one with options bound by `functools.partial`.
        check_fn: whether a submodule is wrapped. Where a module and one inside it are chosen, both are wrapped.
        auto_wrap_policy: takes the place of `check_fn`: a function `(module, recurse, nonwrapped_numel) -> bool`, or
            one of FSDP's policies; the keywords that `CustomPolicy` gives for a module reach the wrapper.

    Raises:
        ValueError: `auto_wrap_policy` is neither a function nor a policy.
        TypeError: `check_fn` or `checkpoint_wrapper_fn` cannot be called, or the latter returned no module.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
        >>> [type(child).__name__ for child in model]
        ['CheckpointWrapper', 'ReLU']
    """
    check_module(model, nn.Module, "apply_activation_checkpointing")
    if hasattr(auto_wrap_policy, "_run_policy") and not callable(auto_wrap_policy):
        targets = auto_wrap_policy._run_policy(model, ignored_modules=set(), root_kwargs={})
        chosen = {module: targets[module] for module in post_order(TREE, model) if module in targets}
        wrap_chosen(TREE, model, checkpoint_wrapper_fn, chosen)
    else:
        replace_submodules(TREE, model, checkpoint_wrapper_fn, check_fn, auto_wrap_policy)


TREE = Tree(nn.Module, children_of, nn.Module.parameters, torch.Tensor.numel, setattr)
