"""The arguments of an op with the tensors taken out: how to call it again with others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hyper_parallel.platform.torch.regions.local_parts import PLAIN_TYPES

Look = tuple[torch.dtype, torch.Size, tuple[int, ...], int]  # as `values.sort` notes a tensor argument


class _Slot:
    """Stands for a tensor argument."""

    __slots__ = ("position",)

    def __init__(self, position: int) -> None:
        self.position = position


class CallTemplate:
    """The arguments of an op with the tensors taken out, in the order in which `values.sort` finds them.

    `looks` is None if a tensor among them is more than a view of a storage (conjugate, sparse, a subclass): such an op is not run from a template.
    """

    __slots__ = ("_args", "_is_nested", "_kwargs", "_places", "looks")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        looks: list[Look] | None = []
        self._is_nested = False
        self._places: list[int] = []  # of the tensors among `_args`, if there are none elsewhere

        def without_tensors(argument: Any, place: int | None) -> Any:
            nonlocal looks
            if isinstance(argument, torch.Tensor):
                if place is None:
                    self._is_nested = True
                else:
                    self._places.append(place)
                look = look_of(argument)
                if looks is None or look is None:
                    looks = None
                    return None
                looks.append(look)
                return _Slot(len(looks) - 1)
            if type(argument) in (list, tuple):
                return type(argument)([without_tensors(each, None) for each in argument])
            if type(argument) is dict:
                self._is_nested = True
                return {name: without_tensors(each, None) for name, each in argument.items()}
            return argument

        self._args = [without_tensors(each, place) for place, each in enumerate(args)]
        self._kwargs = {name: without_tensors(each, None) for name, each in kwargs.items()}
        self.looks = looks

    def call(self, op: Callable[..., Any], tensors: list[torch.Tensor]) -> Any:
        if self._is_nested:
            return op(*_filled(self._args, tensors), **_filled(self._kwargs, tensors))
        args = self._args.copy()
        for place, tensor in zip(self._places, tensors):  # noqa: B905 - one for each
            args[place] = tensor
        return op(*args, **self._kwargs) if self._kwargs else op(*args)


def look_of(tensor: torch.Tensor) -> Look | None:
    """How a tensor looks at its storage; None if there is more to it than that."""
    if type(tensor) not in PLAIN_TYPES or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return None
    return tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()


def _filled(template: Any, tensors: list[torch.Tensor]) -> Any:
    if type(template) is _Slot:
        return tensors[template.position]
    if type(template) in (list, tuple):
        return type(template)([_filled(each, tensors) for each in template])
    if type(template) is dict:
        return {name: _filled(each, tensors) for name, each in template.items()}
    return template
