"""`_OP_DISPATCHER` carries out operators on DTensors, of either framework. See the README, rules D1 to D5.

A call becomes a result in four types: the table's rule answers a `RuleAnswer` (layouts), the framework's
`DispatchBackend` makes a `PreparedOp` of it (the local implementation as well), the dispatcher makes a `DispatchedOp`
of that (what moves, what is tied), keeps it, and carries it out each time the same call comes again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from hyper_parallel._base.errors import ArgumentError, HyperParallelError, describe
from hyper_parallel._base.whole_numbers import as_int
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard import registry
from hyper_parallel.core.shard.communication_log import check_may_move, why
from hyper_parallel.core.shard.dispatched_op import DispatchedOp, has_empty_parts
from hyper_parallel.core.shard.rule_answer import LocalCall, RuleAnswer, tied_axes
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.core.shard.user_rule import decide_by_user_rule
from hyper_parallel.platform.opaque import Tensor

__all__ = ["NoRuleError", "OpDispatcher", "unknown_ops", "_OP_DISPATCHER"]


class NoRuleError(HyperParallelError, NotImplementedError):
    """An operator on DTensors has no rule."""


class DispatchBackend(Protocol):
    """What the dispatcher asks of a framework. There is one object per framework, registered by `add_dtensor`."""

    def is_tensor(self, value: object) -> bool: ...  # of the framework, plain or not
    def is_plain_scalar(self, value: object) -> bool: ...  # a tensor without dims that needs no gradient
    def op_name(self, func: Any) -> str: ...
    def prepare(
        self, func: object, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> PreparedOp | None: ...  # None: no rule
    def wrap(self, local: object, spec: Spec) -> Any: ...
    def redistribute(self, tensor: Tensor, layout: Layout) -> Any: ...
    def coordinate(self, layout: Layout) -> tuple[int, ...]: ...
    def anchored(self, result: object, locals_: Sequence[Any]) -> Any: ...  # rule T3


@dataclass(frozen=True, slots=True)
class ArgumentSlot:
    """A DTensor's place among the arguments while a rule is asked: rules see layouts and shapes, never tensors."""

    index: int  # its position among the DTensors of the call
    spec: Spec


class PreparedOp(NamedTuple):
    """One call as a framework's table prepared it: what the rule answered, and which local implementation fits."""

    answer: RuleAnswer
    order: Sequence[int]  # for each tensor of the answer, its index among the DTensors of the call
    inputs: Sequence[Spec] = ()  # the specs that the rule was asked with, in that order
    local: LocalCall | None = None  # None: the operator itself
    returns_argument: int | None = None  # an operator in place answers the DTensor that it was given
    is_sequence: bool = False  # the outputs come in a list or tuple
    is_raw: bool = False  # what `local` returns is what the caller gets: nothing is wrapped
    is_kept: bool = True  # False inside `unknown_ops("replicate")`: the next call may be outside


class View(NamedTuple):
    """Says how a DTensor was made that shares another one's memory. A view keeps it, for its ties (rule T1)."""

    source: Any
    op: DispatchedOp
    func: Any
    args: Sequence[Any]
    kwargs: dict[str, Any] | None

    def tied(self, axes: tuple[str, ...]) -> Any:
        """Make the same view of the source's tie, for uses whose gradient is partial on `axes`."""
        given, tie = list(self.args), self.source._tied(axes)
        given[self.op.positions[0]] = tie  # type: ignore[index]
        if self.op.local is not None:
            result = self.op.local(self.func, given, self.kwargs or {})
        else:
            result = self.func(*given, **(self.kwargs or {}))
        if self.op.has_empty_parts:  # rule T3
            result = _OP_DISPATCHER._dtensors[type(self.source)].anchored(result, [tie])
        return result


_PLAIN = (int, str, type(None))
_BOOLS = (("no",), ("yes",))  # in a key: True and False would be found as 1 and 0, which mean something else
# A context variable: `overlap_forward_backward` carries it over to its other thread.
_unknown: ContextVar[str] = ContextVar("what happens to unknown operators", default="error")


