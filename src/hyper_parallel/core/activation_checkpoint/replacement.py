"""Putting wrappers in the place of submodules, whatever the framework's tree of modules looks like.

In three steps, so that a model is wrapped whole or not at all: which modules, in post-order; a wrapper for each; then
the replacement, in every place that holds the module. A wrapper that is there already is a module with one child, as in
PyTorch: both it and what is inside can be chosen.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel.platform.opaque import Module

Chosen = dict[Any, dict[str, Any]]  # in the order of wrapping, with the keywords for the wrapper


class Tree(NamedTuple):
    """How a framework's modules hang together."""

    module: type
    children: Callable[
        [Any], Iterable[tuple[str, Any]]
    ]  # every place in a module that holds one, also one that is in two of them
    parameters: Callable[[Any], Iterable[Any]]
    numel: Callable[[Any], int]
    put: Callable[[Any, str, Any], None]  # a module in a place of its parent


def replace_submodules(
    tree: Tree, model: Module, checkpoint_wrapper_fn: Callable[..., Any], check_fn: Callable[[Any], Any], policy: object
) -> None:
    """Do what `apply_activation_checkpointing` does, after the framework has looked at its own kinds of policies."""
    _check_callable(checkpoint_wrapper_fn, "checkpoint_wrapper_fn", "makes the wrapper of a module")
    _check_not_wrapped(tree, model, checkpoint_wrapper_fn)
    if policy is None:
        _check_callable(check_fn, "check_fn", "says whether a module is wrapped")
        chosen: Chosen = {module: {} for module in post_order(tree, model) if module is not model and check_fn(module)}
    else:
        chosen = _chosen_by(tree, _as_policy_function(policy), model)
    wrap_chosen(tree, model, checkpoint_wrapper_fn, chosen)


def wrap_chosen(tree: Tree, model: Module, checkpoint_wrapper_fn: Callable[..., Any], chosen: Chosen) -> None:
    """Wrap the chosen modules, but never the root."""
    _check_callable(checkpoint_wrapper_fn, "checkpoint_wrapper_fn", "makes the wrapper of a module")
    chosen.pop(model, None)
    wrappers = {module: _wrapped(tree, checkpoint_wrapper_fn, module, options) for module, options in chosen.items()}
    replace(tree, model, wrappers)


def post_order(tree: Tree, module: Module, seen: set[Any] | None = None) -> Iterator[Any]:
    """Go through every module once, after those inside it; the root last."""
    seen = set() if seen is None else seen
    seen.add(module)
    for _, child in tree.children(module):
        if child not in seen:
            yield from post_order(tree, child, seen)
    yield module


def _chosen_by(tree: Tree, policy: Callable[[Any, bool, int], Any], model: Module) -> Chosen:
    """Choose modules as a policy about sizes says.

    It is asked on the way down whether to go on, and on the way up with what is left unwrapped.
    """
    chosen: Chosen = {}
    wrapped_below: dict[Any, dict[int, Any]] = {}

    def numel(parameters: dict[int, Any]) -> int:
        return sum(tree.numel(parameter) for parameter in parameters.values())

    def visit(module: Module) -> dict[int, Any]:
        if module in wrapped_below:  # a shared one is decided on once
            return wrapped_below[module]
        parameters = {id(parameter): parameter for parameter in tree.parameters(module)}
        wrapped = wrapped_below[module] = {}
        if not policy(module, True, numel(parameters)):
            return wrapped
        for _, child in tree.children(module):
            wrapped |= visit(child)
        left = {key: parameter for key, parameter in parameters.items() if key not in wrapped}
        if module is not model and policy(module, False, numel(left)):
            chosen[module] = {}
            wrapped |= parameters
        return wrapped

    visit(model)
    return chosen


def _as_policy_function(policy: object) -> Any:
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


def _wrapped(tree: Tree, checkpoint_wrapper_fn: Callable[..., Any], module: Module, options: dict[str, Any]) -> Any:
    wrapper = checkpoint_wrapper_fn(module, **options)
    if not isinstance(wrapper, tree.module):
        raise ArgumentTypeError(
            "`checkpoint_wrapper_fn` gives the module that takes the place of another.",
            expected="a module",
            got=describe(wrapper),
            where=type(module).__name__,
        )
    return wrapper


def replace(tree: Tree, model: Any, wrappers: dict[Any, Any]) -> None:
    """Put each wrapper in every place of its module; all of them, or none."""
    places = [
        (parent, name, child)
        for parent in post_order(tree, model)
        for name, child in tree.children(parent)
        if child in wrappers
    ]
    done = 0
    try:
        for parent, name, child in places:
            tree.put(parent, name, wrappers[child])
            done += 1
    except BaseException:
        for parent, name, child in places[:done]:
            tree.put(parent, name, child)
        raise


def _check_not_wrapped(tree: Tree, model: Module, checkpoint_wrapper_fn: Callable[..., Any]) -> None:
    # As PyTorch: a class says what the result looks like, so that wrapping twice by mistake can be seen; a function
    # does not.
    if isinstance(checkpoint_wrapper_fn, type):
        for module in post_order(tree, model):
            if isinstance(module, checkpoint_wrapper_fn):
                raise ArgumentError(
                    f"The model has modules wrapped by {checkpoint_wrapper_fn.__name__} already.",
                    expected="none of them",
                    got=describe(module),
                    do="Wrap each module once, or give a function to wrap them again.",
                )


def _check_callable(value: object, name: str, does: str) -> None:
    if not callable(value):
        raise ArgumentTypeError(f"`{name}` {does}.", expected="a callable", got=describe(value))
