"""Which ops are meant: by name, size, module or count, combined with `&`, `|` and `~`.

A matcher holds no state of a run: the same op at the same place gets the same answer in the forward and in
recomputation, and one matcher may serve many regions and threads. It looks at names, shapes and sizes only, never at a
tensor's values. What the op alone tells (`of_op`) is told apart from what depends on the call, so that a policy need
not ask twice.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel._base.whole_numbers import as_int
from hyper_parallel.core.activation_checkpoint.op_names import (
    ATTENTION,
    CONVOLUTIONS,
    MATMULS,
    draws,
    is_op,
    is_random,
    names_of,
    no_op,
    written_name,
)
from hyper_parallel.core.activation_checkpoint.rules import Policy
from hyper_parallel.core.swap.sizes import format_size, parse_size

__all__ = [
    "matmuls",
    "attention",
    "convolutions",
    "random_ops",
    "ops",
    "larger_than",
    "in_module",
    "every",
    "as_matcher",
    "Matcher",
]

# ctx, op and self are positional only in every call below: ops have arguments of any name, `self` among them.


class Matcher(ABC):
    """Says which ops are meant. Combine with `&`, `|` and `~`; `save`, `swap` and `recompute` say what happens to them.

    Example:
        >>> matmuls & ~in_module("layers.*.attention")
        matmuls & ~in_module("layers.*.attention")
    """

    @abstractmethod
    def __call__(self, ctx: object, op: object, /, *args: Any, **kwargs: Any) -> bool: ...

    @abstractmethod
    def of_op(self, op: object) -> bool | None:
        """Answer from the op alone: True and False hold for every call of it; None where it depends on the call."""

    @property
    def is_pure(self) -> bool:
        """Tell whether no function of a user is asked."""
        return all(part.is_pure for part in self._inner())

    def _inner(self) -> tuple[Matcher, ...]:
        """Return the matchers that this one asks."""
        return ()

    def __and__(self, other: object) -> Matcher:
        return _All(_parts(_All, self, other))

    def __rand__(self, other: object) -> Matcher:
        return _All(_parts(_All, other, self))

    def __or__(self, other: object) -> Matcher:
        return _Any(_parts(_Any, self, other))

    def __ror__(self, other: object) -> Matcher:
        return _Any(_parts(_Any, other, self))

    def __invert__(self) -> Matcher:
        return self.inner if isinstance(self, _Not) else _Not(self)

    def __bool__(self) -> bool:
        # `matmuls and attention` would quietly be `attention`.
        raise ArgumentTypeError(
            "A matcher is neither true nor false before it is asked about an op.",
            got=repr(self),
            do="Combine matchers with `&`, `|` and `~` instead of `and`, `or` and `not`.",
        )


@dataclass(frozen=True, repr=False)
class _Table(Matcher):
    """One of the named matchers of this file. It is pickled by its name, as a function is."""

    name: str
    names: frozenset[str]

    def __call__(self, ctx: object, op: object, /, *args: Any, **kwargs: Any) -> bool:
        return self.of_op(op)

    def of_op(self, op: object) -> bool:
        try:
            return not self.names.isdisjoint(names_of(op))
        except TypeError:  # what cannot be a key
            raise no_op(op) from None

    def __reduce__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, repr=False)
class _Random(Matcher):
    """The matcher of ops that draw random numbers: known by name, or by PyTorch's own tag."""

    def __call__(self, ctx: object, op: object, /, *args: Any, **kwargs: Any) -> bool:
        known = self.of_op(op)
        return known if known is not None else draws(op, args, kwargs)

    def of_op(self, op: object) -> bool | None:
        try:
            return is_random(op)
        except TypeError:  # what cannot be a key
            raise no_op(op) from None

    def __reduce__(self) -> str:
        return "random_ops"

    def __repr__(self) -> str:
        return "random_ops"


@dataclass(frozen=True, repr=False)
class _Ops(Matcher):
    names: frozenset[str]

    def __call__(self, ctx: object, op: object, /, *args: Any, **kwargs: Any) -> bool:
        return self.of_op(op)

    def of_op(self, op: object) -> bool:
        return not self.names.isdisjoint(names_of(op))

    def __repr__(self) -> str:
        return f"ops({_quoted(sorted(self.names))})"


@dataclass(frozen=True, repr=False)
class _LargerThan(Matcher):
    num_bytes: int

    def __call__(self, ctx: Any, op: object, /, *args: Any, **kwargs: Any) -> bool:
        return _output_bytes(ctx.op_output) > self.num_bytes

    def of_op(self, op: object) -> None:
        return None

    def __repr__(self) -> str:
        size = format_size(self.num_bytes)
        exact = parse_size(size, "size") == self.num_bytes
        return f'larger_than("{size}")' if exact else f"larger_than({self.num_bytes})"


@dataclass(frozen=True, repr=False)
class _InModule(Matcher):
    patterns: tuple[str, ...]

    def __call__(self, ctx: Any, op: object, /, *args: Any, **kwargs: Any) -> bool:
        return _is_inside(ctx.module, self.patterns)

    def of_op(self, op: object) -> None:
        return None

    def __repr__(self) -> str:
        return f"in_module({_quoted(self.patterns)})"


