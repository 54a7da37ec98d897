"""What a record is made of: values, ops, and the arguments of ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, NamedTuple

import torch

from hyper_parallel.core.regions.module_calls import Occurrence
from hyper_parallel.core.regions.policy import Answer
from hyper_parallel.platform.torch.regions.call_template import CallTemplate
from hyper_parallel.platform.torch.regions.local_parts import PLAIN_TYPES
from hyper_parallel.platform.torch.regions.placeholders import View
from hyper_parallel.platform.torch.regions.random_state import GeneratorState


class Origin(Enum):
    MADE = "made"  # by an op of the region, into memory of the region
    INPUT = "input"
    OUTSIDE = "outside"
    WRITTEN = "written"  # by an op of the region, into an input or an outside tensor


_INPUT, _OUTSIDE = Origin.INPUT, Origin.OUTSIDE
_free_weak_ref: Callable[[int], None] = torch.Storage._free_weak_ref
_is_expired: Callable[[int], bool] = torch.Storage._expired


class WeakStorages:
    """Keeps the addresses of storages from being given to others, and no memory."""

    __slots__ = ("addresses",)

    def __init__(self) -> None:
        self.addresses: list[int] = []

    def add(self, storage: Any) -> int:
        """The address, which is the storage's key."""
        address: int = storage._weak_ref()
        self.addresses.append(address)
        return address

    def __del__(self, free: Callable[[int], None] = _free_weak_ref) -> None:
        for address in getattr(self, "addresses", ()):  # none where Ctrl-C came while it was made
            free(address)


class StorageRef(NamedTuple):
    """A weak reference to the storage of a `Value`."""

    cdata: int

    def expired(self) -> bool:
        return bool(_is_expired(self.cdata))


class Value:
    """One state of one storage.

    `kept` is where the value is available: an object with `memory()` and `is_changed()`, see `recording`. `key` is the address of the storage:
    a weak reference of the record keeps it from being given to another one.
    """

    # What most values never set is on the class: one is made for every tensor that an op gives.
    kept: Any = None
    alias: torch.Tensor | None = None  # of one from outside that is no parameter: what may be compared with it
    view: View  # of the tensor in which an op gave it; only values that an op gave as a result have one
    is_empty = False  # no op has written it
    is_weight_cast = False  # autocast's copy of a parameter: cast again rather than swapped
    is_written = False  # an op of the region has written over it, and it is not the region's memory
    num_writes = 0  # counted from `made_version` until autograd saved it: the op's own, and that of `mark_dirty`
    seen_version = -1  # of the tensor in which it was last read

    def __init__(
        self, origin: Origin, op: int, key: int, num_bytes: int, device: torch.device, version: int = 0
    ) -> None:
        self.key = key
        self.origin = origin
        self.op = op  # index of the op that made it; -1 for inputs and outside tensors
        self.num_bytes = num_bytes
        self.device = device
        self.made_version = version  # of the tensor in which an op gave it

    def is_gone(self) -> bool:
        """Whether nobody has the storage any more."""
        return bool(_is_expired(self.key))

    @property
    def ref(self) -> StorageRef:
        """The weak reference, in the words of PyTorch."""
        return StorageRef(self.key)


Fresh = Value  # as the output of an op: one in memory of its own


def is_available(value: Value) -> bool:
    """Whether a replay can have the value without making it."""
    if value.kept is not None:
        return True
    origin = value.origin
    return (origin is _INPUT or origin is _OUTSIDE) and not value.is_written


class RecordedOp:
    """One op of a record. See `Op` in replay_plan.py for `reads`, `makes` and `must_run`."""

    # One is made for every op of every call, and lives until backward: without a dict it is one object to the garbage collector.
    __slots__ = (
        "_several", "func", "index", "known", "must_run", "outputs", "policy", "reads", "rest", "state", "targets", "template", "where",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        func: Any,
        reads: list[Value | None],
        rest: list[Any],
        where: Occurrence,
        state: GeneratorState | None = None,
    ) -> None:
        self.index = index
        self.func = func
        self.reads = reads
        self.rest = rest  # the arguments that are no tensors
        self.where = where
        self.state = state  # of the generator it drew from
        self.outputs: Any = None  # its result, with Value, Argument and Constant in place of what they stand for
        self.targets: tuple[tuple[int, Value], ...] = ()  # (which tensor argument it wrote, the value it has since)
        self.must_run = False
        self.policy: Answer | None = None  # what a policy said about it; None: it was not asked
        self.known: KnownOp | None = None  # the same op of an earlier call, whose `rest` this one has
        self.template: CallTemplate | None = None  # how to call it again; that of `known`, if there is one
        self._several: tuple[Value, ...] | None = None  # what it makes, if that is not the one value of `outputs`

    @property
    def makes(self) -> tuple[Value, ...]:
        if self._several is not None:
            return self._several
        return (self.outputs,) if type(self.outputs) is Value else ()

    @makes.setter
    def makes(self, values: tuple[Value, ...]) -> None:
        self._several = values

    @property
    def module(self) -> str:
        return self.where.module

    @property
    def occurrence(self) -> int:
        return self.where.occurrence

    @property
    def call(self) -> int:
        return self.where.call

    @property
    def occurrence_in_call(self) -> int:
        return self.where.occurrence_in_call

    def place(self) -> OpPlace:
        """Its name, for labels that outlive the record."""
        known = self.known
        if known is None or known.where is not self.where:
            return OpPlace(self.where.module, self.func, self.where.occurrence)
        if known.place is None:
            known.place = OpPlace(self.where.module, self.func, self.where.occurrence)
        return known.place

    def __str__(self) -> str:
        return str(self.place())


