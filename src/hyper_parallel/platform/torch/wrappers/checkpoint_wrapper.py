"""The wrapper whose forward is a region: `checkpoint_wrapper`.

It holds the options; `regions.checkpoint` and `compat.reentrant` run the call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, final

import torch.utils.checkpoint
from torch import nn

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
from hyper_parallel.platform.torch.regions.checkpoint import checkpoint
from hyper_parallel.platform.torch.regions.compiled_code import not_compiled, prepare_for_compiled_code
from hyper_parallel.platform.torch.wrappers.activation_wrapper import ActivationWrapper

__all__ = ["CheckpointImpl", "CheckpointWrapper", "checkpoint_wrapper"]


@final
class CheckpointWrapper(ActivationWrapper):
    """A module whose forward is a region; made by `checkpoint_wrapper`."""

    OWN = ActivationWrapper.OWN | {"checkpoint_impl", "checkpoint_fn"}

    def __init__(
        self,
        mod: nn.Module | Callable[..., Any],
        checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
        checkpoint_fn: Callable[..., Any] | None = None,
        **checkpoint_fn_kwargs: Any,
    ) -> None:
        impl = as_impl(checkpoint_impl)
        if checkpoint_fn is None:
            in_own_words("checkpoint_wrapper", checkpoint_fn_kwargs)
        check_reentrant(impl, checkpoint_fn_kwargs)
        own_fn = None if checkpoint_fn is not None else _default_fn(impl, checkpoint_fn_kwargs)
        super().__init__(mod)
        self.__dict__["_checkpoint_impl"] = impl
        self.__dict__["_options"] = checkpoint_fn_kwargs
        if own_fn is None:
            self.checkpoint_fn = functools.partial(check_callable(checkpoint_fn), **checkpoint_fn_kwargs)
        else:
            self.checkpoint_fn = own_fn
        self.__dict__["_has_default_fn"] = own_fn is not None
        prepare_for_compiled_code(before_it_is_compiled=True)

    @property
    def checkpoint_impl(self) -> CheckpointImpl:
        """Return how the forward is run again."""
        return self.__dict__["_checkpoint_impl"]

    @checkpoint_impl.setter
    def checkpoint_impl(self, checkpoint_impl: CheckpointImpl) -> None:
        impl, options = as_impl(checkpoint_impl), self.__dict__["_options"]
        check_reentrant(impl, options)
        if self._has_default_fn:
            self.__dict__["_checkpoint_fn"] = _default_fn(impl, options)
        self.__dict__["_checkpoint_impl"] = impl

    @property
    def checkpoint_fn(self) -> Callable[..., Any]:
        """Return what is called with the inner module and the arguments of the call; the options are bound in it."""
        return self.__dict__["_checkpoint_fn"]

    @checkpoint_fn.setter
    def checkpoint_fn(self, checkpoint_fn: Callable[..., Any]) -> None:
        self.__dict__["_checkpoint_fn"] = check_callable(checkpoint_fn)
        self.__dict__["_has_default_fn"] = False

    @not_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inner = self._checkpoint_wrapped_module
        if self.checkpoint_impl is CheckpointImpl.REENTRANT:
            from hyper_parallel.platform.torch.compat.reentrant import run_packed, run_reentrant

            run = run_reentrant if self._has_default_fn else run_packed
            return run(self.checkpoint_fn, inner, args, kwargs)
        taken = TAKEN & kwargs.keys() if self._has_default_fn else None
        if taken:
            inner = functools.partial(inner, **{name: kwargs.pop(name) for name in taken})
        return self.checkpoint_fn(inner, *args, **kwargs)

    def extra_repr(self) -> str:
        fn = self.checkpoint_fn
        shown = {} if self.checkpoint_impl is CheckpointImpl.NO_REENTRANT else {"checkpoint_impl": "REENTRANT"}
        if not self._has_default_fn:
            shown["checkpoint_fn"] = name_of(getattr(fn, "func", fn))
        options = {name: value for name, value in getattr(fn, "keywords", {}).items() if name != "use_reentrant"}
        shown.update({name: name_of(value) for name, value in options.items()})
        return ", ".join(f"{name}={text}" for name, text in shown.items())


def checkpoint_wrapper(
    module: nn.Module | Callable[..., Any],
    checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
    checkpoint_fn: Callable[..., Any] | None = None,
    policy_fn: object = None,
    swap_inputs: bool = False,
    **framework_options: Any,
) -> CheckpointWrapper:
    """Make a module that computes what `module` does and keeps only its inputs until backward, or what a policy says.

    No name changes.

    Args:
        module: a module, or a plain function.
        checkpoint_impl: `NO_REENTRANT`, or `REENTRANT` for PyTorch's older form, which takes no policy.
        checkpoint_fn: called as `checkpoint_fn(module, *args, **kwargs)`, with all options, in place of this package's
            `checkpoint`.
        policy_fn: `policy_fn(ctx, op, *args, **kwargs)` decides per op; a list of ops saves these and recomputes the
            rest.
        swap_inputs: swap the tensors that the module is called with, too.
        framework_options: `preserve_rng_state`, `determinism_check`, `debug`, `early_stop`; with a `checkpoint_fn`
            whatever it takes.

    Raises:
        ValueError: `REENTRANT` with `policy_fn` or `swap_inputs`; a `use_reentrant` or `context_fn` that a region is
            not; a value that an option does not have.
        TypeError: `module` is neither a module nor callable; an option that does not exist; a policy that is none.

    Example:
        >>> block = checkpoint_wrapper(nn.Linear(2, 2), policy_fn=[torch.ops.aten.addmm.default])
        >>> sorted(block.state_dict())
        ['bias', 'weight']
    """
    region_options: dict[str, Any] = {}
    if policy_fn is not None:
        region_options["policy_fn"] = policy_fn
    if swap_inputs is not False:
        region_options["swap_inputs"] = swap_inputs
    return CheckpointWrapper(module, checkpoint_impl, checkpoint_fn, **region_options, **framework_options)


def _default_fn(impl: CheckpointImpl, options: dict[str, Any]) -> Callable[..., Any]:
    check_options(options)
    if impl is CheckpointImpl.NO_REENTRANT:
        return functools.partial(checkpoint, **options)
    if options.get("debug"):
        raise ArgumentError(
            "Reentrant recomputation keeps no trace of its operators.",
            expected="debug=False with CheckpointImpl.REENTRANT",
            got="debug=True",
            do="Use CheckpointImpl.NO_REENTRANT to debug.",
        )
    # It compares nothing and always runs to the end, whatever `determinism_check` and `early_stop` are, as in PyTorch.
    return functools.partial(
        torch.utils.checkpoint.checkpoint,
        use_reentrant=True,
        preserve_rng_state=options.get("preserve_rng_state", True),
    )
