"""The arguments of a region, as they were when it was called.

Tensors are taken out, so that they can be packed like residuals; containers and objects (a KV cache) are copied in structure, so that what
the function puts into them is not there when it runs again. The frame of a region never holds the user's own mutable object: that may
come to hold results of the region, and so lead back to the frame.
"""

from __future__ import annotations

import copy
import enum
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

_ATOMS = (
    str, bytes, bool, int, float, complex, type(None), type, range, slice, enum.Enum, BaseException,
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType,
)  # fmt: skip
# Objects of these packages have an identity that a copy would lose (streams, process groups, locks, loggers).
_NOT_COPIED = ("torch", "mindspore", "threading", "logging", "multiprocessing", "concurrent", "asyncio", "numpy")
_MOST_OBJECTS = 10_000  # a larger graph of objects is no cache: what is beyond is passed as it is


class Kinds(NamedTuple):
    """How a framework's own things are told from a user's."""

    tensor: type
    atoms: tuple[type, ...]  # passed as they are: modules are among them
    flat: tuple[type, ...]


def kinds_of(tensor: type, module: type) -> Kinds:
    atoms = (module, *_ATOMS)
    return Kinds(tensor, atoms, (tensor, *atoms))


def _are_flat(arguments: Iterable[Any], flat: tuple[type, ...]) -> bool:
    for each in arguments:  # noqa: SIM110 - a generator costs more
        if each is not None and not isinstance(each, flat):
            return False
    return True


class _Slot:
    """Stands for a tensor."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class SavedArguments:
    """`args` and `kwargs` of a call.

    Attributes:
        tensors: those in them, each object once, in order; emptied by `forget_tensors`
        is_direct: for each, whether it is an argument itself or in a container, and not in an object that somebody else holds
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], kinds: Kinds) -> None:
        self.tensors: list[Any] = []
        self.is_direct: list[bool] = []
        self._kinds = kinds
        self._is_flat = _are_flat(args, kinds.flat) and _are_flat(kwargs.values(), kinds.flat)
        self._tree: Any
        if self._is_flat:  # as most calls are
            known: dict[int, int] = {}
            self._tree = (
                [self._take(each, known) for each in args],
                {k: self._take(v, known) for k, v in kwargs.items()},
            )
        else:
            self._tree = _Taker(kinds, self.tensors, self.is_direct).change((args, kwargs))

    def _take(self, argument: object, known: dict[int, int]) -> Any:
        if not isinstance(argument, self._kinds.tensor):
            return argument
        if id(argument) not in known:
            known[id(argument)] = len(self.tensors)
            self.tensors.append(argument)
            self.is_direct.append(True)
        return _Slot(known[id(argument)])

    def forget_tensors(self) -> None:
        """Only the structure is needed from now on."""
        self.tensors = []

    def rebuild(self, tensor: Callable[[int], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """New containers of the same structure, with `tensor(index)` in place of each tensor."""
        if not self._is_flat:
            args, kwargs = _Builder(self._kinds, tensor).change(self._tree)
            return args, kwargs
        made: dict[int, Any] = {}

        def fill(argument: object) -> Any:
            if not isinstance(argument, _Slot):
                return argument
            if argument.index not in made:
                made[argument.index] = tensor(argument.index)
            return made[argument.index]

        args, kwargs = self._tree
        return tuple([fill(each) for each in args]), {name: fill(each) for name, each in kwargs.items()}


class _Walk:
    """Copies a structure and changes its leaves; things that occur twice, or contain themselves, stay one thing."""

    def __init__(self, kinds: Kinds) -> None:
        self._tensor_type = (kinds.tensor, _Slot)
        self._atoms = kinds.atoms
        self._known: dict[int, Any] = {}
        self._originals: list[Any] = []  # so that no id is used twice while the walk lasts
        self._depth_in_objects = 0

    def leaf(self, thing: object) -> Any:
        """What replaces a leaf; `thing` itself to leave it."""
        raise NotImplementedError

    def change(self, thing: Any) -> Any:
        if isinstance(thing, self._tensor_type):
            return self._once(thing, self.leaf)
        if isinstance(thing, self._atoms) or len(self._known) > _MOST_OBJECTS:
            return thing
        kind = type(thing)
        if isinstance(thing, tuple):
            if kind is tuple:
                return tuple([self.change(each) for each in thing])
            # Not through the type itself: it may look at what it is given (as a PackedSequence does at its tensors).
            return tuple.__new__(kind, [self.change(each) for each in thing]) if hasattr(thing, "_fields") else thing
        if isinstance(thing, (list, dict)):
            return self._once(thing, self._copy)
        if getattr(thing, "__dict__", None) and not kind.__module__.startswith(_NOT_COPIED):
            self._depth_in_objects += 1
            try:
                return self._once(thing, self._copy)
            finally:
                self._depth_in_objects -= 1
        return thing

    def _once(self, thing: object, change: Callable[[Any], Any]) -> Any:
        if id(thing) not in self._known:
            self._originals.append(thing)
            changed = change(thing)
            self._known.setdefault(id(thing), changed)
        return self._known[id(thing)]

    def _copy(self, thing: Any) -> Any:
        try:
            copied = copy.copy(thing)
        except Exception:
            return thing  # the function gets it as it is
        self._known[id(thing)] = copied  # before its contents: they may lead back to it
        if isinstance(copied, list):
            copied[:] = [self.change(each) for each in copied]
        elif isinstance(copied, dict):
            for key, each in list(copied.items()):
                dict.__setitem__(copied, key, self.change(each))
        attributes = getattr(copied, "__dict__", None)
        if attributes:
            for name, each in list(attributes.items()):
                attributes[name] = self.change(each)
        return copied


class _Taker(_Walk):
    def __init__(self, kinds: Kinds, tensors: list[Any], is_direct: list[bool]) -> None:
        super().__init__(kinds)
        self._tensors = tensors
        self._is_direct = is_direct

    def leaf(self, thing: object) -> Any:
        self._tensors.append(thing)
        self._is_direct.append(self._depth_in_objects == 0)
        return _Slot(len(self._tensors) - 1)


class _Builder(_Walk):
    def __init__(self, kinds: Kinds, tensor: Callable[[int], Any]) -> None:
        super().__init__(kinds)
        self._tensor = tensor

    def leaf(self, thing: object) -> Any:
        return self._tensor(thing.index) if isinstance(thing, _Slot) else thing
