"""Tensors with everything but memory, in place of results that nothing needs while a function is run again.

A placeholder is a tensor subclass, so that every op on it comes to Python: inside a replay to the replay, which knows what to do; anywhere
else (a function may put its tensors aside) to an error, never to a kernel. What the subclass looks like, and what its views look like, is kept in a
plain tensor whose storage claims its size and has no memory: it takes part in views only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from hyper_parallel._base.errors import StateError, describe
from hyper_parallel.platform.torch.regions.local_parts import (
    PLAIN_TYPES,
    Outer,
    is_distributed,
    local_tensor,
)
from hyper_parallel.platform.torch.regions.surroundings import is_replaying


class View(NamedTuple):
    """How a tensor looks at its storage."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool
    outer: Outer | None = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        local = tensor if type(tensor) in PLAIN_TYPES else local_tensor(tensor)
        # Not through the class: it would sort the arguments by name, for each tensor that an op makes.
        return tuple.__new__(
            cls,
            (
                local.dtype,
                local.size(),
                local.stride(),
                local.storage_offset(),
                local.is_conj(),
                local.is_neg(),
                None if local is tensor else Outer.of(tensor),
            ),
        )

    def or_own(self, tensor: torch.Tensor) -> View:
        """This view, if an ordinary tensor looks so, else one of its own: most look like an earlier one, and can share its view."""
        if (
            tensor.size() == self[1]
            and tensor.stride() == self[2]
            and tensor.dtype is self[0]
            and tensor.storage_offset() == self[3]
            and tensor.is_conj() is self[4]
            and tensor.is_neg() is self[5]
            and self[6] is None
        ):
            return self
        return View.of(tensor)

    def on(self, storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
        """The same look at another storage. No autograd, no dispatch mode sees it."""
        with torch._C._DisableTorchDispatch():
            tensor = torch.empty(0, dtype=self.dtype, device=device)
            tensor.set_(storage, self.offset, self.size, self.stride)
            if self.is_conj:
                tensor = torch._conj(tensor)
            if self.is_neg:
                tensor = torch._neg_view(tensor)
        return tensor if self.outer is None else self.outer.around(tensor)


class NeedsEverything(BaseException):  # not an Exception: the function under replay may catch those
    """What was left out is read after all: begin again and run every op."""


class Placeholder(torch.Tensor):
    """A result that was left out of a recomputation."""

    _local_tensor: torch.Tensor  # what it looks like; see `values.local_tensor`

    @staticmethod
    def __new__(cls, looks: torch.Tensor) -> Placeholder:
        made: Placeholder = torch.Tensor._make_wrapper_subclass(
            cls,
            looks.size(),
            strides=looks.stride(),
            storage_offset=looks.storage_offset(),
            dtype=looks.dtype,
            device=looks.device,
        )
        made._local_tensor = looks
        if looks.is_conj():
            torch._C._set_conj(made, True)
        if looks.is_neg():
            torch._C._set_neg(made, True)
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: object, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise _read(f"{func} of {next((describe(each) for each in args if isinstance(each, cls)), 'it')}")

    def _not_here(self, *_args: Any, **_kwargs: Any) -> Any:
        raise _read(describe(self))

    # What reads memory without an op.
    numpy = tolist = data_ptr = __array__ = __dlpack__ = _not_here

    @property
    def looks(self) -> torch.Tensor:
        return self._local_tensor

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"<left out of a recomputation: {str(self.dtype).removeprefix('torch.')}{list(self.size())}>"


def _read(what: str) -> BaseException:
    if is_replaying():
        return NeedsEverything(what)
    return StateError(
        "A tensor is read that was not computed: it was made while a region was recomputed, and nothing in backward needs it.",
        got=what,
        do="Read what a function puts aside before backward, or clone it there.",
    )


def is_placeholder(tensor: object) -> bool:
    """Whether a tensor was left out, or is a DTensor whose own part was."""
    return isinstance(tensor, Placeholder) or isinstance(getattr(tensor, "_local_tensor", None), Placeholder)


# What most arguments of an op are.
_NO_PLACEHOLDERS = frozenset({*PLAIN_TYPES, int, float, bool, list, type(None), torch.dtype, torch.device})


def has_placeholder(arguments: Iterable[Any]) -> bool:
    for each in arguments:  # noqa: SIM110 - a generator costs more than all of this, and this is done for every view
        if type(each) not in _NO_PLACEHOLDERS and is_placeholder(each):
            return True
    return False


def placeholder(
    view: View, num_bytes: int, device: torch.device, storage: torch.UntypedStorage | None = None
) -> torch.Tensor:
    """A placeholder that looks like `view` on a storage of `num_bytes`: a new one, or that of another placeholder."""
    if storage is None:
        storage = torch._C._construct_storage_from_data_pointer(0, device, num_bytes)
    looks = view._replace(outer=None).on(storage, device)
    torch._C._set_throw_on_mutable_data_ptr(looks)
    return Placeholder(looks) if view.outer is None else view.outer.around(Placeholder(looks))


def another_placeholder(tensor: torch.Tensor) -> torch.Tensor:
    """One that looks at the same storage in the same way."""
    return _without_memory(_looks(tensor))


def view_of_placeholder(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a view op gives of a placeholder: placeholders."""
    looks = [_looks(each) for each in args]
    by_name = {name: _looks(each) for name, each in kwargs.items()}
    # What a view of a DTensor looks like only its own dispatch can tell.
    is_outer = any(isinstance(each, torch.Tensor) and is_distributed(each) for each in looks)
    try:
        with contextlib.nullcontext() if is_outer else torch._C._DisableTorchDispatch():
            result = func(*looks, **by_name)
    except NotImplementedError:  # a view that is made of what is in memory, such as a nested tensor of its offsets
        raise _read(str(func)) from None
    if isinstance(result, (list, tuple)):
        return type(result)([_without_memory(each) for each in result])
    return _without_memory(result)


def _looks(argument: object) -> Any:
    if isinstance(argument, Placeholder):
        return argument._local_tensor
    if not is_placeholder(argument):
        return argument
    outer = Outer.of(argument)
    return argument if outer is None else outer.around(local_tensor(argument))


def _without_memory(looks: torch.Tensor) -> torch.Tensor:
    outer = Outer.of(looks)
    return Placeholder(looks) if outer is None else outer.around(Placeholder(local_tensor(looks)))
