"""The options of a region, and what is said about those that it does not have."""

from __future__ import annotations

import functools
from enum import Enum, auto
from typing import Any, NamedTuple

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel.core.activation_checkpoint.policies import as_policy_fn
from hyper_parallel.platform.arguments import check_flag


class CheckpointImpl(Enum):
    """How backward gets what it needs: by autograd inside autograd, or by running the forward again up to there."""

    REENTRANT = auto()
    NO_REENTRANT = auto()


class Options(NamedTuple):
    """How a region is run; see `checkpoint`."""

    swap_inputs: bool = False
    preserve_rng_state: bool = True
    check_outputs: bool = True
    debug: bool = False
    early_stop: bool = True


def options_of(
    swap_inputs: object, preserve_rng_state: object, determinism_check: object, debug: object, early_stop: object
) -> Options:
    """Check the options of a call, which are all yes or no, and return them."""
    return Options(
        check_flag(swap_inputs, "swap_inputs"),
        check_flag(preserve_rng_state, "preserve_rng_state"),
        isinstance(determinism_check, str) and determinism_check == "default",
        check_flag(debug, "debug"),
        check_flag(early_stop, "early_stop"),
    )


# The options that the region hands to the framework, with what each may be.
FRAMEWORK_OPTIONS: dict[str, tuple[Any, ...]] = {
    "preserve_rng_state": (True, False),
    "determinism_check": ("default", "none"),
    "debug": (True, False),
    "early_stop": (True, False),
}
REGION_OPTIONS = ("policy_fn", "swap_inputs", *FRAMEWORK_OPTIONS)

# The framework's own words: what of them a region is anyway, and what stands for the rest.
_WORDS = {"use_reentrant": "use_reentrant=False", "context_fn": "a context_fn of the platform's"}
_NOOP_CONTEXTS = frozenset(
    {
        ("torch.utils.checkpoint", "noop_context_fn"),
        ("hyper_parallel.platform.mindspore.activations", "noop_contexts"),
    }
)

# Arguments of the region itself. A keyword of this name in a call of the wrapper is meant for the inner module.
TAKEN = frozenset({"function", *_WORDS, *REGION_OPTIONS})


def as_impl(value: object) -> CheckpointImpl:
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
    given = [
        name for name in ("policy_fn", "swap_inputs") if options.get(name) is not None and options[name] is not False
    ]
    if impl is CheckpointImpl.REENTRANT and given:
        raise ArgumentError(
            "Reentrant recomputation sees neither ops nor saved tensors.",
            expected="no policy_fn and no swap_inputs with CheckpointImpl.REENTRANT",
            got=" and ".join(given),
            do="Leave checkpoint_impl out: CheckpointImpl.NO_REENTRANT has both.",
        )


def check_options(options: dict[str, Any]) -> None:
    """Refuse here, where the mistake is, what the region would refuse in the first forward."""
    as_policy_fn(options.get("policy_fn"))
    if not isinstance(options.get("swap_inputs", False), bool):
        raise ArgumentTypeError(
            "`swap_inputs` is on or off.", expected="True or False", got=describe(options["swap_inputs"])
        )
    for name, value in options.items():
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


def check_callable(checkpoint_fn: object) -> Any:
    if not callable(checkpoint_fn):
        raise ArgumentTypeError(
            "`checkpoint_fn` runs the module.",
            expected="a function checkpoint_fn(module, *args, **kwargs)",
            got=describe(checkpoint_fn),
        )
    return checkpoint_fn


def in_own_words(call: str, options: dict[str, Any]) -> None:
    """Replace the framework's words among the options of a region by its own.

    `use_reentrant=False` asks for what a region is. A `context_fn` that the platform has made asks for a policy, or for
    nothing.

    Raises:
        ValueError: any other value; a context_fn with a policy beside a policy_fn.
    """
    if "use_reentrant" in options:
        if options["use_reentrant"] is not False:
            raise _refused(
                call, "use_reentrant", options, "Give checkpoint_impl=CheckpointImpl.REENTRANT to `checkpoint_wrapper`."
            )
        del options["use_reentrant"]
    if "context_fn" in options:
        policy = _policy_within(call, options)
        if policy is not None and options.get("policy_fn") is not None:
            raise _refused(call, "context_fn", options, "Give one policy, as policy_fn.")
        del options["context_fn"]
        if policy is not None:
            options["policy_fn"] = policy


def _policy_within(call: str, options: dict[str, Any]) -> Any:
    """Return the policy that a `context_fn` of the platform's was made with; None if its contexts do nothing."""
    context_fn = options["context_fn"]
    function = getattr(context_fn, "func", context_fn)
    module, name = getattr(function, "__module__", None) or "", getattr(function, "__name__", None)
    if (module, name) in _NOOP_CONTEXTS:
        return None
    is_own = name == "create_selective_checkpoint_contexts" and module.startswith("hyper_parallel.")
    if is_own and isinstance(context_fn, functools.partial):
        given = dict(zip(("policy_fn_or_list", "allow_cache_entry_mutation"), context_fn.args, strict=False))
        given.update(context_fn.keywords)
        if not given.get("allow_cache_entry_mutation", False):
            return given.get("policy_fn_or_list")
    raise _refused(call, "context_fn", options, "Give the policy itself as policy_fn.")


def _refused(call: str, name: str, options: dict[str, Any], do: str) -> ArgumentError:
    return ArgumentError(
        f"`{call}` has no such option: `{name}`.",
        expected=f"{', '.join(REGION_OPTIONS)}; {_WORDS[name]}",
        got=f"{name}={describe(options[name])}",
        do=f"Leave it out. {do}",
    )


def check_call(function: object, determinism_check: str) -> None:
    """Refuse what a region cannot be called with."""
    if not callable(function):
        raise ArgumentTypeError(
            "`checkpoint` runs a function.", expected="a module or a callable", got=describe(function)
        )
    accepted = FRAMEWORK_OPTIONS["determinism_check"]
    if determinism_check not in accepted:
        raise ArgumentError(
            "`determinism_check` is not known.",
            expected=" or ".join(map(repr, accepted)),
            got=describe(determinism_check),
        )


def name_of(value: Any) -> str:
    """Return how a function or another option is shown."""
    return getattr(value, "__qualname__", None) or repr(value)
