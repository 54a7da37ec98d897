"""The wrapper whose forward is a region: `checkpoint_wrapper`. It holds the options; `region` runs the call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, final

from mindspore import nn

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.activation_checkpoint.options import (
    TAKEN,
    CheckpointImpl,
    as_impl,
    check_callable,
    check_options,
    check_reentrant,
    in_own_words,
    name_of,
)
from hyper_parallel.platform.mindspore.regions.checkpoint import checkpoint
from hyper_parallel.platform.mindspore.wrappers.activation_wrapper import ActivationWrapper

__all__ = ["CheckpointImpl", "CheckpointWrapper", "checkpoint_wrapper"]


@final
class CheckpointWrapper(ActivationWrapper):
    """A cell whose forward is a region; made by `checkpoint_wrapper`."""

    OWN = ActivationWrapper.OWN | {"checkpoint_impl", "checkpoint_fn"}

    def __init__(
        self,
        mod: nn.Cell | Callable[..., Any],
        checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
        checkpoint_fn: Callable[..., Any] | None = None,
        **checkpoint_fn_kwargs: Any,
    ) -> None:
        impl = as_impl(checkpoint_impl)
        if checkpoint_fn is None:
            in_own_words("checkpoint_wrapper", checkpoint_fn_kwargs)
        check_reentrant(impl, checkpoint_fn_kwargs)
        if checkpoint_fn is None:
            _check_not_reentrant(impl)
            check_options(checkpoint_fn_kwargs)
        super().__init__(mod)
        self.__dict__["_checkpoint_impl"] = impl
        function = checkpoint if checkpoint_fn is None else check_callable(checkpoint_fn)
        self.checkpoint_fn = functools.partial(function, **checkpoint_fn_kwargs)
        self.__dict__["_has_default_fn"] = checkpoint_fn is None

    @property
    def checkpoint_impl(self) -> CheckpointImpl:
        """Return how the forward is run again."""
        impl: CheckpointImpl = self.__dict__["_checkpoint_impl"]
        return impl

    @checkpoint_impl.setter
    def checkpoint_impl(self, checkpoint_impl: CheckpointImpl) -> None:
        impl = as_impl(checkpoint_impl)
        check_reentrant(impl, getattr(self.checkpoint_fn, "keywords", {}))
        if self._has_default_fn:
            _check_not_reentrant(impl)
        self.__dict__["_checkpoint_impl"] = impl

    @property
    def checkpoint_fn(self) -> Callable[..., Any]:
        """Return what is called with the inner cell and the arguments of the call; the options are bound in it."""
        function: Callable[..., Any] = self.__dict__["_checkpoint_fn"]
        return function

    @checkpoint_fn.setter
    def checkpoint_fn(self, checkpoint_fn: Callable[..., Any]) -> None:
        self.__dict__["_checkpoint_fn"] = check_callable(checkpoint_fn)
        self.__dict__["_has_default_fn"] = False

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        if not self.runs_in_python:  # what compiles this to a graph reads it, and is refused there
            return None
        inner = self._ckpt_wrapped_module
        taken = TAKEN & kwargs.keys() if self._has_default_fn else None
        if taken:
            inner = functools.partial(inner, **{name: kwargs.pop(name) for name in taken})
        return self.checkpoint_fn(inner, *args, **kwargs)

    def extend_repr(self) -> str:
        function = self.checkpoint_fn
        shown = {}
        if not self._has_default_fn:
            shown["checkpoint_fn"] = name_of(getattr(function, "func", function))
        shown.update({name: name_of(value) for name, value in getattr(function, "keywords", {}).items()})
        return ", ".join(f"{name}={text}" for name, text in shown.items())


def checkpoint_wrapper(
    module: nn.Cell | Callable[..., Any],
    checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
    checkpoint_fn: Callable[..., Any] | None = None,
    policy_fn: object = None,
    swap_inputs: bool = False,
    **framework_options: Any,
) -> CheckpointWrapper:
    """Make a cell that computes what `module` does and keeps only its inputs until backward, or what a policy says.

    No name changes.

    Args:
        module: a cell, or a plain function.
        checkpoint_impl: `NO_REENTRANT`. MindSpore's reentrant form draws other random numbers and does not work on the
            tape; it is there as `checkpoint_fn=mindspore.recompute`.
        checkpoint_fn: called as `checkpoint_fn(module, *args, **kwargs)`, with all options, in place of this package's
            `checkpoint`.
        policy_fn: `policy_fn(ctx, op, *args, **kwargs)` decides per op; a list of ops saves these and recomputes the
            rest.
        swap_inputs: swap the tensors that the cell is called with, too.
        framework_options: `preserve_rng_state`, `determinism_check`, `debug`, `early_stop`; with a `checkpoint_fn`
            whatever it takes.

    Raises:
        ValueError: `REENTRANT`; a `use_reentrant` or `context_fn` that a region is not; a value that an option does not
            have.
        TypeError: `module` is neither a cell nor callable; an option that does not exist; a policy that is none.

    Example:
        >>> block = checkpoint_wrapper(nn.Dense(2, 2), policy_fn=["MatMul"])
        >>> sorted(name for name, _ in block.parameters_and_names())
        ['bias', 'weight']
    """
    region_options: dict[str, Any] = {}
    if policy_fn is not None:
        region_options["policy_fn"] = policy_fn
    if swap_inputs is not False:
        region_options["swap_inputs"] = swap_inputs
    return CheckpointWrapper(module, checkpoint_impl, checkpoint_fn, **region_options, **framework_options)


def _check_not_reentrant(impl: CheckpointImpl) -> None:
    if impl is CheckpointImpl.REENTRANT:
        raise ArgumentError(
            "MindSpore's reentrant recomputation draws other random numbers the second time, "
            "and does not work on the tape.",
            expected="CheckpointImpl.NO_REENTRANT",
            got="CheckpointImpl.REENTRANT",
            do="Leave checkpoint_impl out; who wants it nevertheless gives checkpoint_fn=mindspore.recompute.",
        )
