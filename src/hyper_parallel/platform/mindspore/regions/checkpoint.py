"""`checkpoint`: a call whose residuals are saved, recomputed or swapped, op by op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import Tensor, nn
from mindspore.graph.api import _pynative_executor

from hyper_parallel.core.activation_checkpoint.options import check_call, in_own_words, options_of
from hyper_parallel.core.regions.arguments import SavedArguments, kinds_of
from hyper_parallel.core.regions.policy import region_policy
from hyper_parallel.platform.mindspore.regions.frame import Frame
from hyper_parallel.platform.mindspore.regions.graph_mode import refuse_graph_mode
from hyper_parallel.platform.mindspore.regions.replays import is_replaying

_KINDS = kinds_of(Tensor, nn.Cell)


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
        function: a cell or any callable. It runs a second time in backward.
        swap_inputs: whether the tensors among the arguments are swapped until then.
        policy_fn: `policy_fn(ctx, op, *args, **kwargs)`, asked for each op by its name ("MatMul"); or a list of ops to save. See
            `hp.policies`.
        preserve_rng_state: False does not bring random numbers back: the recomputation draws others.
        determinism_check: "none" does not compare the shapes and dtypes of recomputed results.
        debug: an error about the recomputation lists the ops.
        early_stop: False runs the function to its end in backward.
        **kwargs: for `function`. `use_reentrant=False`, and a `context_fn` that the platform has made, are taken in other code's words.

    Raises:
        ValueError: another `use_reentrant` or `context_fn` was given, or `determinism_check` is neither of its two values.
        TypeError: `function` cannot be called, or `policy_fn` is neither a function nor a list of ops.

    Example:
        >>> import mindspore
        >>> mindspore.grad(lambda x: checkpoint(lambda y: y.sin().exp().sum(), x))(mindspore.Tensor([0.0]))
        Tensor(shape=[1], dtype=Float32, value= [ 1.00000000e+00])
    """
    check_call(function, determinism_check)
    if "use_reentrant" in kwargs or "context_fn" in kwargs:
        kwargs["policy_fn"] = policy_fn
        in_own_words("checkpoint", kwargs)
        policy_fn = kwargs.pop("policy_fn")
    policy = region_policy(policy_fn)
    # Inside a replay the ops are those of the region that is replayed: see "Nesting".
    if not _pynative_executor.requires_grad() or is_replaying():
        return function(*args, **kwargs)
    refuse_graph_mode("A region")
    options = options_of(swap_inputs, preserve_rng_state, determinism_check, debug, early_stop)
    return Frame(function, SavedArguments(args, kwargs, _KINDS), policy, options).forward(args, kwargs)
