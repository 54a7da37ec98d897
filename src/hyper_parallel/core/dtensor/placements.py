"""What one mesh axis does to a tensor: `Shard(dim)`, `Replicate()` or `Partial(op)`."""

from __future__ import annotations

from typing import Any, ClassVar

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel._base.whole_numbers import as_int
from hyper_parallel.core.dtensor.interned import Interned

__all__ = ["Partial", "Placement", "REDUCE_OPS", "Replicate", "Shard", "as_placement", "check_op"]

REDUCE_OPS = ("sum", "avg", "max", "min", "prod")


class Placement(Interned):
    """Base of the three placements. Equal ones are the same object."""

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        return False

    def is_replicate(self) -> bool:
        return False

    def is_partial(self, op: str | None = None) -> bool:
        return False


class Shard(Placement):
    """Each rank of the axis holds one chunk of `dim`.

    A negative dim counts from the end, once a layout knows how many there are.

    Example:
        >>> Shard(0) is Shard(0)
        True
    """

    __slots__ = ("dim",)
    dim: int
    _made: ClassVar[dict[int, Shard]] = {}

    def __new__(cls, dim: int) -> Shard:
        # A bool is an int to Python and would find Shard(1) in the table.
        found = cls._made.get(dim) if type(dim) is int else None
        if found is not None:
            return found
        place = as_int(dim)
        if place is None:
            raise ArgumentTypeError("Shard takes a tensor dim.", expected="an int", got=describe(dim))
        made = object.__new__(cls)
        made._fill(dim=place)
        return cls._made.setdefault(made.dim, made)

    def is_shard(self, dim: int | None = None) -> bool:
        return dim is None or dim == self.dim

    def __repr__(self) -> str:
        return f"Shard({self.dim})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Shard, (self.dim,)


class Replicate(Placement):
    """Each rank of the axis holds the same values."""

    __slots__ = ()
    _made: ClassVar[list[Replicate]] = []

    def __new__(cls) -> Replicate:
        if not cls._made:
            cls._made.append(object.__new__(cls))
        return cls._made[0]

    def is_replicate(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "Replicate()"

    def __reduce__(self) -> tuple[Any, ...]:
        return Replicate, ()


class Partial(Placement):
    """The value is the reduction, by `op`, of what the ranks of the axis hold.

    Example:
        >>> Partial("max").op
        'max'
    """

    __slots__ = ("op",)
    op: str
    _made: ClassVar[dict[str, Partial]] = {}

    def __new__(cls, op: str = "sum") -> Partial:
        found = cls._made.get(op) if isinstance(op, str) else None
        if found is not None:
            return found
        check_op(op)
        made = object.__new__(cls)
        made._fill(op=op)
        return cls._made.setdefault(op, made)

    def is_partial(self, op: str | None = None) -> bool:
        return op is None or op == self.op

    def __repr__(self) -> str:
        return f"Partial({self.op!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Partial, (self.op,)


def as_placement(value: Any) -> Placement | None:
    """Return a placement of this package for one of it or of PyTorch; None for anything else.

    PyTorch's is known by its class's name: nothing is imported.

    Example:
        >>> as_placement(Shard(0)), as_placement("tp")
        (Shard(0), None)
    """
    if isinstance(value, Placement):
        return value
    kind = type(value)
    if kind.__module__.partition(".")[0] != "torch":
        return None
    # By its exact name: PyTorch's `_StridedShard` is a subclass of `Shard` that splits in another order.
    if kind.__name__ == "Shard":
        return Shard(value.dim)
    if kind.__name__ == "Replicate":
        return Replicate()
    if kind.__name__ == "Partial":
        return Partial({"product": "prod"}.get(value.reduce_op, value.reduce_op))
    return None


def check_op(op: object) -> None:
    """Raise where `op` names no reduction."""
    if not isinstance(op, str):
        raise ArgumentTypeError("A reduction is named by a string.", expected=_ops(), got=describe(op))
    if op not in REDUCE_OPS:
        raise ArgumentError("There is no such reduction.", expected=_ops(), got=repr(op), do="Name one of these.")


def _ops() -> str:
    return f"one of {', '.join(REDUCE_OPS)}"


Replicate()  # made before there are threads
