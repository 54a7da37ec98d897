"""A module's call that PyTorch's own checkpoint makes twice: the second finds what the first found, and asks for the same.

What modules have as Python's own, Python's and NumPy's generators, parameters and buffers are as they were, and
afterwards as they had been before it. What cannot be put back (closures, globals, iterators) is compared: `asked`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint as framework_checkpoint

from hyper_parallel._base.errors import StateError
from hyper_parallel.core.regions.host_randomness import HostRandomness
from hyper_parallel.platform.torch.regions.arguments import saved_arguments
from hyper_parallel.platform.torch.regions.asked import Asked, Asking, AskingAgain
from hyper_parallel.platform.torch.regions.attributes import as_noted, note_attributes
from hyper_parallel.platform.torch.regions.checkpoint import checkpoint
from hyper_parallel.platform.torch.regions.compiled_code import is_compiled
from hyper_parallel.platform.torch.regions.left_as_found import left_as_found
from hyper_parallel.platform.torch.regions.local_parts import is_distributed, version_of
from hyper_parallel.platform.torch.regions.module_paths import has_sharded_modules, modules_in
from hyper_parallel.platform.torch.regions.region_function import module_of
from hyper_parallel.platform.torch.regions.surroundings import ParametersOfModule, Surroundings, num_begun

# What each module asked for in the call before: most calls ask for the same, and share it.
_last: weakref.WeakKeyDictionary[nn.Module, list[Any]] = weakref.WeakKeyDictionary()


# Modules that a watched call has shown to do nothing that PyTorch's checkpoint would do twice, and whether in training.
_shown: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def checkpoint_by_framework(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The call, recomputed whole by PyTorch's checkpoint: it knows no ops, and so costs the host less than a region.

    The first call of a module is a region, which shows what it does. One that writes into its parameters or buffers
    (batch norm), or has a region inside, is a region in every call.
    """
    module = module_of(function)
    if module is not None and _shown.get(module) is module.training:
        with left_as_found():
            return framework_checkpoint(RepeatedCall(function), *args, use_reentrant=False, **kwargs)
    held = [] if module is None else _held(modules_in(module))
    versions, begun = list(map(version_of, held)), num_begun()
    result = checkpoint(function, *args, **kwargs)
    if module is not None and num_begun() <= begun + 1 and list(map(version_of, held)) == versions:
        _shown[module] = module.training
    return result


def _held(modules: list[nn.Module]) -> list[torch.Tensor]:
    """Their parameters and buffers."""
    holders = (holder for each in modules for holder in (each._parameters, each._buffers))
    return [
        tensor for holder in holders for tensor in dict(holder).values() if tensor is not None and not is_lazy(tensor)
    ]


class RepeatedCall:
    """`is_reentrant`: the first run is one without gradients, and those of the second are taken."""

    def __init__(self, function: Callable[..., Any], *, is_reentrant: bool = False) -> None:
        self._function = function
        self._is_reentrant = is_reentrant
        self._module = module_of(function)
        modules = [] if self._module is None else modules_in(self._module)
        self._attributes = note_attributes(self._module, modules)
        self._parameters = ParametersOfModule(self._module, modules)
        self._host_randomness = HostRandomness()
        self._is_first = True
        self._asked: Asked | None = None
        self._held = [] if is_reentrant else _held(modules)
        self._has_news = False  # it did what no watched call has shown
        # A mode is one of the things that compiled code was compiled for.
        self._is_compared = not (any(map(is_compiled, modules)) or Surroundings().is_compiling)
        # PyTorch's distributed tensors leave calls out where there are no gradients, as in a reentrant first run.
        if is_reentrant and any(map(is_distributed, _held(modules))):
            self._is_compared = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = saved_arguments(args, kwargs).tensors if self._is_compared else []
        if self._is_first:
            self._is_first = False
            return self._first(tensors, args, kwargs)
        if self._has_news:
            raise StateError(
                "A block wrote into a parameter or a buffer, or had a region inside, and did neither when it was watched.",
                expected="what its first call did",
                got="more",
                where=type(self._module).__name__,
                do="Run the step again: from now on the block is watched.",
            )
        if self._is_reentrant:
            self._check_require_grad()
        attributes, host, parameters = (
            as_noted(self._attributes),
            self._host_randomness.again(),
            self._parameters.again(),
        )
        with left_as_found(attributes, host, parameters), attributes, host, parameters:
            return self._again(tensors, args, kwargs)

    def _first(self, tensors: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._is_compared:
            result = self._function(*args, **kwargs)
        else:
            begun, versions = num_begun(), list(map(version_of, self._held))
            asking = Asking(tensors, None if self._module is None else _last.get(self._module))
            with asking:
                result = self._function(*args, **kwargs)
            is_plain = num_begun() == begun  # what a region inside of it asks for is not the same each time
            self._has_news = list(map(version_of, self._held)) != versions or not (is_plain or self._is_reentrant)
            self._held = []
            if self._has_news and self._module is not None:
                _shown.pop(self._module, None)
            if is_plain:
                self._asked = asking.asked()
                if self._module is not None:
                    _last[self._module] = self._asked.notes
        self._host_randomness.note_use()
        return result

    def _again(self, tensors: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._asked is None:
            return self._function(*args, **kwargs)
        name = type(self._function).__name__ if self._module is None else type(self._module).__name__
        again = AskingAgain(
            self._asked, tensors, name, checks_outside=not has_sharded_modules(), may_skip=not self._is_reentrant
        )
        with again:
            result = self._function(*args, **kwargs)
        again.check_end()
        return result

    def _check_require_grad(self) -> None:
        """Only the parameters themselves can get the gradients of a second run."""
        if any(
            tensor.requires_grad is not then
            for tensor, then in zip(self._parameters.tensors(), self._parameters.require_grad(), strict=True)
        ):
            raise StateError(
                "A parameter was frozen, or is no longer, between forward and backward.",
                expected="parameters that want gradients as they did in forward",
                got="others",
                where=type(self._module).__name__,
                do="Use CheckpointImpl.NO_REENTRANT, or change requires_grad when backward is over.",
            )


__all__ = ["RepeatedCall", "checkpoint_by_framework"]