class KnownOp:
    """What an op of an earlier call looked like: nothing but types, numbers and sizes.

    A record whose ops look the same shares these objects with it, which are most of those it would hold.
    """

    __slots__ = ("func", "place", "rest", "template", "types", "view", "where")

    def __init__(
        self,
        func: object,
        where: Occurrence,
        rest: list[Any],
        types: list[Any],
        view: View | None,
        template: CallTemplate | None,
    ) -> None:
        self.func = func
        self.where = where
        self.rest = rest
        self.types = types  # of `rest`: 1, 1.0 and True are different arguments
        self.view = view  # of its result, if that is one tensor
        self.template = template  # None: it is not called from one
        self.place: OpPlace | None = None  # when somebody has asked for it

    def has(self, rest: list[Any]) -> bool:
        # Types first: these have an equality that looks at nothing else.
        return list(map(type, rest)) == self.types and self.rest == rest  # plant: same-scalars


# What may be in the `rest` of a `KnownOp`: it outlives the call. Tuples are those of `sort`.
_SMALL = frozenset(
    {tuple, int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
)


def known_ops(ops: list[RecordedOp]) -> list[KnownOp | None]:
    """What the next call of the same function may share with these."""
    found: list[KnownOp | None] = []
    for op in ops:
        known = op.known
        if known is None or known.where != op.where:
            known = None
            types = list(map(type, op.rest))
            if _SMALL.issuperset(types):
                outputs = op.outputs
                view = outputs.view if type(outputs) is Value else None
                if view is not None and view.outer is not None:
                    view = None
                template = op.template if op.known is None else op.known.template
                if template is not None and template.looks is None:
                    template = None
                known = KnownOp(op.func, op.where, op.rest, types, view, template)
        found.append(known)
    return found


class OpPlace(NamedTuple):
    """Where in the model an op ran. Holds no value."""

    module: str
    func: Any
    occurrence: int

    def __str__(self) -> str:
        number = "" if self.occurrence == 0 else f" (number {self.occurrence + 1} there)"
        return f"{self.module or 'region'}, {self.func}{number}"


class Argument(NamedTuple):
    """An output that is one of the op's own tensor arguments."""

    position: int


class Constant(NamedTuple):
    """An output that is no tensor."""

    value: Any


class Arguments:
    """The arguments of an op, sorted."""

    __slots__ = ("rest", "tensors", "written")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any], writes: frozenset[int | str]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.rest: list[Any] = []  # all that is no tensor, and how the tensors look at their storages
        self.written: list[int] = []  # which of `tensors` it writes
        for place, argument in (*enumerate(args), *kwargs.items()):
            first = len(self.tensors)
            if isinstance(place, str):
                self.rest.append(place)
            sort((argument,), {}, self.tensors, self.rest)
            if place in writes:
                self.written += range(first, len(self.tensors))


def sort(arguments: Iterable[Any], by_name: dict[str, Any], tensors: list[torch.Tensor], rest: list[Any]) -> None:
    """Tell the tensors among the arguments of an op from the rest: see `Arguments`."""
    for argument in arguments:
        kind = type(argument)
        if kind in PLAIN_TYPES or isinstance(argument, torch.Tensor):
            tensors.append(argument)
            try:  # two views of one value are two arguments
                rest.append(  # plant: view-argument
                    (argument.dtype, argument.size(), argument.stride(), argument.storage_offset())
                )
            except (NotImplementedError, RuntimeError):  # sparse
                rest.append((argument.dtype, argument.size()))
        elif kind is list or kind is tuple:
            rest.append(len(argument))
            sort(argument, {}, tensors, rest)
        elif kind is dict:
            sort((), argument, tensors, rest)
        else:
            rest.append(argument)
    for name, argument in by_name.items():
        rest.append(name)
        sort((argument,), {}, tensors, rest)


def replaced(argument: Any, by_id: dict[int, torch.Tensor]) -> Any:
    """The same arguments with some tensors replaced."""
    if isinstance(argument, torch.Tensor):
        return by_id.get(id(argument), argument)
    if type(argument) in (list, tuple):
        return type(argument)(replaced(each, by_id) for each in argument)
    if type(argument) is dict:
        return {key: replaced(each, by_id) for key, each in argument.items()}
    return argument


def same_rest(left: list[Any], right: list[Any]) -> bool:
    """Whether the arguments that are no tensors are the same; not-a-number equals itself."""
    if len(left) != len(right):
        return False
    for a, b in zip(left, right):  # noqa: B905 - see above
        if a is b:
            continue
        if type(a) is not type(b):
            return False
        try:
            if a != b and not (a != a and b != b):
                return False
        except (RuntimeError, ValueError, TypeError):  # what cannot be compared is not known to differ
            continue
    return True


def has_ragged(rest: Iterable[Any]) -> bool:
    """Whether an op was given a nested tensor, or a size of one: its ragged dim has another name in every run."""
    return any(has_ragged(each) if isinstance(each, (list, tuple)) else isinstance(each, torch.SymInt) for each in rest)
