"""What objects have as Python's own (numbers, lists, generators), noted and put back.

A forward may move what its modules have as attributes: a counter, a list that it appends to, a generator of its own.
When it runs again in backward it finds them as it found them the first time, and afterwards they are as if it had run
once.

    then = PythonState([module], TORCH, holds=False)   # before the forward
    ...
    with as_then(then):                                # the forward again
        module(x)

Planning notes more: `reach=` is how many objects deep it goes, into slots and from functions to what they close over
and their globals as well, since its steps are not to have been at all. An iterator that it meets has a place that
cannot be set back, so that `check_no_iterators` refuses it. One of a Python class has its place in its attributes.

`holds=False` is for a note that lives as long as a graph does. It holds no tensor and nothing that could lead to one:
only numbers, texts and containers of these. Everything else it knows weakly, and what is gone by then stays as it is. A
note that holds all puts the very same objects back.
"""

from __future__ import annotations

import array
import collections
import contextlib
import enum
import functools
import io
import itertools
import operator
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from hyper_parallel._base.errors import ArgumentError, describe
from hyper_parallel._base.put_back import PutBack

_LEAVES: frozenset[type] = frozenset({bool, int, float, complex, str, bytes, type(None), range, type(Ellipsis)})
_CONTAINERS = (list, dict, set, collections.deque, bytearray)
_METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
_NO_OBJECTS = (type, types.ModuleType, types.FunctionType, *_METHODS, enum.Enum)
# Objects of these have ways of their own: nobody expects their insides to be set back.
_FOREIGN = frozenset(
    {"torch", "numpy", "mindspore", "hyper_parallel", "lightning", "pytorch_lightning", *sys.stdlib_module_names}
) - {"__main__"}
_MOST_ARRAY_BYTES = 1 << 18  # an array is compared before each forward
_MOST_FAR_ARRAY_BYTES = 1 << 26
_BUSY = frozenset({"_thread", "threading", "queue", "_queue", "socket", "asyncio.events", "multiprocessing.connection"})
_LEFT = object()  # in place of a value that is not put back
_MISSING = object()
_ENDLESS = -1
# What led to a value: None, or that of what has it; then an attribute's name, or the first object itself; True for what
# is in a container by this key.
_Where = tuple[Any, ...]
_Slots = dict[str, types.MemberDescriptorType]


