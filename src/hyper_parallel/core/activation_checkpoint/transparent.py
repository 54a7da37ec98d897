"""What is the same in the wrappers of both frameworks: attributes and items are the inner module's."""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from hyper_parallel._base.errors import ArgumentTypeError, describe
from hyper_parallel.platform.opaque import Module


class Transparent:
    """The base of all wrappers that gives the inner module's attributes and items for its own.

    It comes before the framework's class of modules among the bases. The inner module lies in `__dict__` under the name
    `INNER`.

    Attributes that are the wrapper's own are for the class to say, in `_inner_that_has`.
    """

    INNER: ClassVar[str]
    __dict__: dict[str, Any]
    # Names that classes of users' define, or set in their `__init__`: of these each wrapper has its own.
    DEFINED: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if not cls.__module__.startswith("hyper_parallel."):
            cls.DEFINED |= {name for name in (*vars(cls), *_set_in(vars(cls).get("__init__"))) if not is_special(name)}

    def _inner_that_has(self, name: str) -> Any:
        """Return the module that an attribute of this name belongs to; `None` means the wrapper."""
        raise NotImplementedError

    # Attributes

    def __getattr__(self, name: str) -> Any:
        # Reached when neither the wrapper nor its class has the name. Special names stop here: `copy` and `pickle` look
        # them up on the instance, and the inner module's would copy the inner module alone. Without an inner module
        # (while __init__ or unpickling runs) there is nothing to ask.
        inner = self.__dict__.get(type(self).INNER)
        if inner is None or is_special(name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(inner, name)

    def __delattr__(self, name: str) -> None:
        inner = self._inner_that_has(name)
        if inner is None:
            object.__delattr__(self, name)
        else:
            delattr(inner, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self.__dict__[self.INNER])})

    # A wrapped container. Each raises what the inner module raises if it has no such thing.

    def __getitem__(self, key: Any) -> Any:
        return self.__dict__[self.INNER][key]

    def __setitem__(self, key: object, value: object) -> None:
        self.__dict__[self.INNER][key] = value

    def __delitem__(self, key: object) -> None:
        del self.__dict__[self.INNER][key]

    def __len__(self) -> int:
        return len(self.__dict__[self.INNER])

    def __bool__(self) -> bool:  # else a wrapper of a module without a length would have no truth value
        return bool(self.__dict__[self.INNER])

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__dict__[self.INNER])

    def __contains__(self, item: object) -> bool:
        return item in self.__dict__[self.INNER]


def _set_in(function: object) -> Iterator[str]:
    """Find the names of attributes that a function sets on its first argument."""
    code = getattr(function, "__code__", None)
    if code is None or not code.co_argcount:
        return
    loaded = None
    for step in dis.get_instructions(code):
        if step.opname == "STORE_ATTR" and loaded == code.co_varnames[0]:
            yield step.argval
        loaded = step.argval if "LOAD_FAST" in step.opname or step.opname == "LOAD_DEREF" else None
        if isinstance(loaded, tuple):  # two instructions in one: from Python 3.13 on
            loaded = loaded[-1]


def one_of(module: Module, mod: object, call: str) -> Any:
    """Return what a wrapper wraps, whichever of the two names it was given by.

    Raises:
        TypeError: both were given.
    """
    if module is not None and mod is not None:
        raise ArgumentTypeError(f"`{call}` wraps one module.", expected="module, or mod", got="both")
    return mod if module is None else module


def is_special(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def wrappers_below(
    model: Module, children: Callable[[Any], Iterable[tuple[str, Any]]], name: str = "", seen: set[Any] | None = None
) -> Iterator[tuple[str, Any]]:
    """Go through every wrapper once, under the name of its inner module; an outer one before an inner one.

    `children`: the places in a module that hold one, and in a wrapper the inner module.
    """
    seen = set() if seen is None else seen
    if model in seen:
        return
    seen.add(model)
    is_wrapper = isinstance(model, Transparent)
    if is_wrapper:
        yield name, model
    for child_name, child in children(model):
        below = name if is_wrapper else f"{name}.{child_name}" if name else child_name
        yield from wrappers_below(child, children, below, seen)


def check_wrapped(module: Module, kind: type, call: str) -> None:
    """Refuse what is neither a module nor a function.

    Raises:
        TypeError: a class of modules, or something that cannot be called.
    """
    if isinstance(module, type) and issubclass(module, kind):
        raise ArgumentTypeError(
            f"`{call}` wraps a module, not a class.",
            expected=f"an instance, for example {module.__name__}(…)",
            got=f"the class {module.__name__}",
        )
    if not callable(module):
        raise ArgumentTypeError(
            f"`{call}` wraps a module or a function.",
            expected=f"an nn.{kind.__name__} or a callable",
            got=describe(module),
        )
