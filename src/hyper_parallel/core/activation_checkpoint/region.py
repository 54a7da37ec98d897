"""Running a region, whichever framework the call is of."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from hyper_parallel._base.errors import ArgumentTypeError, describe
from hyper_parallel.core.activation_checkpoint.backend import ActivationsBackend
from hyper_parallel.platform import Platform, platform_of
from hyper_parallel.platform.selection import backend, bind, framework_of
from hyper_parallel.platform.trees import leaves


def checkpoint(
    function: Callable[..., Any], *args: Any, swap_inputs: bool = False, policy_fn: Any = None, **options: Any
) -> Any:
    """Run `function(*args)` as a region: what backward needs of it is recomputed, or saved or swapped as a policy says.

    The framework is that of the module that is called (or whose method is), else of the first tensor among the
    arguments, else the chosen one.

    Args:
        function: a module or a function.
        args: its positional arguments.
        swap_inputs: swap the tensors among the arguments, too.
        policy_fn: `policy_fn(ctx, op, *args, **kwargs)` decides per op, a list of ops saves these.
        options: `preserve_rng_state`, `determinism_check`, `debug` and `early_stop` go to the framework.
            `use_reentrant=False`, and a `context_fn` that the platform has made, are taken. Every other keyword goes to
            `function`.

    Raises:
        TypeError: `function` cannot be called.

    Example:
        >>> import torch
        >>> x = torch.ones(2, requires_grad=True)
        >>> checkpoint(lambda y, plus: (y.exp() + plus).sum(), x, plus=1).backward()
        >>> bool((x.grad == x.exp()).all())
        True
    """
    if not callable(function):
        raise ArgumentTypeError(
            "`checkpoint` runs a function.", expected="a module or a function first", got=describe(function)
        )
    return backend(_platform_of_call(function, args, options), ActivationsBackend, "checkpoint").checkpoint(
        function, *args, swap_inputs=swap_inputs, policy_fn=policy_fn, **options
    )


def _platform_of_call(function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Platform:
    for thing in _what_may_tell(function, args, options):
        if framework_of(thing) is not None:
            return platform_of(thing, call="checkpoint")
    return bind(f"checkpoint({getattr(function, '__qualname__', type(function).__name__)})")


def _what_may_tell(function: object, args: tuple[Any, ...], options: dict[str, Any]) -> Iterator[Any]:
    while isinstance(function, functools.partial):
        args, options = (*function.args, *args), {**function.keywords, **options}
        function = function.func
    yield function
    yield getattr(function, "__self__", None)
    yield from leaves(args)
    yield from leaves(options)
