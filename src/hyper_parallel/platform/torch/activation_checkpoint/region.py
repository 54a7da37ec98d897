"""`checkpoint`: a call whose residuals are saved, recomputed or swapped, op by op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel.platform.torch.activation_checkpoint.arguments import SavedArguments
from hyper_parallel.platform.torch.activation_checkpoint.compiled_code import not_compiled, prepare_for_compiled_code
from hyper_parallel.platform.torch.activation_checkpoint.frame import Frame, Options
from hyper_parallel.platform.torch.activation_checkpoint.surroundings import check_surroundings, is_replaying

_DETERMINISM_CHECKS = ("default", "none")


@not_compiled
def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    swap_inputs: bool = False,
    policy_fn: Any = None,
    preserve_rng_state: bool = True,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    **kwargs: Any,
) -> Any:
    """Call `function(*args, **kwargs)` as a region: what backward needs is recomputed, unless the policy saves or swaps it.

    Args:
        function: a module or any callable. It runs a second time in backward.
        swap_inputs: whether the tensors among the arguments are swapped until then.
        policy_fn: `policy_fn(ctx, op, *args, **kwargs)`, asked for each op; or a list of ops to save. See `hp.policies`.
        preserve_rng_state: False does not bring random numbers back: the recomputation draws others.
        determinism_check: "none" does not compare the shapes and dtypes of recomputed results.
        debug: an error about the recomputation lists the ops.
        early_stop: False runs the function to its end in backward.
        **kwargs: for `function`.

    Raises:
        ValueError: `use_reentrant` or `context_fn` was given, or `determinism_check` is neither of its two values.
        TypeError: `function` cannot be called, or `policy_fn` is neither a function nor a list of ops.

    Example:
        >>> x = torch.randn(8, 8, requires_grad=True)
        >>> loss = checkpoint(lambda y: y.sin().exp().sum(), x)
        >>> loss.backward()
    """
    from hyper_parallel.core.activation_checkpoint.policies import as_policy_fn

    prepare_for_compiled_code()
    _check(function, determinism_check, kwargs)
    policy = None if policy_fn is None else as_policy_fn(policy_fn)
    # Inside a replay the ops are those of the region that is replayed: see "Nesting".
    if not torch.is_grad_enabled() or is_replaying():
        return function(*args, **kwargs)
    check_surroundings("A region")
    options = Options(swap_inputs, preserve_rng_state, determinism_check == "default", debug, early_stop)
    return Frame(function, SavedArguments(args, kwargs), policy, options).forward(args, kwargs)


def _check(function: Any, determinism_check: str, kwargs: dict[str, Any]) -> None:
    if not callable(function):
        raise ArgumentTypeError(
            "`checkpoint` runs a function.", expected="a module or a callable", got=describe(function)
        )
    for name in ("use_reentrant", "context_fn"):
        if name in kwargs:
            raise ArgumentError(
                f"`checkpoint` has no option `{name}`.",
                expected="policy_fn, swap_inputs, preserve_rng_state, determinism_check, debug or early_stop",
                got=f"{name}={describe(kwargs[name])}",
                do="Leave it out; `policy_fn` says what is saved, recomputed or swapped."
                if name == "context_fn"
                else "Leave it out: a region is never reentrant. `checkpoint_wrapper` has CheckpointImpl.REENTRANT.",
            )
    if determinism_check not in _DETERMINISM_CHECKS:
        raise ArgumentError(
            "`determinism_check` is not known.",
            expected=" or ".join(map(repr, _DETERMINISM_CHECKS)),
            got=describe(determinism_check),
        )
