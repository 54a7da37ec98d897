"""Reentrant recomputation of a call with any arguments and any result.

PyTorch's reentrant checkpoint is one autograd function: what it sees are its positional tensors and the tensors in a
flat tuple of results. It refuses keyword arguments, gives no gradient to a tensor inside a container, none through a
container that is returned, and none to the parameters when no argument needs one. `PackedCall` makes a call one of
tensors alone, in both directions, and `run_reentrant` adds the last.

What the first run, the forward, gets are the caller's own containers; recomputation gets new ones with what was in them
when the call was made. So a module that appends to a list does it once for the caller, and finds the same list again.
What it appends carries no gradient: only what it returns does. What is around it is in recomputation as it was:
`repeated_call`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from hyper_parallel._base.errors import ArgumentTypeError, describe
from hyper_parallel.platform.torch.regions.arguments import saved_arguments
from hyper_parallel.platform.torch.regions.left_as_found import left_as_found
from hyper_parallel.platform.torch.regions.repeated_call import RepeatedCall
from hyper_parallel.platform.trees import leaves, map_leaves


def run_reentrant(
    checkpoint_fn: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the module, to be recomputed in backward by PyTorch's reentrant checkpoint (`checkpoint_fn`)."""
    if not torch.is_grad_enabled():
        return module(*args, **kwargs)
    call = PackedCall(module, args, kwargs)
    tensors = call.tensors
    if not any(tensor.requires_grad for tensor in tensors):
        if not any(parameter.requires_grad for parameter in module.parameters()):
            return module(*args, **kwargs)  # what it may close over gets its gradient, too
        # Without an argument that needs a gradient autograd would not come back here, not even for the parameters.
        tensors = (*tensors, torch.empty(0, requires_grad=True))
    with left_as_found():
        return call.result(checkpoint_fn(call, *tensors))


def run_packed(
    checkpoint_fn: Callable[..., Any], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the module through a user's `checkpoint_fn` that takes positional tensors only."""
    call = PackedCall(module, args, kwargs)
    if not kwargs and {*map(id, call.tensors)} == {id(arg) for arg in args if isinstance(arg, torch.Tensor)}:
        return checkpoint_fn(module, *args)
    return call.result(checkpoint_fn(call, *call.tensors))


class PackedCall:
    """A call as a function of the tensors in its arguments, to the tensors in its result."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._module = RepeatedCall(module, is_reentrant=True)
        self._arguments = saved_arguments(args, kwargs)
        # For the forward only: this object lives as long as the graph, and keeping the tensors is autograd's.
        self._given: _Given | None = _Given(tuple(self._arguments.tensors), args, kwargs)
        self._arguments.forget_tensors()
        self._made: Any = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors in the arguments, until the forward has run."""
        return () if self._given is None else self._given.tensors

    def __call__(self, *tensors: torch.Tensor) -> Any:
        given, self._given = self._given, None
        # A function of the user's may run the forward with other tensors than those of the call.
        if given is not None and all(one is other for one, other in zip(given.tensors, tensors, strict=False)):
            args, kwargs = given.args, given.kwargs
        else:
            args, kwargs = self._arguments.rebuild(lambda index: tensors[index])
        made = self._module(*args, **kwargs)
        if isinstance(made, torch.Tensor):
            return made
        if given is not None:
            self._made = made
        return tuple(leaf for leaf in _checked_leaves(made) if isinstance(leaf, torch.Tensor)) or None

    def result(self, tensors: Any) -> Any:
        """Return what the function returned in the forward, with the tensors that autograd knows in it."""
        made, self._made = self._made, None
        if made is None:
            return tensors
        rest = iter((tensors,) if isinstance(tensors, torch.Tensor) else tensors or ())
        return map_leaves(lambda leaf: next(rest) if isinstance(leaf, torch.Tensor) else leaf, made)


class _Given(NamedTuple):
    tensors: tuple[torch.Tensor, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _checked_leaves(made: object) -> list[Any]:
    found = list(leaves(made))
    for leaf in found:
        if not isinstance(leaf, torch.Tensor) and any(
            isinstance(held, torch.Tensor) and held.is_floating_point()
            for held in getattr(leaf, "__dict__", {}).values()
        ):
            raise ArgumentTypeError(
                "Reentrant recomputation cannot bring gradients back through this result.",
                expected="tensors, or dicts, lists, tuples and dataclasses of them",
                got=describe(leaf),
                do="Return one of these, or wrap with CheckpointImpl.NO_REENTRANT.",
            )
    return found