@dataclass(frozen=True, repr=False)
class _Every(Matcher):
    n: int
    of: Matcher
    offset: int

    def __call__(self, ctx: Any, op: Any, /, *args: Any, **kwargs: Any) -> bool:
        return bool(ctx.occurrence % self.n == self.offset) and self.of(ctx, op, *args, **kwargs)

    def _inner(self) -> tuple[Matcher, ...]:
        return (self.of,)

    def of_op(self, op: object) -> bool | None:
        known = self.of.of_op(op)
        return known if known is False or self.n == 1 else None

    def __repr__(self) -> str:
        offset = f", offset={self.offset}" if self.offset else ""
        return f"every({self.n}, of={self.of!r}{offset})"


@dataclass(frozen=True, repr=False)
class _All(Matcher):
    parts: tuple[Matcher, ...]

    def __call__(self, ctx: object, op: object, /, *args: Any, **kwargs: Any) -> bool:
        return all(part(ctx, op, *args, **kwargs) for part in self.parts)

    def _inner(self) -> tuple[Matcher, ...]:
        return self.parts

    def of_op(self, op: object) -> bool | None:
        known = [part.of_op(op) for part in self.parts]
        return False if False in known else None if None in known else True

    def __repr__(self) -> str:
        return " & ".join(map(_in_parentheses, self.parts))


@dataclass(frozen=True, repr=False)
class _Any(Matcher):
    parts: tuple[Matcher, ...]

    def __call__(self, ctx: object, op: object, /, *args: Any, **kwargs: Any) -> bool:
        return any(part(ctx, op, *args, **kwargs) for part in self.parts)

    def _inner(self) -> tuple[Matcher, ...]:
        return self.parts

    def of_op(self, op: object) -> bool | None:
        known = [part.of_op(op) for part in self.parts]
        return True if True in known else None if None in known else False

    def __repr__(self) -> str:
        return " | ".join(map(_in_parentheses, self.parts))


@dataclass(frozen=True, repr=False)
class _Not(Matcher):
    inner: Matcher

    def __call__(self, ctx: object, op: object, /, *args: Any, **kwargs: Any) -> bool:
        return not self.inner(ctx, op, *args, **kwargs)

    def _inner(self) -> tuple[Matcher, ...]:
        return (self.inner,)

    def of_op(self, op: object) -> bool | None:
        known = self.inner.of_op(op)
        return None if known is None else not known

    def __repr__(self) -> str:
        return f"~{_in_parentheses(self.inner)}"


@dataclass(frozen=True, repr=False)
class _Own(Matcher):
    """A user's own function as a matcher."""

    function: Callable[..., bool]

    def __call__(self, ctx: object, op: object, /, *args: Any, **kwargs: Any) -> bool:
        answer = self.function(ctx, op, *args, **kwargs)
        if answer is True or answer is False:
            return answer
        # Every member of an enum is true: a policy function given as a matcher would match always.
        raise ArgumentTypeError(
            f"The matcher `{self!r}` gave neither True nor False.",
            expected="a bool",
            got=describe(answer),
            where=str(op),
        )

    @property
    def is_pure(self) -> bool:
        return False

    def of_op(self, op: object) -> None:
        return None

    def __repr__(self) -> str:
        return str(getattr(self.function, "__qualname__", None) or repr(self.function))


matmuls: Matcher = _Table("matmuls", MATMULS)
"""All matrix products: `mm`, `bmm`, `linear`, … in any precision, also grouped and sparse ones; no convolutions."""

attention: Matcher = _Table("attention", ATTENTION)
"""Fused attention of the frameworks, flash_attn, xformers and flex_attention (not attention made of single matmuls)."""

convolutions: Matcher = _Table("convolutions", CONVOLUTIONS)
"""Convolutions, transposed ones included."""

random_ops: Matcher = _Random()
"""Ops that draw random numbers, in place or not; attention only in a call with dropout."""


def ops(*names: Any) -> Matcher:
    """Match the ops named here: op objects, or names with or without overload and namespace.

    `torch.ops.aten.mm` and "aten.mm" mean every overload, "aten.mm.default" one of them, "mm" the op in any namespace.

    Raises:
        ArgumentError, ArgumentTypeError: an entry is no op and no name of one.

    Example:
        >>> from hyper_parallel import policies as p
        >>> p.save(p.ops("aten.mm", "aten.exp.default"))
        save ops("aten.exp.default", "aten.mm"); recompute the rest
    """
    return _Ops(frozenset(written_name(name) for name in names))


def larger_than(size: int | str) -> Matcher:
    """Match ops whose outputs together have more bytes than `size`: an int, or a text such as "1MiB".

    A view counts with all the bytes it shows, a sparse tensor as if it were dense, a distributed one with its local
    part.

    Example:
        >>> larger_than(2**20)
        larger_than("1 MiB")
    """
    return _LargerThan(parse_size(size, "larger_than"))