class OpDispatcher:
    """Finds or makes the `DispatchedOp` of a call, and carries it out. There is one per process, `_OP_DISPATCHER`."""

    LIMIT = 16384  # ops that are kept; a program with ever new sequence lengths makes ever new ones

    def __init__(self) -> None:
        self._ops: dict[tuple[Any, ...], DispatchedOp] = {}
        self._dtensors: dict[type, DispatchBackend] = {}
        registry.on_change(self._ops.clear)

    def add_dtensor(self, kind: type, backend: DispatchBackend) -> None:
        """Make a class of DTensors known; exactly this class is found, not its subclasses."""
        self._dtensors[kind] = backend

    def backend_of(self, kind: type) -> DispatchBackend:
        """Return the backend of the framework that a class of DTensors belongs to."""
        return self._dtensors[kind]

    def dispatch(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Any:
        """Compute an operator that has DTensors among its arguments.

        Raises:
            NotImplementedError: the operator has no rule.
            ValueError: meshes differ, shapes do not fit, or a plain tensor is among the arguments of a built-in
                operator.
        """
        dtensors = self._dtensors
        key = [func]
        tensors: list[Any] = []
        for value in args:
            kind = type(value)
            if kind in dtensors:
                key.append(value._spec)
                tensors.append(value)
            elif kind in _PLAIN:
                key.append(value)
            elif kind is float:
                key.append(float)
            elif kind is bool:
                key.append(_BOOLS[value])
            else:
                self._look_into(value, key, tensors)
        if kwargs:
            for name, value in kwargs.items():
                key.append(name)
                self._look_into(value, key, tensors)
        known = tuple(key)
        try:
            op = self._ops.get(known)
        except TypeError:  # an argument that cannot be hashed: decided every time
            known, op = (), None
        if op is not None and op.simple is not None:  # most calls: nothing to move, to tie or to replace
            given = list(args)
            # Not `strict`: there are as many positions as tensors, and every call comes here.
            for position, tensor in zip(op.positions, tensors):  # type: ignore[arg-type]  # noqa: B905
                given[position] = tensor._local
            result = func(*given, **kwargs) if kwargs else func(*given)
            made = dtensors[type(tensors[0])].wrap(result, op.simple)
            if op.is_view:
                made._view_of = View(tensors[0], op, func, args, kwargs)
            return made
        if op is None:
            op = self._decide(func, args, kwargs or {}, tensors)
            if known and op.is_kept:
                if len(self._ops) >= self.LIMIT:
                    self._ops.clear()
                self._ops[known] = op
        return self._carry_out(op, func, args, kwargs, tensors)

    def _look_into(self, value: Any, key: list[Any], tensors: list[Any]) -> None:
        kind = type(value)
        if kind in self._dtensors:
            key.append(value._spec)
            tensors.append(value)
        elif kind is float or kind is complex:
            key.append(kind)
        elif kind is bool:
            key.append(_BOOLS[value])
        elif isinstance(value, (list, tuple)):
            key.append(kind)
            for item in value:
                self._look_into(item, key, tensors)
            key.append(len(value))
        elif isinstance(value, dict):
            key.append(kind)
            for name, item in value.items():
                key.append(name)
                self._look_into(item, key, tensors)
        elif isinstance(value, slice):
            key.append((slice, value.start, value.stop, value.step))
        elif any(backend.is_tensor(value) for backend in self._dtensors.values()):
            # A plain tensor of the same class and shape is decided alike; a key that held it would keep its memory.
            key.append((kind, tuple(value.shape)))
        else:
            key.append(value)

    def _carry_out(self, op: DispatchedOp, func: Any, args: Sequence[Any], kwargs: Any, tensors: list[Any]) -> Any:
        locals_ = []
        # Not `strict`: there are as many moves as tensors, and every call comes here.
        for tensor, (target, tied) in zip(tensors, op.moves):  # noqa: B905
            if target is not None:
                tensor = self._moved(tensor, target, op.name)
            locals_.append(tensor._tied(tied) if tied else tensor._local)
        if op.positions is not None:
            given = list(args)
            for position, local in zip(op.positions, locals_):  # noqa: B905
                given[position] = local
        else:
            given, kwargs = self._rebuilt((args, kwargs or {}), iter(locals_))
        if op.local is not None:
            result = op.local(func, given, kwargs or {})
        elif kwargs:
            result = func(*given, **kwargs)
        else:
            result = func(*given)
        if op.has_empty_parts:
            result = self._dtensors[type(tensors[0])].anchored(result, locals_)
        if op.returns_argument is not None:
            return tensors[op.returns_argument]._changed_in_place()
        wrap = self._dtensors[type(tensors[0])].wrap
        if op.wrap_output is not None:
            return op.wrap_output(result)
        if not op.is_sequence:
            spec = op.outputs[0]
            if spec is None:
                return result
            made = wrap(result, spec)
            if op.is_view:
                made._view_of = View(tensor, op, func, args, kwargs)  # `tensor` as it was moved
            return made
        return type_of_sequence(result)(
            value if spec is None else wrap(value, spec) for value, spec in zip(result, op.outputs, strict=True)
        )

    def _moved(self, tensor: Any, target: Layout, name: str) -> Any:
        check_may_move(name, tensor._spec.layout, target)
        with why("implied", name):
            return self._dtensors[type(tensor)].redistribute(tensor, target)

    def _rebuilt(self, value: Any, locals_: Iterator[Any]) -> Any:
        """Put local tensors in the places of the DTensors, in the order in which `_look_into` found these."""
        if type(value) in self._dtensors:
            return next(locals_)
        if isinstance(value, (list, tuple)):
            return type_of_sequence(value)(self._rebuilt(item, locals_) for item in value)
        if isinstance(value, dict):
            return {name: self._rebuilt(item, locals_) for name, item in value.items()}
        if type(value).__module__ == "numpy":  # users have dims and lengths of it; rules ask for Python's
            number = as_int(value)
            return value if number is None else number
        return value

    # -- deciding -----------------------------------------------------------------------------------------------------

    def _decide(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[Any]) -> DispatchedOp:
        backend = self._dtensors[type(tensors[0])]
        name = backend.op_name(func)
        mesh = tensors[0]._spec.layout.mesh
        for tensor in tensors[1:]:
            if tensor._spec.layout.mesh is not mesh:
                raise ArgumentError(
                    f"The arguments of `{name}` lie on different meshes.",
                    expected=f"all on {mesh}",
                    got=f"one on {tensor._spec.layout.mesh}",
                    do="Make all of them on one mesh; a sub-mesh is another mesh than the whole.",
                )
        rule = registry.by_name(name)
        if rule is not None:
            return decide_by_user_rule(rule, func, args, kwargs, tensors, backend)
        if all(_is_number(tensor, backend) for tensor in tensors) and _has_plain(
            (args, kwargs), backend, self._dtensors
        ):
            # PyTorch's clipping multiplies every gradient by one number, which may be a DTensor: plain ones stay plain.
            positions = _positions(args, kwargs, self._dtensors)
            return DispatchedOp(
                ((None, ()),) * len(tensors),
                positions,
                (None,),
                False,
                None,
                None,
                _as_it_is,
                False,
                name,
                is_kept=False,
            )
        slots = [ArgumentSlot(index, tensor._spec) for index, tensor in enumerate(tensors)]
        slotted_args, slotted_kwargs = self._rebuilt((list(args), kwargs), iter(slots))
        self._check_no_plain(name, (slotted_args, slotted_kwargs), backend)
        try:
            prepared = backend.prepare(func, slotted_args, slotted_kwargs)
        except HyperParallelError as error:
            if error.where is None:
                raise type(error)(
                    error.what, expected=error.expected, got=error.got, do=error.do,
                    where=f"{name}({', '.join(repr(tensor._spec) for tensor in tensors)})",
                ) from None  # fmt: skip
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"The rule of `{name}` cannot do with these arguments.",
                expected="what the operator takes, a number where it takes one",
                got=f"{describe(list(args))} {describe(kwargs) if kwargs else ''}".strip(),
                where=f"{type(error).__name__}: {error}",
            ) from error
        if prepared is None:
            raise NoRuleError(
                f"The operator `{name}` has no rule for distributed tensors.",
                got=", ".join(repr(tensor._spec) for tensor in tensors),
                do=_what_to_do(name),
            )
        answer = prepared.answer
        if len(prepared.order) != len(answer.inputs):
            raise ArgumentError(
                f"`{name}` was given a distributed tensor where it takes a number.",
                expected=f"{len(answer.inputs)} distributed tensors",
                got=f"{len(prepared.order)}: {describe([repr(tensor._spec) for tensor in tensors], 200)}",
                do="Pass the number itself, `x.item()`.",
            )
        moves: list[tuple[Layout | None, tuple[str, ...]]] = [(None, ())] * len(tensors)
        for index, target in zip(prepared.order, answer.inputs, strict=True):
            is_moved = target is not tensors[index]._spec.layout
            moves[index] = (target if is_moved else None, tied_axes(target, answer.outputs))
        op = DispatchedOp(
            tuple(moves),
            _positions(args, kwargs, self._dtensors),
            answer.outputs,
            prepared.is_sequence,
            prepared.local,
            prepared.returns_argument,
            _as_it_is if prepared.is_raw else None,
            prepared.returns_argument is None and has_empty_parts(tensors, answer),
            name,
            prepared.is_kept,
        )
        is_simple = (
            op.positions is not None
            and len(op.outputs) == 1
            and not (op.is_sequence or op.has_empty_parts or any(target or tied for target, tied in moves))
            and op.local is None
            and op.returns_argument is None
            and op.wrap_output is None
        )
        op = op._replace(is_view=answer.is_view and op.positions is not None and len(tensors) == 1)
        return op._replace(simple=op.outputs[0]) if is_simple else op

    def _check_no_plain(self, name: str, value: Any, backend: DispatchBackend) -> None:
        if isinstance(value, ArgumentSlot):
            return
        if isinstance(value, (list, tuple)):
            for item in value:
                self._check_no_plain(name, item, backend)
        elif isinstance(value, dict):
            self._check_no_plain(name, list(value.values()), backend)
        elif (
            backend.is_tensor(value)
            and not backend.is_plain_scalar(value)
            and not name.startswith(("_foreach", "_fused"))
        ):
            # Not a TypeError: PyTorch's operators swallow one, and say that they do not support the operands.
            raise ArgumentError(
                f"`{name}` has a plain tensor among its distributed ones.",
                expected="DTensors alone (numbers, and tensors without dims, may be mixed in)",
                got=describe(value),
                do="Say how it lies: `hp.distribute_tensor(tensor, mesh, placements)` of a whole tensor, "
                "`DTensor.from_local` of a part.",
            )


