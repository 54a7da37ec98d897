"""The wrapper whose forward is a region: `checkpoint_wrapper`. It holds the options; `region` and `reentrant` run the call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, final

import torch.utils.checkpoint
from torch import nn

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel.platform.torch.activation_checkpoint.activation_wrapper import ActivationWrapper
from hyper_parallel.platform.torch.activation_checkpoint.compiled_code import not_compiled, prepare_for_compiled_code

__all__ = ["CheckpointImpl", "CheckpointWrapper", "checkpoint_wrapper"]


class CheckpointImpl(Enum):
    """How backward gets what it needs: by calling autograd inside autograd, or by running the forward again up to there."""

    REENTRANT = auto()
    NO_REENTRANT = auto()


# The options that the region hands to the framework, with what each may be.
_FRAMEWORK_OPTIONS: dict[str, tuple[Any, ...]] = {
    "preserve_rng_state": (True, False),
    "determinism_check": ("default", "none"),
    "debug": (True, False),
    "early_stop": (True, False),
}
_REGION_OPTIONS = ("policy_fn", "swap_inputs", *_FRAMEWORK_OPTIONS)

# PyTorch's, and what stands for them here.
_REFUSED = {
    "use_reentrant": "Give checkpoint_impl=CheckpointImpl.REENTRANT or NO_REENTRANT.",
    "context_fn": "Give the policy itself as policy_fn.",
}

# Arguments of the region itself. A keyword of this name in a call of the wrapper is meant for the inner module.
_TAKEN = frozenset({"function", *_REFUSED, *_REGION_OPTIONS})


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
        impl = _as_impl(checkpoint_impl)
        _check_reentrant(impl, checkpoint_fn_kwargs)
        own_fn = None if checkpoint_fn is not None else _default_fn(impl, checkpoint_fn_kwargs)
        super().__init__(mod)
        self.__dict__["_checkpoint_impl"] = impl
        if own_fn is None:
            self.checkpoint_fn = functools.partial(_check_callable(checkpoint_fn), **checkpoint_fn_kwargs)
        else:
            self.checkpoint_fn = own_fn
        self.__dict__["_has_default_fn"] = own_fn is not None
        prepare_for_compiled_code(before_it_is_compiled=True)

    @property
    def checkpoint_impl(self) -> CheckpointImpl:
        """Decided when wrapping."""
        return self.__dict__["_checkpoint_impl"]

    @property
    def checkpoint_fn(self) -> Callable[..., Any]:
        """Called with the inner module and the arguments of the call; the options are bound in it."""
        return self.__dict__["_checkpoint_fn"]

    @checkpoint_fn.setter
    def checkpoint_fn(self, checkpoint_fn: Callable[..., Any]) -> None:
        self.__dict__["_checkpoint_fn"] = _check_callable(checkpoint_fn)
        self.__dict__["_has_default_fn"] = False

    @not_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inner = self._checkpoint_wrapped_module
        if self.checkpoint_impl is CheckpointImpl.REENTRANT:
            from hyper_parallel.platform.torch.activation_checkpoint.reentrant import run_packed, run_reentrant

            run = run_reentrant if self._has_default_fn else run_packed
            return run(self.checkpoint_fn, inner, args, kwargs)
        taken = _TAKEN & kwargs.keys() if self._has_default_fn else None
        if taken:
            inner = functools.partial(inner, **{name: kwargs.pop(name) for name in taken})
        return self.checkpoint_fn(inner, *args, **kwargs)

    def extra_repr(self) -> str:
        fn = self.checkpoint_fn
        shown = {} if self.checkpoint_impl is CheckpointImpl.NO_REENTRANT else {"checkpoint_impl": "REENTRANT"}
        if not self._has_default_fn:
            shown["checkpoint_fn"] = _name(getattr(fn, "func", fn))
        options = {name: value for name, value in getattr(fn, "keywords", {}).items() if name != "use_reentrant"}
        shown.update({name: _name(value) for name, value in options.items()})
        return ", ".join(f"{name}={text}" for name, text in shown.items())


def checkpoint_wrapper(
    module: nn.Module | Callable[..., Any],
    checkpoint_impl: CheckpointImpl = CheckpointImpl.NO_REENTRANT,
    checkpoint_fn: Callable[..., Any] | None = None,
    policy_fn: Any = None,
    swap_inputs: bool = False,
    **framework_options: Any,
) -> CheckpointWrapper:
    """A module that computes what `module` does and keeps only its inputs until backward, or what a policy says. No name changes.

    Args:
        module: a module, or a plain function.
        checkpoint_impl: `NO_REENTRANT`, or `REENTRANT` for PyTorch's older form, which takes no policy.
        checkpoint_fn: called as `checkpoint_fn(module, *args, **kwargs)`, with all options, in place of this package's
            `checkpoint`.
        policy_fn: `policy_fn(ctx, op, *args, **kwargs)` decides per op; a list of ops saves these and recomputes the rest.
        swap_inputs: swap the tensors that the module is called with, too.
        framework_options: `preserve_rng_state`, `determinism_check`, `debug`, `early_stop`; with a `checkpoint_fn` whatever it
            takes.

    Raises:
        ValueError: `REENTRANT` with `policy_fn` or `swap_inputs`; `use_reentrant` or `context_fn`; a value that an option does
            not have.
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
    _check_options(options)
    if impl is CheckpointImpl.NO_REENTRANT:
        from hyper_parallel.platform.torch.activation_checkpoint.region import checkpoint

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