class Saved(NamedTuple):
    """How to read, compare and set the state of an object that is neither a container nor has attributes."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None]
    same: Callable[[Any, Any], bool] = operator.eq


class Framework(NamedTuple):
    """What is a framework's own among the attributes of a module.

    Attributes:
        names: attributes that are left to it: parameters, modules, hooks
        tensors: types that are looked at as a whole
        saved: by type, objects with a state of their own
        modules: a module and those in it; nothing for any other value
    """

    names: frozenset[str]
    tensors: tuple[type, ...]
    saved: dict[type, Saved]
    modules: Callable[[Any], Iterable[Any]] = lambda value: ()


class PythonState:
    """The attributes of some objects at one moment, with what these lead to: containers, generators, plain objects.

    Plain objects are those of a class of the user's; of what is `reach` of them away only containers and generators are
    noted.

    Attributes:
        tensors: those that were met, where it holds all
        iterators: those that were met by a note of `reach` above 1, each with what led to it
    """

    def __init__(
        self,
        owners: Iterable[object],
        framework: Framework,
        *,
        holds: bool,
        also: PythonState | None = None,
        values: Iterable[object] = (),
        reach: int = 1,
    ) -> None:
        self.framework = framework
        self._owners = [weakref.ref(owner) for owner in owners]
        walk = _Walk(framework, holds=holds, reach=reach)
        self._parts = walk.parts(self.owners(), [*(() if also is None else also.objects())], values)
        self.tensors: list[Any] = walk.tensors if holds else []
        self.iterators: list[tuple[Any, _Where]] = walk.iterators

    def owners(self) -> list[object]:
        """List the objects that are still there."""
        return [owner for ref in self._owners if (owner := ref()) is not None]

    def is_of(self, owners: list[Any]) -> bool:
        """Say whether the note is of these very objects."""
        return len(owners) == len(self._owners) and all(
            ref() is owner for ref, owner in zip(self._owners, owners, strict=True)
        )

    def is_now(self) -> bool:
        """Say whether everything is as it was then."""
        return all(part.is_now() for part in self._parts)

    def put_back(self) -> None:
        for part in self._parts:
            if not part.is_now():
                part.put_back()

    def objects(self) -> list[Any]:
        """List the containers and objects with a state that were noted: nothing may lead to them any more."""
        return [part.object for part in self._parts if not isinstance(part, (_Attributes, _Cell, _Global))]


class as_then(PutBack):  # noqa: N801 - used like a function
    """Opens a block in which all that `then` has noted is as it was then.

    After it everything is as it was before the block.
    """

    def __init__(self, then: PythonState) -> None:
        self._then = then
        self._now = PythonState(then.owners(), then.framework, holds=True, also=then)

    def change(self) -> None:
        self._then.put_back()

    def put_back(self) -> None:
        self._now.put_back()


def check_no_iterators(state: PythonState, names: Mapping[int, str]) -> None:
    """Refuse an iterator that a note of planning's has met, wherever it was.

    Nothing says where it stands, or sets it back.

    Args:
        names: those of modules, by `id`.

    Raises:
        ArgumentError (a ValueError): it is named.
    """
    for iterator, where in state.iterators:
        raise ArgumentError(
            "Planning runs some steps, and what a module takes from an iterator there cannot be put back.",
            expected="lists, numbers, generators of random numbers: all that can be set back",
            got=describe(iterator),
            where=_in_words(where, names),
            do="Let the module keep a list and an index, or give what it takes as an argument. "
            "Keep elsewhere what no step takes from.",
        )


def is_iterator(value: object) -> bool:
    """Say whether this has a place that moves.

    A file is left alone: what is read and written is not put back anyway.
    """
    if not hasattr(type(value), "__next__") or isinstance(value, io.IOBase) or type(value) in weakref.ProxyTypes:
        return False
    return type(value) is not itertools.repeat or operator.length_hint(value, _ENDLESS) != _ENDLESS


def _in_words(where: _Where, names: Mapping[int, str]) -> str:
    before, last, *is_key = where
    if before is None:
        own = getattr(last, "__qualname__", None) or type(last).__qualname__
        return names.get(id(last), own)
    if is_key:
        key = repr(last) if type(last) in _LEAVES else f"<{type(last).__qualname__}>"
        return f"{_in_words(before, names)}[{key}]"
    return f"{_in_words(before, names)}.{last}".removeprefix(".")


class _Attributes:
    """The attributes of one object, in its `__dict__` and in these slots."""

    __slots__ = ("_ids", "_names", "_own", "_owner", "_slots", "_values", "_weak")

    def __init__(self, owner: Any, own: frozenset[str], slots: _Slots, *, holds: bool) -> None:
        items = list(_attributes_of(owner, slots).items())
        self._owner = weakref.ref(owner) if _can_be_weak(owner) else (lambda: owner)
        self._slots = slots
        self._own = own  # names that are the framework's
        self._names = tuple(name for name, _ in items)
        self._ids = tuple(id(value) for _, value in items)
        self._values = [_LEFT if name in own else value if holds else _weakly(value) for name, value in items]
        self._weak = tuple(value for value in self._values if type(value) is weakref.ref)

    def is_now(self) -> bool:
        owner = self._owner()
        if owner is None:
            return True
        now = _attributes_of(owner, self._slots)
        # An address may be that of another object by now; not if what had it is still there.
        return (
            tuple(now) == self._names
            and tuple(map(id, now.values())) == self._ids
            and all(ref() is not None for ref in self._weak)
        )

    def put_back(self) -> None:
        owner = self._owner()
        if owner is None:
            return
        now = _attributes_of(owner, self._slots)
        for name, value in zip(self._names, self._values, strict=True):
            then = value() if type(value) is weakref.ref else value
            if value is not _LEFT and now.get(name, _MISSING) is not then and not (then is None and value is not None):
                if name in self._slots:
                    self._slots[name].__set__(owner, then)
                else:
                    vars(owner)[name] = then
        for name in now.keys() - self._names - self._own:
            if name in self._slots:
                self._slots[name].__delete__(owner)
            else:
                del vars(owner)[name]


class _Contents:
    """What is in one container."""

    __slots__ = ("_items", "object")

    def __init__(self, container: Any) -> None:
        self.object = container
        self._items: list[Any] = list(container.items()) if isinstance(container, dict) else list(container)

    def is_now(self) -> bool:
        container, items = self.object, self._items
        if len(container) != len(items):
            return False
        if isinstance(container, dict):
            now = list(container.items())
            return all(a is c and b is d for (a, b), (c, d) in zip(now, items, strict=True))
        if isinstance(container, set):
            return all(map(container.__contains__, items))
        if isinstance(container, bytearray):
            return list(container) == items
        return all(map(operator.is_, container, items))

    def put_back(self) -> None:
        container, items = self.object, self._items
        # Not by methods that a class of the user's may have made something else of.
        if isinstance(container, list):
            list.__setitem__(container, slice(None), items)
        elif isinstance(container, bytearray):
            bytearray.__setitem__(container, slice(None), bytes(items))
        elif isinstance(container, dict):
            kind = collections.OrderedDict if isinstance(container, collections.OrderedDict) else dict
            kind.clear(container)
            kind.update(container, items)
        elif isinstance(container, set):
            set.clear(container)
            set.update(container, items)
        else:
            collections.deque.clear(container)
            collections.deque.extend(container, items)


class _Cell:
    """A variable that a function closes over."""

    __slots__ = ("_cell", "_value")

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell
        self._value = cell.cell_contents

    def is_now(self) -> bool:
        return self._cell.cell_contents is self._value

    def put_back(self) -> None:
        self._cell.cell_contents = self._value


class _Global:
    """A number or a text that a function reads, or sets, by its global name."""

    __slots__ = ("_name", "_names", "_value")

    def __init__(self, names: dict[str, Any], name: str) -> None:
        self._names = names
        self._name = name
        self._value = names[name]

    def is_now(self) -> bool:
        return self._names.get(self._name, _MISSING) is self._value

    def put_back(self) -> None:
        self._names[self._name] = self._value


class _State:
    """The state of a generator, or the numbers in an array."""

    __slots__ = ("_how", "_state", "object")

    def __init__(self, value: object, how: Saved) -> None:
        self.object = value
        self._how = how
        self._state = how.read(value)

    def is_now(self) -> bool:
        return self._how.same(self._how.read(self.object), self._state)

    def put_back(self) -> None:
        self._how.write(self.object, self._state)


_Part = _Attributes | _Contents | _Cell | _Global | _State


class _Walk:
    """Goes from the attributes of objects to all that is noted, the nearest first.

    What two things lead to is as near as the nearer one has it.
    """

    def __init__(self, framework: Framework, *, holds: bool, reach: int) -> None:
        self._framework = framework
        self._holds = holds
        self._reach = reach
        self._is_far = reach > 1
        self._seen: set[int] = set()
        self._parts: list[_Part] = []
        self._to_see: collections.deque[tuple[Any, int, _Where]] = collections.deque()
        self.tensors: list[Any] = []
        self.iterators: list[tuple[Any, _Where]] = []

    def parts(self, owners: list[object], objects: Iterable[object], values: Iterable[object]) -> list[_Part]:
        # First, so that none of them is met again as what another one has.
        self._seen.update(map(id, owners))
        for owner in owners:
            self._note_attributes(owner, self._reach, (None, owner))
        for value in objects:
            self._to_see.append((value, 0, (None, value)))
        for value in values:
            self._to_see.append((value, self._reach, (None, value)))
        while self._to_see:
            self._note(*self._to_see.popleft())
        return self._parts

    def _note_attributes(self, owner: object, reach: int, where: _Where) -> None:
        own, slots = self._framework.names, self._slots_of(owner)
        self._parts.append(_Attributes(owner, own, slots, holds=self._holds))
        for name, value in _attributes_of(owner, slots).items():
            if type(value) not in _LEAVES and name not in own:
                self._to_see.append((value, reach, (where, name)))

    def _note(self, value: object, reach: int, where: _Where) -> None:
        if type(value) in _LEAVES or id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, self._framework.tensors):
            self.tensors.append(value)
            return
        most_bytes = _MOST_FAR_ARRAY_BYTES if self._is_far else _MOST_ARRAY_BYTES
        how = self._framework.saved.get(type(value)) or _saved_of(value, most_bytes)
        if how is not None:
            self._parts.append(_State(value, how))
        elif isinstance(value, (*_CONTAINERS, tuple, frozenset)):
            if isinstance(value, _CONTAINERS) and (self._holds or _is_pure(value)):
                self._parts.append(_Contents(value))
            if isinstance(value, collections.defaultdict):
                self._is_next(value.default_factory, reach, (where, "default_factory"))
            for key, item in _items_of(value):
                self._is_next(item, reach, (where, key, True))
            if self._is_far:
                self._note_object(value, reach, where)
        elif self._is_far and isinstance(value, (types.FunctionType, functools.partial, *_METHODS)):
            self._note_function(value, reach, where)
        elif self._is_far and (modules := list(self._framework.modules(value))):
            self._seen.update(map(id, modules))
            for module in modules:
                self._note_attributes(module, reach, where)
        elif not self._note_object(value, reach, where) and self._is_far and is_iterator(value):
            self.iterators.append((value, where))

    def _slots_of(self, value: object) -> _Slots:
        return _slots_of(type(value)) if self._is_far else {}

    def _is_next(self, value: object, reach: int, where: _Where) -> None:
        """Visit this value next: it is no farther than what led to it."""
        if type(value) not in _LEAVES:
            self._to_see.appendleft((value, reach, where))

    def _note_object(self, value: Any, reach: int, where: _Where) -> bool:
        """Note a plain object within reach; say whether all of its state is in its attributes."""
        slots = self._slots_of(value)
        if not reach or not _is_plain_object(value, slots) or (self._is_far and _is_busy(value, slots)):
            return False
        self._note_attributes(value, reach - 1, where)
        return not is_iterator(value) or isinstance(type(value).__next__, types.FunctionType)

    def _note_function(self, function: Any, reach: int, where: _Where) -> None:
        if isinstance(function, _METHODS):
            self._is_next(function.__self__, reach, (where, "__self__"))
        elif isinstance(function, functools.partial):
            for name in ("func", "args", "keywords"):
                self._is_next(getattr(function, name), reach, (where, name))
        else:
            defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
            for default in defaults:
                self._is_next(default, reach, (where, "__defaults__"))
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
                with contextlib.suppress(ValueError):  # it has no value yet
                    self._parts.append(_Cell(cell))
                    self._is_next(cell.cell_contents, reach, (where, name))
            if _root_of(function) not in _FOREIGN:
                self._note_globals(function.__code__.co_names, function.__globals__, reach, where)

    def _note_globals(self, wanted: Iterable[str], names: dict[str, Any], reach: int, where: _Where) -> None:
        """Note the globals that a function reads, without functions among them: what these lead to in turn is not
        looked for.
        """
        for name in wanted:
            value = names.get(name, _MISSING)
            if type(value) in _LEAVES:
                self._parts.append(_Global(names, name))
            elif value is not _MISSING and not isinstance(value, _NO_OBJECTS):
                self._is_next(value, reach, (where, name))


def _root_of(value: object) -> str:
    """Name the package that a class or a function is of."""
    return (getattr(value, "__module__", None) or "builtins").partition(".")[0]


def _is_plain_object(value: object, slots: _Slots) -> bool:
    kind = type(value)
    if kind in (types.SimpleNamespace,):
        return True
    if isinstance(value, _NO_OBJECTS) or _root_of(kind) in _FOREIGN:
        return False
    return isinstance(getattr(value, "__dict__", None), dict) or bool(slots)


def _slots_of(kind: type) -> _Slots:
    """List by name what reads and writes the slots that the user's classes have."""
    return {
        name: member
        for base in reversed(kind.__mro__)
        if "__slots__" in vars(base) and _root_of(base) not in _FOREIGN
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
    }