# By the beginning of an operator's name: what to do where it has no rule.
_INSTEAD = {
    "new_": "Make it with its layout: `hp.zeros(size, mesh, placements)`. (What asks for it: `fully_shard`, "
    "Adafactor and the like take plain parameters.)",
    **dict.fromkeys(
        ("kaiming_", "xavier_", "trunc_normal_", "orthogonal_", "uniform_", "normal_", "constant_"),
        "Fill a plain tensor, and copy it: `p.copy_(hp.distribute_tensor(whole, p.layout))`; or fill the parameter "
        "before it gets its layout.",
    ),
}


def _what_to_do(name: str) -> str:
    for beginning, advice in _INSTEAD.items():
        if name.startswith(beginning):
            return advice
    return (
        f"Register one (a subclass of `hp.DistributedOp`, made with the name {name!r}), or compute it on whole "
        "tensors: "
        '`with hp.unknown_ops("replicate"):`.'
    )


def _is_number(tensor: Any, backend: DispatchBackend) -> bool:
    """Say whether a DTensor is one number, the same on all ranks, that nobody wants the gradient of."""
    return tensor._spec.shape == () and tensor._spec.layout.is_replicated and backend.is_plain_scalar(tensor)


def _has_plain(value: object, backend: DispatchBackend, dtensors: dict[type, DispatchBackend]) -> bool:
    """Say whether plain tensors with dims are among the arguments."""
    if isinstance(value, (list, tuple)):
        return any(_has_plain(item, backend, dtensors) for item in value)
    if isinstance(value, dict):
        return _has_plain(list(value.values()), backend, dtensors)
    return backend.is_tensor(value) and type(value) not in dtensors and not backend.is_plain_scalar(value)


