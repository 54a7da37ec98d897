"""Calls of a swap wrapper that find nothing to swap: after one, those that look the same run without hooks.

Hooks cost some microseconds for each residual, which is much where residuals are small, and small ones are not swapped.
A residual is eligible by its size and device, and those follow from what the module is called with. So the hooks come
back when that changes, and now and then to see whether something else has changed that is not looked at here (a
parameter that is no longer frozen, another branch).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hyper_parallel.core.swap.by_hand.manager import SwapManager
from hyper_parallel.core.swap.config import current_config
from hyper_parallel.platform.torch.regions.local_parts import PLAIN_TYPES
from hyper_parallel.platform.torch.regions.surroundings import (
    autocast_now,
    is_replaying,
    transform_now,
)

_CALLS_WITHOUT_A_LOOK = 15  # in a row
_ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})


class _Found:
    """What the last call with hooks was like, if it found nothing to swap."""

    __slots__ = ("num_calls_left", "situation")

    def __init__(self, situation: list[Any]) -> None:
        self.situation = situation
        self.num_calls_left = _CALLS_WITHOUT_A_LOOK


_nothing_found: weakref.WeakKeyDictionary[nn.Module, _Found] = weakref.WeakKeyDictionary()


def situation_of(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
    """Return what decides the sizes of residuals in a call; None for a call that needs its hooks whatever they find."""
    if is_replaying() or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return None  # without hooks of its own, those around the call would get the residuals
    if transform_now() is not None:
        return None  # tensors that have no storage to look at

    if SwapManager().get_current_group_name():  # it waits for the storage of each block
        return None
    found: list[Any] = [current_config(), module.training, torch.is_grad_enabled(), *autocast_now()]
    found += kwargs
    return found if _describe((*args, *kwargs.values()), found) else None


def needs_hooks(wrapper: nn.Module, situation: list[Any] | None) -> bool:
    if situation is None:
        return True
    found = _nothing_found.get(wrapper)
    if found is None or found.num_calls_left == 0 or found.situation != situation:
        return True
    found.num_calls_left -= 1
    return False


def note(wrapper: nn.Module, situation: list[Any] | None, num_swapped: int) -> None:
    """Note that a call with hooks has ended, and how many residuals it swapped."""
    if situation is not None and num_swapped == 0:
        _nothing_found[wrapper] = _Found(situation)
    else:
        _nothing_found.pop(wrapper, None)


def _describe(arguments: Iterable[Any], found: list[Any]) -> bool:
    """Add what the arguments look like to `found`; return False if one cannot be compared with the next call's."""
    for argument in arguments:
        kind = type(argument)
        if kind in _ATOMS:
            found.append(argument)
        elif kind in PLAIN_TYPES and argument.layout is torch.strided:
            # The whole storage is what would be swapped.
            found += (
                argument.dtype,
                argument.shape,
                argument.device,
                argument.requires_grad,
                argument.untyped_storage().nbytes(),
            )
        elif kind is list or kind is tuple:
            found += (kind, len(argument))
            if not _describe(argument, found):
                return False
        elif kind is dict:
            found += (kind, tuple(argument))
            if not _describe(argument.values(), found):
                return False
        else:
            return False
    return True
