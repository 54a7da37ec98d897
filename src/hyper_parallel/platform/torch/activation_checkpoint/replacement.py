"""Putting wrappers in the place of submodules: `apply_activation_checkpointing`.

In three steps, so that a model is wrapped whole or not at all: which modules, in post-order; a wrapper for each; then the
replacement, in every place that holds the module. A wrapper that is there already is a module with one child, as in PyTorch:
both it and what is inside can be chosen.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel.platform.arguments import check_module
from hyper_parallel.platform.torch.activation_checkpoint.activation_wrapper import (
    _CHECKPOINT_WRAPPED_MODULE,
    ActivationWrapper,
)
from hyper_parallel.platform.torch.activation_checkpoint.checkpoint_wrapper import checkpoint_wrapper

Chosen = dict[nn.Module, dict[str, Any]]  # in the order of wrapping, with the keywords for the wrapper


def apply_activation_checkpointing(
    model: nn.Module,
    checkpoint_wrapper_fn: Callable[..., Any] = checkpoint_wrapper,
    check_fn: Callable[[nn.Module], Any] = lambda _: True,
    auto_wrap_policy: Any = None,
) -> None:
    """Replace submodules of `model` by wrapped ones, in place; the model itself stays as it is.

    Args:
        model: the model whose submodules are wrapped.
        checkpoint_wrapper_fn: makes the wrapper of a module: `checkpoint_wrapper`, `swap_wrapper`, `offload_wrapper`, or one
            with options bound by `functools.partial`.
        check_fn: whether a submodule is wrapped. Where a module and one inside it are chosen, both are wrapped.
        auto_wrap_policy: takes the place of `check_fn`: a function `(module, recurse, nonwrapped_numel) -> bool`, or one of
            FSDP's policies; the keywords that `CustomPolicy` gives for a module reach the wrapper.

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
    _check_callable(checkpoint_wrapper_fn, "checkpoint_wrapper_fn", "makes the wrapper of a module")
    if hasattr(auto_wrap_policy, "_run_policy") and not callable(auto_wrap_policy):
        targets = auto_wrap_policy._run_policy(model, ignored_modules=set(), root_kwargs={})
        chosen = {module: targets[module] for module in _post_order(model) if module in targets}
    else:
        _check_not_wrapped(model, checkpoint_wrapper_fn)
        if auto_wrap_policy is None:
            _check_callable(check_fn, "check_fn", "says whether a module is wrapped")
            chosen = {module: {} for module in _post_order(model) if module is not model and check_fn(module)}
        else:
            chosen = _chosen_by(_as_policy_function(auto_wrap_policy), model)
    chosen.pop(model, None)
    _replace(model, {module: _wrapped(checkpoint_wrapper_fn, module, options) for module, options in chosen.items()})


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every place in `module` that holds a module, also one that is in two of them."""
    if isinstance(module, ActivationWrapper):
        yield _CHECKPOINT_WRAPPED_MODULE, module._checkpoint_wrapped_module
        return
    for name, child in module._modules.items():
        if child is not None:
            yield name, child


def _post_order(module: nn.Module, seen: set[nn.Module] | None = None) -> Iterator[nn.Module]:
    """Every module once, after those inside it; the root last."""
    seen = set() if seen is None else seen
    seen.add(module)
    for _, child in _children(module):
        if child not in seen:
            yield from _post_order(child, seen)
    yield module


def _chosen_by(policy: Callable[[nn.Module, bool, int], Any], model: nn.Module) -> Chosen:
    """What a policy about sizes chooses: asked on the way down whether to go on, on the way up with what is left unwrapped."""
    chosen: Chosen = {}
    wrapped_below: dict[nn.Module, set[nn.Parameter]] = {}

    def visit(module: nn.Module) -> set[nn.Parameter]:
        if module in wrapped_below:  # a shared one is decided on once
            return wrapped_below[module]
        parameters = set(module.parameters())
        wrapped = wrapped_below[module] = set()
        if not policy(module, True, _numel(parameters)):
            return wrapped
        for _, child in _children(module):
            wrapped |= visit(child)
        if module is not model and policy(module, False, _numel(parameters - wrapped)):
            chosen[module] = {}
            wrapped |= parameters
        return wrapped

    visit(model)
    return chosen


def _numel(parameters: set[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _as_policy_function(policy: Any) -> Callable[[nn.Module, bool, int], Any]:
    if not callable(policy) or isinstance(policy, type):
        raise ArgumentError(
            "`auto_wrap_policy` chooses what is wrapped.",
            expected="a function (module, recurse, nonwrapped_numel) -> bool, a ModuleWrapPolicy or a CustomPolicy",
            got=describe(policy),
            do="For a test of single modules use check_fn.",
        )
    try:  # PyTorch calls it with these keywords; a function with other names for them is meant the same way
        inspect.signature(policy).bind(module=None, recurse=True, nonwrapped_numel=0)
    except TypeError:
        return policy
    except ValueError:  # a callable without a signature
        pass
    return lambda module, recurse, numel: policy(module=module, recurse=recurse, nonwrapped_numel=numel)


def _wrapped(checkpoint_wrapper_fn: Callable[..., Any], module: nn.Module, options: dict[str, Any]) -> nn.Module:
    wrapper = checkpoint_wrapper_fn(module, **options)
    if not isinstance(wrapper, nn.Module):
        raise ArgumentTypeError(
            "`checkpoint_wrapper_fn` gives the module that takes the place of another.",
            expected="a module",
            got=describe(wrapper),
            where=type(module).__name__,
        )
    return wrapper


def _replace(model: nn.Module, wrappers: dict[nn.Module, nn.Module]) -> None:
    places = [
        (parent, name, child) for parent in _post_order(model) for name, child in _children(parent) if child in wrappers
    ]
    done = 0
    try:
        for parent, name, child in places:
            setattr(parent, name, wrappers[child])
            done += 1
    except BaseException:
        for parent, name, child in places[:done]:
            setattr(parent, name, child)
        raise


def _check_not_wrapped(model: nn.Module, checkpoint_wrapper_fn: Callable[..., Any]) -> None:
    # As PyTorch: a class says what the result looks like, so that wrapping twice by mistake can be seen; a function does not.
    if isinstance(checkpoint_wrapper_fn, type):
        for module in _post_order(model):
            if isinstance(module, checkpoint_wrapper_fn):
                raise ArgumentError(
                    f"The model has modules wrapped by {checkpoint_wrapper_fn.__name__} already.",
                    expected="none of them",
                    got=describe(module),
                    do="Wrap each module once, or give a function to wrap them again.",
                )


def _check_callable(value: Any, name: str, does: str) -> None:
    if not callable(value):
        raise ArgumentTypeError(f"`{name}` {does}.", expected="a callable", got=describe(value))