def in_module(*patterns: str) -> Matcher:
    """Match ops that run in a module of one of these paths, or anywhere inside it.

    Per segment `*`, `?` and `[…]` are as in file names; `**` stands for any number of segments, none included.

    Raises:
        ArgumentError: no pattern, or one with an empty segment.
        ArgumentTypeError: a pattern is no text.

    Example:
        >>> from hyper_parallel import policies as p
        >>> p.swap(p.in_module("layers.*.mlp", "**.experts"))
        swap in_module("layers.*.mlp", "**.experts"); recompute the rest
    """
    expected = 'paths such as "layers.*.mlp"'
    if not patterns:
        raise ArgumentError("`in_module` needs a pattern.", expected=expected, got="none")
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ArgumentTypeError("A module pattern is no text.", expected=expected, got=describe(pattern))
        if "" in pattern.split("."):
            raise ArgumentError("A module pattern has an empty part.", expected=expected, got=describe(pattern))
    return _InModule(patterns)


def every(n: int, *, of: object, offset: int = 0) -> Matcher:
    """Match every `n`-th call of the ops that `of` matches, from the one at `offset` on.

    Counted is how often the same op ran before in the same module in this call of the region (`ctx.occurrence`),
    nothing else, so that the answer does not depend on what ran before the region. Three `mm` in one module are its
    occurrences 0, 1 and 2; one `mm` in each of three modules is three times occurrence 0.

    Raises:
        ArgumentError: `n` is less than 1, or `offset` not in 0 to n - 1.

    Example:
        >>> from hyper_parallel import policies as p
        >>> p.save(p.every(2, of=p.matmuls))
        save every(2, of=matmuls); recompute the rest
    """
    for name, value in (("n", n), ("offset", offset)):
        if as_int(value) is None:
            raise ArgumentTypeError(f"`{name}` of `every` is no integer.", expected="an int", got=describe(value))
    if n < 1:
        raise ArgumentError("`every` needs n of at least 1.", expected="1, 2, 3, …", got=describe(n))
    if not 0 <= offset < n:
        raise ArgumentError("`offset` of `every` can never match.", expected=f"0 to {n - 1}", got=describe(offset))
    return _Every(int(n), as_matcher(of), int(offset))


def as_matcher(value: object) -> Matcher:
    """Return a matcher of this module as it is, and a function as a matcher. Anything else is an error with a hint."""
    if isinstance(value, Matcher):
        return value
    # Ops, policies and classes can be called, too, and would match everything or fail inside a region.
    if callable(value) and not isinstance(value, (Policy, type)) and not is_op(value):
        return _Own(value)
    raise ArgumentTypeError(
        "This is no matcher.",
        expected="one of hyper_parallel.policies, or a function (ctx, op, *args, **kwargs) -> bool",
        got=describe(value),
        do=_matcher_hint(value),
    )


def _matcher_hint(value: object) -> str | None:
    if is_op(value) or isinstance(value, str):
        pattern = f" (or in_module({value!r}) for a module)" if isinstance(value, str) else ""
        return f"Write ops({value!r}){pattern}."
    if isinstance(value, (list, tuple, set, frozenset)):
        return "Write ops(*these) for ops; combine matchers with `|`."
    if isinstance(value, Policy):
        return "Combine policies with choose(…)."
    if isinstance(value, type):
        return 'Modules are chosen by their path: in_module("layers.*.mlp").'
    return None


def _parts(kind: type[_All] | type[_Any], *values: Any) -> tuple[Matcher, ...]:
    found: list[Matcher] = []
    for value in values:
        matcher = as_matcher(value)
        # Flat, so that (a & b) & c and a & (b & c) are equal.
        found += matcher.parts if isinstance(matcher, kind) else (matcher,)
    return tuple(found)


def _in_parentheses(matcher: Matcher) -> str:
    return f"({matcher!r})" if isinstance(matcher, (_All, _Any)) else repr(matcher)


def _quoted(names: Any) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _output_bytes(output: Any) -> int:
    if isinstance(output, (tuple, list)):
        return sum(map(_output_bytes, output))
    if isinstance(output, dict):
        return sum(map(_output_bytes, output.values()))
    tensor = getattr(output, "_local_tensor", output)  # the part of a DTensor that is here
    try:
        return int(getattr(tensor, "nbytes", 0))
    except RuntimeError:  # PyTorch, for a sparse tensor
        return int(tensor.numel() * tensor.element_size())


@functools.lru_cache(maxsize=1 << 16)
def _is_inside(path: str, patterns: tuple[str, ...]) -> bool:
    segments = path.split(".") if path else []
    return any(_matches_start(pattern.split("."), segments) for pattern in patterns)


def _matches_start(pattern: list[str], segments: list[str]) -> bool:
    if not pattern:
        return True
    if pattern[0] == "**":
        return any(_matches_start(pattern[1:], segments[skipped:]) for skipped in range(len(segments) + 1))
    return bool(segments) and fnmatchcase(segments[0], pattern[0]) and _matches_start(pattern[1:], segments[1:])
