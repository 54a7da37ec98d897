"""The forward of a region: every op is noted with the results it reads and makes, and the policy is asked about each.

How a tensor is recognised, and what cannot be: README of this folder.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from mindspore import MsDispatchMode, Tensor
from mindspore.ops.primitive import Primitive

from hyper_parallel.core.activation_checkpoint.op_names import is_random
from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy
from hyper_parallel.core.regions.module_calls import ModuleCalls, Occurrence
from hyper_parallel.core.regions.policy import PolicyContext, RegionPolicy
from hyper_parallel.platform.mindspore.regions.cell_paths import CALL, CellPaths
from hyper_parallel.platform.mindspore.regions.random_ops import (
    SEED_NAMES,
    draws_the_same_again,
    redo_dropout,
    seeds_of,
)
from hyper_parallel.platform.mindspore.regions.value_sums import value_sum
from hyper_parallel.platform.mindspore.swap.storages import (
    Look,
    aliased,
    copied,
    storage_address,
    storage_bytes,
    watcher,
    whole,
)
from hyper_parallel.platform.trees import leaves

_num_records = itertools.count()
# Ops that write into an argument: the name, and which ones. Those that begin with "Inplace" or "Assign" write the first.
_WRITES = {
    "BatchNorm": (3, 4),
    "SyncBatchNorm": (3, 4),
    "BatchNormExt": (3, 4),
    "ScatterUpdate": (0,),
    "ScatterAdd": (0,),
}
_WRITES_FIRST = ("Inplace", "Assign")
SETTLED = "hyper_parallel.settled"  # on a tensor: an op that reads it may raise, see `RegionMode`
_DEPTH = 4  # how many frames there are at least between `ModuleCalls.innermost` and who calls an op


class Call(NamedTuple):
    """An op as it reaches a dispatch mode."""

    func: Any
    name: str
    primitive: Any  # None for ops that come without one; then autograd is above the mode, and saves after it
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Call:
        if len(args) == 3 and isinstance(args[0], Primitive) and isinstance(args[1], str):
            return cls(func, func.name, args[0], tuple(args[2]), kwargs or {})
        return cls(func, func.name, None, args, kwargs or {})

    def sorted(self) -> tuple[list[Tensor], list[Any]]:
        """The tensors among the arguments, and the rest."""
        tensors: list[Tensor] = []
        rest: list[Any] = []
        _sort(self.args, tensors, rest)
        if self.kwargs:
            rest.append(tuple(self.kwargs))
            _sort(tuple(self.kwargs.values()), tensors, rest)
        attributes = getattr(self.primitive, "attrs", None)
        if attributes:
            rest.append({name: value for name, value in attributes.items() if name not in SEED_NAMES})
        return tensors, rest

    @property
    def takes_lists(self) -> bool:
        """Whether tensors come to it in lists, as to `Concat`."""
        return any(_holds_tensors(each) for each in self.args)

    def run(self, args: tuple[Any, ...] | None = None) -> Any:
        args = self.args if args is None else args
        if self.primitive is None:
            return self.func(*args, **self.kwargs)
        return self.func(self.primitive, self.name, args, **self.kwargs)


class Node:
    """A result of an op, or a tensor argument of the region (`op` is -1 and `position` its number).

    `kept` is where it is available: `Saved`, `Swappable`, or `Swapped` of saved_tensors. `source` is what a view looks at.
    """

    __slots__ = ("__weakref__", "address", "kept", "look", "num_bytes", "op", "position", "source")

    def __init__(self, op: int, position: int, tensor: Tensor, source: Node | None = None) -> None:
        self.op = op
        self.position = position
        self.look = Look.of(tensor)
        self.num_bytes = storage_bytes(tensor)
        self.address = storage_address(tensor) if self.num_bytes else 0
        self.source = source
        self.kept: Any = None

    @property
    def base(self) -> Node:
        """What has the memory."""
        node = self
        while node.source is not None:
            node = node.source
        return node


class Saves(NamedTuple):
    """What autograd saves right after an op and no op has made: copies that kernels make of views, tensors of custom functions."""

    op: int


class Constant(NamedTuple):
    """A result that is no tensor."""

    value: Any


class RecordedOp:
    """One op of a record."""

    __slots__ = (
        "before_write", "depends_on", "index", "is_primitive", "is_random", "must_run", "name", "nodes", "outputs", "outside", "policy", "reads",
        "redo", "rest", "seeds", "takes_lists", "where",
    )  # fmt: skip

    def __init__(self, index: int, call: Call, reads: list[Node | None], rest: list[Any], where: Occurrence) -> None:
        self.index = index
        self.name = call.name
        self.is_primitive = call.primitive is not None
        # A primitive that does not run in a dispatch mode waits for ever, if what it reads comes from `Concat`; and so may it for others.
        self.takes_lists = call.takes_lists
        self.must_run = self.is_primitive or self.takes_lists
        self.reads = reads  # None: a tensor that no op of the region has made
        self.depends_on: list[Node] = []  # what unknown tensors among them may be copies of
        self.outside: dict[
            int, bytes
        ] = {}  # which of them are no op's, input or parameter -> a checksum of what was in it
        self.rest = rest  # the arguments that are no tensors, and how the tensors look
        self.where = where
        self.seeds = seeds_of(call.primitive)
        self.is_random = False
        self.redo: Callable[[Any], Any] | None = None  # gives the results without the kernel
        self.outputs: Any = None  # its result, with Node and Constant in place of what they stand for
        self.nodes: list[Node] = []
        self.policy: CheckpointPolicy | None = None  # what a policy said about it; None: it was not asked
        self.before_write: dict[int, Tensor] = {}  # which tensor it writes -> what was in it

    def __str__(self) -> str:
        number = "" if self.where.occurrence == 0 else f" (number {self.where.occurrence + 1} there)"
        return f"{self.where.module or 'region'}, {self.name}{number}"


class Saved:
    """A result that stays where it is."""

    __slots__ = ("_alias",)

    def __init__(self, tensor: Tensor) -> None:
        self._alias = aliased(tensor)

    def tensor(self) -> Tensor:
        return self._alias


class Swappable(Saved):
    """A result that a policy wants swapped; it leaves when something is known to need it."""

    __slots__ = ()


class Record:
    """The ops of one call, and which tensor is which of their results.

    Invariant: `_newest[address]` is the result that was made last at that address, and what ops gave that share its memory. A marked tensor is
    the result that its mark says only if that one is among the newest where the tensor's memory is: writing by index may give a tensor other
    memory, and back again.
    """

    def __init__(self, policy: RegionPolicy | None, paths: CellPaths | None, keeps_random_state: bool) -> None:
        self.ops: list[RecordedOp] = []
        self.inputs: list[Node] = []
        self.runs_everything = False
        self.num_saved = 0  # by autograd since the last op began
        self.on_made: Callable[[RecordedOp], None] | None = None  # told when the results of an op are known
        self.is_in_primitive = False
        self._policy = policy
        self._calls = ModuleCalls(paths, CALL)
        self._keeps_random_state = keeps_random_state
        self.key = f"hyper_parallel.{next(_num_records)}"
        self._newest: dict[int, set[Node]] = {}
        self._inputs_at: dict[int, Node] = {}
        self._views: dict[
            tuple[Any, ...], list[Node]
        ] = {}  # dtype and shape -> what kernels make copies of before they read it

    # -- which result a tensor is ----------------------------------------------------------------------------------------

    def add_input(self, tensor: Tensor) -> None:
        node = Node(-1, len(self.inputs), tensor)
        self.inputs.append(node)
        if node.num_bytes:  # held by the caller while the region runs: its address is its own
            self._inputs_at.setdefault(node.address, node)
            self._note_view(node)

    def node_of(self, tensor: Tensor) -> Node | None:
        """The result or input that a tensor is; None if it is neither."""
        mark: weakref.ref[Node] | None = tensor._get_user_data(self.key)
        if mark is None:
            return self._inputs_at.get(storage_address(tensor)) if self._inputs_at else None
        node = mark()
        address = storage_address(tensor)
        if node is None or node.address != address:
            return None
        base = node.base
        if base.op < 0:
            return node if self._inputs_at.get(address) is base else None
        return node if node.num_bytes == 0 or base in self._newest.get(address, ()) else None

    def may_raise(self, call: Call) -> bool:
        return False  # what a policy raises can wait until the function is over

    def may_copy(self, tensor: Tensor) -> bool:
        """Whether a tensor that no op has made may be a copy that a kernel made of a view."""
        return (tensor.dtype, tensor.shape) in self._views

    def leave(self, exception: BaseException) -> None:
        raise exception

    def _mark(self, tensor: Tensor, node: Node, is_view: bool) -> None:
        # In MindSpore's own data of the tensor, which dies with it. Weak: a result that somebody keeps holds nothing else of the region.
        tensor._set_user_data(self.key, weakref.ref(node))
        if node.num_bytes == 0:
            return
        if node.source is None:
            if is_view and node.address in self._newest:
                self._newest[node.address].add(node)
            else:
                self._newest[node.address] = {node}
            self._inputs_at.pop(node.address, None)

    def _note_view(self, node: Node) -> None:
        self._views.setdefault((node.look.dtype, node.look.shape), []).append(node)

    # -- ops ----------------------------------------------------------------------------------------------------------

    def run(self, call: Call) -> Any:
        """Run an op and note it."""
        tensors, rest = call.sorted()
        innermost = self._calls.innermost(_DEPTH)
        reads = [self.node_of(tensor) for tensor in tensors]
        op = RecordedOp(len(self.ops), call, reads, rest, innermost.count(call.name))
        for tensor, node in zip(tensors, reads, strict=True):
            if node is None:
                op.depends_on += self._views.get((tensor.dtype, tensor.shape), ())
        op.outside = outside_sums(tensors, reads)
        writes = _writes(call)
        if writes:
            self._note_writes(op, tensors, writes)
        self.ops.append(op)
        self.num_saved = 0
        self.is_in_primitive = op.is_primitive
        try:
            result = call.run()
        finally:
            self.is_in_primitive = False
        op.outputs = self._note_outputs(op, result, tensors, bool(writes))
        if self.on_made is not None and op.is_primitive:
            self.on_made(op)
        if _is_random(call.name):
            self._note_random(op, call, result)
        if self._policy is not None and op.nodes:
            self._ask(self._policy, op, call, result)
        return result

    def _note_writes(self, op: RecordedOp, tensors: list[Tensor], writes: tuple[int, ...]) -> None:
        """An op writes into its arguments: replay writes into copies, and leaves nothing out."""
        self.runs_everything = True
        for position in writes:
            if position >= len(tensors):
                continue
            node = op.reads[position]
            if node is None or node.base.op < 0:  # not the region's own memory
                op.before_write[position] = copied(tensors[position])
            elif node.base.kept is not None:
                node.base.kept = None  # written over: it is made again

    def _note_outputs(self, op: RecordedOp, result: object, tensors: list[Tensor], writes: bool) -> Any:
        if isinstance(result, Tensor):
            return self._note_tensor(op, result, tensors, writes)
        if isinstance(result, (list, tuple)):
            return type(result)([self._note_outputs(op, each, tensors, writes) for each in result])
        return Constant(result)

    def _note_tensor(self, op: RecordedOp, tensor: Tensor, tensors: list[Tensor], writes: bool) -> Any:
        source = None
        is_view = False
        if not writes and storage_bytes(tensor):
            address = storage_address(tensor)
            for read, argument in zip(op.reads, tensors, strict=True):
                if storage_bytes(argument) and storage_address(argument) == address:
                    # None: of a copy that a kernel made, or a tensor from outside; then it stands for itself.
                    source, is_view = read, True
                    break
        node = Node(op.index, len(op.nodes), tensor, source)
        op.nodes.append(node)
        self._mark(tensor, node, is_view)
        if is_view or not node.look.is_contiguous:
            self._note_view(node)
        return node

    def _note_random(self, op: RecordedOp, call: Call, result: object) -> None:
        op.is_random = True
        if not self._keeps_random_state or draws_the_same_again(call.primitive):
            return
        op.redo = redo_dropout(call.name, call.primitive, result)
        if op.redo is None:
            # Nobody can bring its numbers back: all results are kept, whatever a policy says.
            for node, tensor in _pairs(op.outputs, result):
                if node.num_bytes and node.source is None:
                    node.kept = Saved(tensor)

    # -- policy -------------------------------------------------------------------------------------------------------

    def _ask(self, policy: RegionPolicy, op: RecordedOp, call: Call, result: object) -> None:
        where = op.where
        context = PolicyContext(False, where.module, where.occurrence, result, where.call, where.occurrence_in_call)
        op.policy = answer = policy.answer(context, call.name, call.args, call.kwargs)
        if not answer.keeps:
            return
        for node, tensor in _pairs(op.outputs, result):
            # A policy that keeps a view keeps what it looks at.
            base = node.base
            if base.op < 0 or base.kept is not None or base.num_bytes == 0:
                continue
            if node.source is not None:
                tensor = base.look.on(whole(tensor))
            base.kept = Swappable(tensor) if answer.swaps else Saved(tensor)


def outside_sums(tensors: list[Tensor], nodes: list[Node | None]) -> dict[int, bytes]:
    """A checksum of each tensor that nobody knows and that is no parameter, by position.

    That an iterator, a table or NumPy gives another one of the same shape in the second run is found by nothing else: MindSpore's tensors
    have no identity that lasts, and the copies that kernels make of views are new in each run.
    """
    return {
        position: value_sum(tensor)
        for position, (tensor, node) in enumerate(zip(tensors, nodes, strict=True))
        if node is None and tensor.param_info is None and storage_bytes(tensor) > 0
    }


def _writes(call: Call) -> tuple[int, ...]:
    name = call.name
    if name.startswith(_WRITES_FIRST):
        return (0,)
    return _WRITES.get(name, ())


def _is_random(name: str) -> bool:
    return is_random(name) is True


def _sort(arguments: tuple[Any, ...], tensors: list[Tensor], rest: list[Any]) -> None:
    """Tell the tensors among the arguments of an op from the rest."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            tensors.append(argument)
            rest.append((argument.dtype, argument.shape))
        elif type(argument) in (list, tuple):
            rest.append(len(argument))
            _sort(tuple(argument), tensors, rest)
        else:
            rest.append(argument)


