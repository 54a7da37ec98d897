"""Wrapping a module, whichever framework it is of.

The framework of the module decides; a plain function takes the chosen one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError
from hyper_parallel.core.activation_checkpoint.backend import ActivationsBackend
from hyper_parallel.platform import platform_of
from hyper_parallel.platform.opaque import Module
from hyper_parallel.platform.selection import backend, bind


def checkpoint_wrapper(
    module: Module,
    checkpoint_impl: object = None,
    checkpoint_fn: Callable[..., Any] | None = None,
    policy_fn: object = None,
    swap_inputs: bool = False,
    **framework_options: Any,
) -> Any:
    """Make a module that computes what `module` does and keeps only its inputs until backward, or what a policy says.

    No name changes.

    Args:
        module: a module of PyTorch or MindSpore, or a plain function.
        checkpoint_impl: the framework's `CheckpointImpl`; `None` is `NO_REENTRANT`.
        checkpoint_fn: called as `checkpoint_fn(module, *args, **kwargs)`, with all options, in place of `checkpoint`.
        policy_fn: `policy_fn(ctx, op, *args, **kwargs)` decides per op; a list of ops saves these and recomputes the
            rest.
        swap_inputs: swap the tensors that the module is called with, too.
        framework_options: those of the framework's own checkpoint (`preserve_rng_state`, `determinism_check`, `debug`,
            `early_stop`).

    Raises:
        ValueError: `REENTRANT` with `policy_fn` or `swap_inputs`; a value that an option does not have.
        TypeError: `module` is neither a module nor callable; an option that does not exist.

    Example:
        >>> from torch import nn
        >>> sorted(checkpoint_wrapper(nn.Linear(2, 2), preserve_rng_state=False).state_dict())
        ['bias', 'weight']
    """
    if checkpoint_impl is not None:
        framework_options["checkpoint_impl"] = checkpoint_impl
    return _backend_of(module, "checkpoint_wrapper").checkpoint_wrapper(
        module, checkpoint_fn=checkpoint_fn, policy_fn=policy_fn, swap_inputs=swap_inputs, **framework_options
    )


def apply_activation_checkpointing(
    model: Module,
    checkpoint_wrapper_fn: Callable[..., Any] = checkpoint_wrapper,
    check_fn: Callable[[Any], Any] = lambda _: True,
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
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
        >>> [type(child).__name__ for child in model]
        ['CheckpointWrapper', 'ReLU']
    """
    call = "apply_activation_checkpointing"
    _check_given(model, call)
    found = backend(platform_of(model, call=call), ActivationsBackend, call)
    found.apply(model, checkpoint_wrapper_fn, check_fn, auto_wrap_policy)


def swap_wrapper(module: Module, policy_fn: Callable[[Any], Any] | None = None) -> Any:
    """Make a module that computes what `module` does and swaps its residuals until backward needs them.

    No name changes.

    Args:
        module: a module of PyTorch or MindSpore, or a plain function.
        policy_fn: called with each residual; `MUST_SAVE`, `PREFER_SAVE` and `True` keep the tensor, anything else of a
            policy swaps it. Without it all that are eligible are swapped.

    Raises:
        TypeError: `module` is neither a module nor callable, or `policy_fn` is not callable.

    Example:
        >>> from torch import nn
        >>> block = swap_wrapper(nn.Linear(2, 2), policy_fn=lambda tensor: tensor.numel() < 1024)
        >>> sorted(block.state_dict())
        ['bias', 'weight']
    """
    return _backend_of(module, "swap_wrapper").swap_wrapper(module, policy_fn)


def offload_wrapper(module: Module) -> Any:
    """Make a module that computes what `module` does and keeps every eligible residual on the host.

    No name changes.

    Raises:
        TypeError: `module` is neither a module nor callable.

    Example:
        >>> from torch import nn
        >>> sorted(offload_wrapper(nn.Linear(2, 2)).state_dict())
        ['bias', 'weight']
    """
    return _backend_of(module, "offload_wrapper").offload_wrapper(module)


def _backend_of(module: Module, call: str) -> ActivationsBackend:
    _check_given(module, call)
    try:
        platform = platform_of(module, call=call)
    except ArgumentTypeError:
        if not callable(module):
            raise
        platform = bind(f"{call}({getattr(module, '__qualname__', type(module).__name__)})")
    return backend(platform, ActivationsBackend, call)


def _check_given(module: Module, call: str) -> None:
    if module is None:  # a ValueError: the argument was forgotten rather than mistaken
        raise ArgumentError(f"`{call}` needs a module.", expected="a module or a function", got="None")
