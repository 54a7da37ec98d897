"""`checkpoint`: a call whose residuals are saved, recomputed or swapped, op by op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hyper_parallel.core.activation_checkpoint.options import check_call, in_own_words, options_of
from hyper_parallel.core.regions.policy import region_policy
from hyper_parallel.platform.torch.regions.arguments import saved_arguments
from hyper_parallel.platform.torch.regions.compiled_code import not_compiled, prepare_for_compiled_code
from hyper_parallel.platform.torch.regions.frame import Frame
from hyper_parallel.platform.torch.regions.left_as_found import left_as_found
from hyper_parallel.platform.torch.regions.surroundings import check_surroundings, is_replaying


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
        **kwargs: for `function`. `use_reentrant=False`, and a `context_fn` that the platform has made, are taken in other code's words.

    Raises:
        ValueError: another `use_reentrant` or `context_fn` was given, or `determinism_check` is neither of its two values.
        TypeError: `function` cannot be called, or `policy_fn` is neither a function nor a list of ops.

    Example:
        >>> x = torch.randn(8, 8, requires_grad=True)
        >>> loss = checkpoint(lambda y: y.sin().exp().sum(), x)
        >>> loss.backward()
    """
    prepare_for_compiled_code()
    check_call(function, determinism_check)
    if "use_reentrant" in kwargs or "context_fn" in kwargs:
        kwargs["policy_fn"] = policy_fn
        in_own_words("checkpoint", kwargs)
        policy_fn = kwargs.pop("policy_fn")
    policy = region_policy(policy_fn)
    # Inside a replay the ops are those of the region that is replayed: see "Nesting".
    if not torch.is_grad_enabled() or is_replaying():
        return function(*args, **kwargs)
    check_surroundings("A region")
    options = options_of(swap_inputs, preserve_rng_state, determinism_check, debug, early_stop)
    with left_as_found():
        return Frame(function, saved_arguments(args, kwargs), policy, options).forward(args, kwargs)
