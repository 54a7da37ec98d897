"""The options of a region, and what is said about those that it does not have."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, NamedTuple

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe


class CheckpointImpl(Enum):
    """How backward gets what it needs: by calling autograd inside autograd, or by running the forward again up to there."""

    REENTRANT = auto()
    NO_REENTRANT = auto()


class Options(NamedTuple):
    """How a region is run; see `checkpoint`."""

    swap_inputs: bool = False
    preserve_rng_state: bool = True
    check_outputs: bool = True
    debug: bool = False
    early_stop: bool = True


# The options that the region hands to the framework, with what each may be.
FRAMEWORK_OPTIONS: dict[str, tuple[Any, ...]] = {
    "preserve_rng_state": (True, False),
    "determinism_check": ("default", "none"),
    "debug": (True, False),
    "early_stop": (True, False),
}
REGION_OPTIONS = ("policy_fn", "swap_inputs", *FRAMEWORK_OPTIONS)

# PyTorch's, and what stands for them here.
REFUSED = {
    "use_reentrant": "Give checkpoint_impl=CheckpointImpl.REENTRANT or NO_REENTRANT.",
    "context_fn": "Give the policy itself as policy_fn.",
}

# Arguments of the region itself. A keyword of this name in a call of the wrapper is meant for the inner module.
TAKEN = frozenset({"function", *REFUSED, *REGION_OPTIONS})


def as_impl(value: Any) -> CheckpointImpl:
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


def check_reentrant(impl: CheckpointImpl, options: dict[str, Any]) -> None:
    given = [name for name in ("policy_fn", "swap_inputs") if options.get(name) not in (None, False)]
    if impl is CheckpointImpl.REENTRANT and given:
        raise ArgumentError(
            "Reentrant recomputation sees neither ops nor saved tensors.",
            expected="no policy_fn and no swap_inputs with CheckpointImpl.REENTRANT",
            got=" and ".join(given),
            do="Leave checkpoint_impl out: CheckpointImpl.NO_REENTRANT has both.",
        )


def check_options(options: dict[str, Any]) -> None:
    """What the region would refuse in the first forward is refused here, where the mistake is."""
    from hyper_parallel.core.activation_checkpoint.policies import as_policy_fn

    as_policy_fn(options.get("policy_fn"))
    if not isinstance(options.get("swap_inputs", False), bool):
        raise ArgumentTypeError(
            "`swap_inputs` is on or off.", expected="True or False", got=describe(options["swap_inputs"])
        )
    for name, value in options.items():
        if name in REFUSED:
            raise ArgumentError(
                f"`checkpoint_wrapper` has no option `{name}`.",
                expected=", ".join(REGION_OPTIONS),
                got=f"{name}={describe(value)}",
                do=REFUSED[name],
            )
        if name not in REGION_OPTIONS:
            raise ArgumentTypeError(
                f"`checkpoint_wrapper` has no option `{name}`.",
                expected=", ".join(REGION_OPTIONS),
                got=f"{name}={describe(value)}",
                do="Leave it out; an option of a function of yours needs that function as checkpoint_fn.",
            )
        accepted = FRAMEWORK_OPTIONS.get(name)
        if accepted is not None and not any(type(value) is type(one) and value == one for one in accepted):
            raise ArgumentError(
                f"`{name}` has no such value.", expected=" or ".join(map(repr, accepted)), got=describe(value)
            )


def check_callable(checkpoint_fn: Any) -> Any:
    if not callable(checkpoint_fn):
        raise ArgumentTypeError(
            "`checkpoint_fn` runs the module.",
            expected="a function checkpoint_fn(module, *args, **kwargs)",
            got=describe(checkpoint_fn),
        )
    return checkpoint_fn


def check_call(function: Any, determinism_check: str, kwargs: dict[str, Any]) -> None:
    """Refuse what a region cannot be called with; `kwargs` are the keywords for the function."""
    if not callable(function):
        raise ArgumentTypeError(
            "`checkpoint` runs a function.", expected="a module or a callable", got=describe(function)
        )
    for name in REFUSED:
        if name in kwargs:
            raise ArgumentError(
                f"`checkpoint` has no option `{name}`.",
                expected="policy_fn, swap_inputs, preserve_rng_state, determinism_check, debug or early_stop",
                got=f"{name}={describe(kwargs[name])}",
                do="Leave it out; `policy_fn` says what is saved, recomputed or swapped."
                if name == "context_fn"
                else "Leave it out: a region is never reentrant. `checkpoint_wrapper` has CheckpointImpl.REENTRANT.",
            )
    accepted = FRAMEWORK_OPTIONS["determinism_check"]
    if determinism_check not in accepted:
        raise ArgumentError(
            "`determinism_check` is not known.",
            expected=" or ".join(map(repr, accepted)),
            got=describe(determinism_check),
        )


def name_of(value: Any) -> str:
    """How a function or another option is shown."""
    return getattr(value, "__qualname__", None) or repr(value)
