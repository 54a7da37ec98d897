"""What a record is made of: values, ops, and what is known about operators."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from hyper_parallel.platform.torch.activation_checkpoint.placeholders import View
from hyper_parallel.platform.torch.activation_checkpoint.random_state import GeneratorState


class Origin(Enum):
    MADE = "made"  # by an op of the region, into memory of the region
    INPUT = "input"
    OUTSIDE = "outside"
    WRITTEN = "written"  # by an op of the region, into an input or an outside tensor


class Value:
    """One state of one storage.

    `kept` is where the value is available: an object with `memory()` and `is_changed()`, see `recording`. `ref` keeps the
    address of the storage from being given to another one, so that it can be a key; it keeps no memory.
    """

    __slots__ = (
        "__weakref__",
        "device",
        "is_empty",
        "is_weight_cast",
        "is_written",
        "kept",
        "made_version",
        "num_bytes",
        "num_writes",
        "op",
        "origin",
        "ref",
        "seen_version",
    )

    def __init__(self, origin: Origin, op: int, storage: torch.UntypedStorage, device: torch.device) -> None:
        self.origin = origin
        self.op = op  # index of the op that made it; -1 for inputs and outside tensors
        self.ref = StorageWeakRef(storage)
        self.num_bytes: int = storage.nbytes()
        self.device = device
        self.kept: Any = None
        self.is_empty = False  # no op has written it
        self.is_weight_cast = False  # autocast's copy of a parameter: cast again rather than swapped (rule 3)
        self.is_written = False  # an op of the region has written over it, and it is not the region's memory
        self.made_version = 0  # of the tensor in which an op gave it
        self.num_writes = 0  # counted from there until autograd saved it: the op's own, and that of `mark_dirty`
        self.seen_version = -1  # of the tensor in which it was last read


def is_available(value: Value) -> bool:
    """Whether a replay can have the value without making it."""
    return value.kept is not None or (value.origin in (Origin.INPUT, Origin.OUTSIDE) and not value.is_written)


class Fresh(NamedTuple):
    """An output in memory of its own."""

    value: Value
    view: View


class RecordedOp:
    """One op of a record. See `Op` in replay_plan.py for `reads`, `makes` and `must_run`."""

    __slots__ = (
        "func", "index", "makes", "module", "must_run", "occurrence", "outputs", "policy", "reads", "rest",
        "state", "targets",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        func: Any,
        reads: tuple[Value | None, ...],
        rest: tuple[Any, ...],
        module: str,
        occurrence: int,
        state: GeneratorState | None,
    ) -> None:
        self.index = index
        self.func = func
        self.reads = reads
        self.rest = rest  # the arguments that are no tensors
        self.module = module
        self.occurrence = occurrence
        self.state = state  # of the generator it drew from
        self.makes: tuple[Value, ...] = ()
        self.targets: tuple[tuple[int, Value], ...] = ()  # (which tensor argument it wrote, the value it has since)
        self.outputs: Any = None  # its result, with Fresh, Argument and Constant in place of what they stand for
        self.must_run = False
        self.policy: Any = None

    def place(self) -> OpPlace:
        """Its name, for labels that outlive the record."""
        return OpPlace(self.module, self.func, self.occurrence)

    def __str__(self) -> str:
        return str(self.place())


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


class Traits(NamedTuple):
    """What is known about an operator before it runs."""

    is_view: bool
    is_random: bool
    writes: frozenset[int | str]  # arguments it writes, by position and name
    must_run: bool
    has_schema: bool
    is_empty: bool  # its result has memory and no contents


_traits: dict[Any, Traits] = {}

# They share their input's memory and their schema does not say so.
_UNANNOTATED_VIEWS = {"aten::_unsafe_view", "aten::_reshape_alias", "aten::lift_fresh", "aten::alias"}
# They update the running statistics and their schema does not say so.
_BATCH_NORMS = {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}
_RUNNING_STATISTICS: frozenset[int | str] = frozenset({3, 4, "running_mean", "running_var"})
# They change a tensor's storage itself, which no copy can stand for.
_CHANGES_STORAGE = {"aten::resize_", "aten::resize_as_", "aten::set_", "aten::set", "inductor::resize_storage_bytes_"}
_EMPTY = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
# Every rank must take part, whatever this one needs.
_COLLECTIVES = ("c10d::", "_c10d_functional::", "c10d_functional::", "_dtensor::", "symm_mem::")


def traits_of(func: Any) -> Traits:
    found = _traits.get(func)
    if found is None:
        found = _traits[func] = _read_traits(func)
    return found


def _read_traits(func: Any) -> Traits:
    schema = getattr(func, "_schema", None)
    if schema is None:  # a higher order operator, such as a compiled region: it may draw random numbers, nobody says
        return Traits(False, True, frozenset(), False, False, False)
    name = schema.name
    writes: set[int | str] = set()
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes |= {argument.name} if argument.kwarg_only else {position, argument.name}
    if name in _BATCH_NORMS:
        writes |= _RUNNING_STATISTICS
    aliases = [output.alias_info for output in schema.returns]
    is_view = not writes and (name in _UNANNOTATED_VIEWS or any(alias is not None for alias in aliases))
    return Traits(
        is_view,
        torch.Tag.nondeterministic_seeded in func.tags,
        frozenset(writes),
        name in _CHANGES_STORAGE or name.startswith(_COLLECTIVES),
        True,
        name in _EMPTY,
    )


class Arguments(NamedTuple):
    """The arguments of an op, sorted."""

    tensors: list[torch.Tensor]
    rest: tuple[Any, ...]  # all that is no tensor, and how the tensors look at their storages
    written: list[int]  # which of `tensors` it writes


def sort_arguments(args: tuple[Any, ...], kwargs: dict[str, Any], traits: Traits) -> Arguments:
    tensors: list[torch.Tensor] = []
    rest: list[Any] = []
    written: list[int] = []
    writes = traits.writes
    for position, argument in enumerate(args):
        first = len(tensors)
        _sort(argument, tensors, rest)
        if writes and position in writes:
            written += range(first, len(tensors))
    for name, argument in kwargs.items():
        first = len(tensors)
        rest.append(name)
        _sort(argument, tensors, rest)
        if writes and name in writes:
            written += range(first, len(tensors))
    return Arguments(tensors, tuple(rest), written)


def _sort(argument: Any, tensors: list[torch.Tensor], rest: list[Any]) -> None:
    if isinstance(argument, torch.Tensor):
        tensors.append(argument)
        rest.append(_look(argument))  # two views of one value are two arguments
    elif type(argument) in (list, tuple):
        rest.append(len(argument))
        for each in argument:
            _sort(each, tensors, rest)
    elif type(argument) is dict:
        for key, each in argument.items():
            rest.append(key)
            _sort(each, tensors, rest)
    else:
        rest.append(argument)


def _look(tensor: torch.Tensor) -> tuple[Any, ...]:
    try:
        return tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()
    except (NotImplementedError, RuntimeError):  # sparse
        return tensor.dtype, tensor.size()


def replaced(argument: Any, by_id: dict[int, torch.Tensor]) -> Any:
    """The same arguments with some tensors replaced."""
    if isinstance(argument, torch.Tensor):
        return by_id.get(id(argument), argument)
    if type(argument) in (list, tuple):
        return type(argument)(replaced(each, by_id) for each in argument)
    if type(argument) is dict:
        return {key: replaced(each, by_id) for key, each in argument.items()}
    return argument


def same_rest(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    """Whether the arguments that are no tensors are the same; not-a-number equals itself."""
    if len(left) != len(right):
        return False
    for a, b in zip(left, right, strict=True):
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