def _attributes_of(value: object, slots: _Slots) -> dict[str, Any]:
    own: dict[str, Any] = getattr(value, "__dict__", {})
    if not slots:
        return own
    found = dict(own)
    for name, slot in slots.items():
        with contextlib.suppress(AttributeError):  # it is empty
            found[name] = slot.__get__(value)
    return found


def _items_of(container: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(container, dict):
        return list(container.items())
    return enumerate(list(container))


def _is_busy(value: object, slots: _Slots) -> bool:
    """Say whether others may work with it meanwhile: it has a lock, a thread, a queue, a socket."""
    return any(type(attribute).__module__ in _BUSY for attribute in _attributes_of(value, slots).values())


def _is_pure(value: object, depth: int = 4) -> bool:
    """Say whether there is nothing in it but numbers and texts."""
    if type(value) in _LEAVES:
        return True
    if depth == 0 or not isinstance(value, (*_CONTAINERS, tuple, frozenset)):
        return False
    within = value.values() if isinstance(value, dict) else value
    return all(type(item) in _LEAVES or _is_pure(item, depth - 1) for item in within)


def _weakly(value: object) -> Any:
    """Give what a note that holds nothing keeps of a value."""
    if type(value) in _LEAVES or _is_pure(value):
        return value
    if _can_be_weak(value):
        return weakref.ref(value)
    return _LEFT if isinstance(value, (*_CONTAINERS, tuple, frozenset)) else value


def _can_be_weak(value: object) -> bool:
    return type(value).__weakrefoffset__ != 0


def _saved_of(value: object, most_array_bytes: int) -> Saved | None:
    """Find how the state of a generator or an array is saved that is no framework's."""
    if isinstance(value, random.Random):
        return _PYTHON_GENERATOR
    if isinstance(value, array.array):
        return _ARRAY_OF_PYTHON if len(value) * value.itemsize <= most_array_bytes else None
    numpy = sys.modules.get("numpy")
    if numpy is None or not hasattr(numpy, "random"):
        return None
    if isinstance(value, numpy.ndarray):
        return _ARRAY if value.nbytes <= most_array_bytes and not value.dtype.hasobject else None
    if isinstance(value, numpy.random.Generator):
        return _NUMPY_GENERATOR
    if isinstance(value, numpy.random.RandomState):
        return _NUMPY_RANDOM_STATE
    return None


def _same_state(left: Any, right: Any) -> bool:
    """Compare the states of NumPy's generators: dicts and tuples with arrays in them."""
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same_state(left[name], right[name]) for name in left)
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(_same_state, left, right))
    return left.tobytes() == right.tobytes() if hasattr(left, "tobytes") else bool(left == right)


def _write_numpy_generator(generator: Any, state: Any) -> None:
    generator.bit_generator.state = state


def _write_array(target: Any, numbers: Any) -> None:
    if target.flags.writeable and target.shape == numbers.shape and target.dtype == numbers.dtype:
        target[...] = numbers


def _write_array_of_python(target: array.array[Any], numbers: array.array[Any]) -> None:
    target[:] = numbers


_PYTHON_GENERATOR = Saved(random.Random.getstate, random.Random.setstate)
_NUMPY_GENERATOR = Saved(lambda generator: generator.bit_generator.state, _write_numpy_generator, _same_state)
_NUMPY_RANDOM_STATE = Saved(
    lambda generator: generator.get_state(legacy=False),
    lambda generator, state: generator.set_state(state),
    _same_state,
)
_ARRAY = Saved(lambda numbers: numbers.copy(), _write_array, _same_state)
_ARRAY_OF_PYTHON = Saved(lambda numbers: numbers[:], _write_array_of_python, _same_state)

__all__ = ["Framework", "PythonState", "Saved", "as_then", "check_no_iterators", "is_iterator"]