def _as_it_is(result: object) -> Any:
    return result


def type_of_sequence(value: Any) -> Callable[[Any], Any]:
    """Return what makes the same kind of list or tuple from an iterable.

    The framework's named results (of `torch.max`) become tuples of their kind.
    """
    kind = type(value)
    if kind in (list, tuple):
        return kind
    if hasattr(kind, "_fields"):
        return lambda values: kind(*values)
    if isinstance(value, tuple):
        return lambda values: kind(tuple(values))
    return list


def _positions(
    args: Sequence[Any], kwargs: dict[str, Any], dtensors: dict[type, DispatchBackend]
) -> tuple[int, ...] | None:
    def is_nested(value: object) -> bool:
        if type(value) in dtensors:
            return True
        if isinstance(value, (list, tuple)):
            return any(map(is_nested, value))
        return isinstance(value, dict) and any(map(is_nested, value.values()))

    if is_nested(kwargs) or any(type(value) not in dtensors and is_nested(value) for value in args):
        return None
    return tuple(index for index, value in enumerate(args) if type(value) in dtensors)


@contextlib.contextmanager
def unknown_ops(what: str) -> Iterator[None]:
    """Let operators without a rule compute on whole tensors: `with hp.unknown_ops("replicate"):`.

    The default is `"error"`.

    Raises:
        ValueError: any other word.
    """
    if what not in ("replicate", "error"):
        raise ArgumentError(
            "There is no such way with unknown operators.", expected="'replicate' or 'error'", got=repr(what)
        )
    before = _unknown.get()
    _unknown.set(what)
    try:
        yield
    finally:
        _unknown.set(before)


def are_unknown_ops_replicated() -> bool:
    return _unknown.get() == "replicate"


_OP_DISPATCHER = OpDispatcher()