def _holds_tensors(argument: Any) -> bool:
    return type(argument) in (list, tuple) and any(isinstance(each, Tensor) for each in argument)


def _pairs(outputs: Any, result: Any) -> list[tuple[Node, Tensor]]:
    if isinstance(outputs, Node):
        return [(outputs, result)]
    if isinstance(outputs, Constant):
        return []
    return [pair for each, tensor in zip(outputs, result, strict=True) for pair in _pairs(each, tensor)]


class Stop(BaseException):  # not an Exception: the function under replay may catch those
    """Ends a function that runs again."""


class Handler(Protocol):
    """What is told of every op."""

    def run(self, call: Call) -> Any: ...

    def may_raise(self, call: Call) -> bool:
        """Whether an exception may leave the handler here: see `RegionMode`."""

    def leave(self, exception: BaseException) -> None:
        """Raises it."""


class RegionMode(MsDispatchMode):
    """Sees every op, and hands it to a handler. Call `check` when the function is over.

    An exception that leaves a handler may leave the op's result behind: a tensor without memory that MindSpore waits for and never frees. It
    does not where all that the op reads was made in this mode, and not by an op that takes lists. So the op is run nevertheless, and the
    exception comes with a later op of which that is known (`may_raise`), or with `check`.
    """

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._postponed: BaseException | None = None

    def __ms_dispatch__(self, func: object, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        call = Call.of(func, args, kwargs)
        result = self._handled(call)
        watching = watcher()
        if watching is not None:
            watching.ran(call.sorted()[0], result)
        return result

    def _handled(self, call: Call) -> Any:
        if self._postponed is not None:
            if self._must_raise(call):
                self.check()
            result = call.run()
            if not call.takes_lists:
                given = set(map(storage_address, call.sorted()[0]))
                for tensor in leaves(result):
                    if isinstance(tensor, Tensor) and storage_address(tensor) not in given:
                        tensor._set_user_data(SETTLED, True)
            return result
        try:
            return self._handler.run(call)
        except (Exception, Stop) as error:
            if self._must_raise(call) or _writes(call):  # what writes is not run twice
                raise
            self._postponed = error
        try:
            return call.run()
        except BaseException:  # it was the op that raised
            self._postponed = None
            raise

    def _must_raise(self, call: Call) -> bool:
        # What has no memory cannot be read.
        return self._handler.may_raise(call) or any(tensor.is_meta for tensor in call.sorted()[0])

    def __exit__(self, *error: Any) -> bool:
        self._postponed = None  # its frames lead to this object, and to tensors
        return bool(super().__exit__(*error))

    def check(self) -> None:
        error, self._postponed = self._postponed, None
        if error is not None:
            self._handler.leave(error)