def _as_impl(value: Any) -> CheckpointImpl:
    # PyTorch's own enum is known by its name; importing it here would import torch.distributed.
    if (
        isinstance(value, Enum)
        and type(value).__name__ == "CheckpointImpl"
        and value.name in CheckpointImpl.__members__
    ):
        return CheckpointImpl[value.name]
    raise ArgumentTypeError(
        "`checkpoint_impl` says how to recompute.",
        expected="CheckpointImpl.REENTRANT or CheckpointImpl.NO_REENTRANT",
        got=describe(value),
    )


def _check_reentrant(impl: CheckpointImpl, options: dict[str, Any]) -> None:
    given = [name for name in ("policy_fn", "swap_inputs") if options.get(name) not in (None, False)]
    if impl is CheckpointImpl.REENTRANT and given:
        raise ArgumentError(
            "Reentrant recomputation sees neither ops nor saved tensors.",
            expected="no policy_fn and no swap_inputs with CheckpointImpl.REENTRANT",
            got=" and ".join(given),
            do="Leave checkpoint_impl out: CheckpointImpl.NO_REENTRANT has both.",
        )


def _check_options(options: dict[str, Any]) -> None:
    """What the region would refuse in the first forward is refused here, where the mistake is."""
    from hyper_parallel.core.activation_checkpoint.policies import as_policy_fn

    as_policy_fn(options.get("policy_fn"))
    if not isinstance(options.get("swap_inputs", False), bool):
        raise ArgumentTypeError(
            "`swap_inputs` is on or off.", expected="True or False", got=describe(options["swap_inputs"])
        )
    for name, value in options.items():
        if name in _REFUSED:
            raise ArgumentError(
                f"`checkpoint_wrapper` has no option `{name}`.",
                expected=", ".join(_REGION_OPTIONS),
                got=f"{name}={describe(value)}",
                do=_REFUSED[name],
            )
        if name not in _REGION_OPTIONS:
            raise ArgumentTypeError(
                f"`checkpoint_wrapper` has no option `{name}`.",
                expected=", ".join(_REGION_OPTIONS),
                got=f"{name}={describe(value)}",
                do="Leave it out; an option of a function of yours needs that function as checkpoint_fn.",
            )
        accepted = _FRAMEWORK_OPTIONS.get(name)
        if accepted is not None and not any(type(value) is type(one) and value == one for one in accepted):
            raise ArgumentError(
                f"`{name}` has no such value.", expected=" or ".join(map(repr, accepted)), got=describe(value)
            )


def _check_callable(checkpoint_fn: Any) -> Callable[..., Any]:
    if not callable(checkpoint_fn):
        raise ArgumentTypeError(
            "`checkpoint_fn` runs the module.",
            expected="a function checkpoint_fn(module, *args, **kwargs)",
            got=describe(checkpoint_fn),
        )
    return checkpoint_fn


def _name(value: Any) -> str:
    return getattr(value, "__qualname__", None) or repr(value)
