"""`_OP_DISPATCHER`: operators on DTensors, of either framework. See the README, rules D1 to D5."""

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
from hyper_parallel.core.shard.decision import Decision, LocalCall, tied_axes
from hyper_parallel.core.shard.dispatched_op import DispatchedOp, has_empty_parts
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.core.shard.user_rule import decide_by_user_rule
from hyper_parallel.platform.opaque import Tensor

__all__ = ["NoRuleError", "OpDispatcher", "unknown_ops", "_OP_DISPATCHER"]


class NoRuleError(HyperParallelError, NotImplementedError):
    """An operator on DTensors has no rule."""


class Glue(Protocol):
    """What a framework adds. Its DTensor class has it as `_glue`."""

    def is_tensor(self, value: object) -> bool: ...  # of the framework, plain or not
    def is_plain_scalar(self, value: object) -> bool: ...  # a tensor without dims that needs no gradient
    def op_name(self, func: Any) -> str: ...
    def decide(self, func: object, args: Sequence[Any], kwargs: dict[str, Any]) -> Prepared | None: ...
    def wrap(self, local: object, spec: Spec) -> Any: ...
    def redistribute(self, tensor: Tensor, layout: Layout) -> Any: ...
    def coordinate(self, layout: Layout) -> tuple[int, ...]: ...
    def anchored(self, result: object, locals_: Sequence[Any]) -> Any: ...  # rule G7


@dataclass(frozen=True, slots=True)
class Slot:
    """Stands for a DTensor among the arguments while a rule is asked."""

    index: int  # among the DTensors of the call
    spec: Spec


class Prepared(NamedTuple):
    """What a framework's table makes of a rule's decision."""

    decision: Decision
    order: Sequence[int]  # for each tensor of the decision, its index among the DTensors of the call
    local: LocalCall | None = None  # None: the operator itself
    returns_argument: int | None = None  # an operator in place answers the DTensor that it was given
    is_sequence: bool = False  # the outputs come in a list or tuple
    is_raw: bool = False  # `local` answers what the caller gets
    is_kept: bool = True  # for the next call; not where it holds only as long as the caller allows it


class View(NamedTuple):
    """How a DTensor was made that looks at another one's memory (rule G5)."""

    source: Any
    call: DispatchedOp
    func: Any
    args: Sequence[Any]
    kwargs: dict[str, Any] | None

    def tied(self, axes: tuple[str, ...]) -> Any:
        """The same view of the source's tie."""
        given, tie = list(self.args), self.source._tied(axes)
        given[self.call.positions[0]] = tie  # type: ignore[index]
        if self.call.local is not None:
            result = self.call.local(self.func, given, self.kwargs or {})
        else:
            result = self.func(*given, **(self.kwargs or {}))
        if self.call.has_empty_parts:  # rule G7
            result = _OP_DISPATCHER._dtensors[type(self.source)].anchored(result, [tie])
        return result


_PLAIN = (int, str, type(None))
_BOOLS = (("no",), ("yes",))  # in a key: True and False would be found as 1 and 0, which mean something else
# A context variable: `overlap_forward_backward` carries it over to its other thread.
_unknown: ContextVar[str] = ContextVar("what happens to unknown operators", default="error")


class OpDispatcher:
    """Finds or makes the decision for a call, and carries it out."""

    LIMIT = 16384  # decisions that are kept

    def __init__(self) -> None:
        self._calls: dict[tuple[Any, ...], DispatchedOp] = {}
        self._dtensors: dict[type, Glue] = {}
        registry.on_change(self._calls.clear)

    def add_dtensor(self, kind: type, glue: Glue) -> None:
        """A class of DTensors; exactly this class is looked for, not its subclasses."""
        self._dtensors[kind] = glue

    def glue_of(self, kind: type) -> Glue:
        """What the framework of a class of DTensors has added."""
        return self._dtensors[kind]

    def dispatch(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Any:
        """The result of an operator with DTensors among its arguments.

        Raises:
            NotImplementedError: the operator has no rule.
            ValueError: meshes differ, shapes do not fit, or a plain tensor is among the arguments of a built-in operator.
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
            call = self._calls.get(known)
        except TypeError:  # an argument that cannot be hashed: decided every time
            known, call = (), None
        if call is not None and call.simple is not None:  # most calls: nothing to move, to tie or to replace
            given = list(args)
            for position, tensor in zip(call.positions, tensors):  # type: ignore[arg-type]  # noqa: B905 - as many as tensors
                given[position] = tensor._local
            result = func(*given, **kwargs) if kwargs else func(*given)
            made = dtensors[type(tensors[0])].wrap(result, call.simple)
            if call.is_view:
                made._view_of = View(tensors[0], call, func, args, kwargs)
            return made
        if call is None:
            call = self._decide(func, args, kwargs or {}, tensors)
            if known and call.is_kept:
                if len(self._calls) >= self.LIMIT:
                    self._calls.clear()
                self._calls[known] = call
        return self._carry_out(call, func, args, kwargs, tensors)

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
            for each in value:
                self._look_into(each, key, tensors)
            key.append(len(value))
        elif isinstance(value, dict):
            key.append(kind)
            for name, each in value.items():
                key.append(name)
                self._look_into(each, key, tensors)
        elif isinstance(value, slice):
            key.append((slice, value.start, value.stop, value.step))
        elif any(glue.is_tensor(value) for glue in self._dtensors.values()):
            # Another tensor of the same look is decided alike; holding it would keep its memory.
            key.append((kind, tuple(value.shape)))
        else:
            key.append(value)

    def _carry_out(self, call: DispatchedOp, func: Any, args: Sequence[Any], kwargs: Any, tensors: list[Any]) -> Any:
        locals_ = []
        for tensor, (target, tied) in zip(tensors, call.moves):  # noqa: B905 - as long as each other, and every call comes here
            if target is not None:
                tensor = self._moved(tensor, target, call.name)
            locals_.append(tensor._tied(tied) if tied else tensor._local)
        if call.positions is not None:
            given = list(args)
            for position, local in zip(call.positions, locals_):  # noqa: B905
                given[position] = local
        else:
            given, kwargs = self._rebuilt((args, kwargs or {}), iter(locals_))
        if call.local is not None:
            result = call.local(func, given, kwargs or {})
        elif kwargs:
            result = func(*given, **kwargs)
        else:
            result = func(*given)
        if call.has_empty_parts:
            result = self._dtensors[type(tensors[0])].anchored(result, locals_)
        if call.returns_argument is not None:
            return tensors[call.returns_argument]._changed_in_place()
        wrap = self._dtensors[type(tensors[0])].wrap
        if call.wrap_output is not None:
            return call.wrap_output(result)
        if not call.is_sequence:
            spec = call.outputs[0]
            if spec is None:
                return result
            made = wrap(result, spec)
            if call.is_view:
                made._view_of = View(tensor, call, func, args, kwargs)  # of the tensor as it was moved
            return made
        return type_of_sequence(result)(
            each if spec is None else wrap(each, spec) for each, spec in zip(result, call.outputs, strict=True)
        )

    def _moved(self, tensor: Any, target: Layout, name: str) -> Any:
        check_may_move(name, tensor._spec.layout, target)
        with why("implied", name):
            return self._dtensors[type(tensor)].redistribute(tensor, target)

    def _rebuilt(self, value: Any, locals_: Iterator[Any]) -> Any:
        """The arguments with the local tensors in their places, in the order in which `_look_into` found them."""
        if type(value) in self._dtensors:
            return next(locals_)
        if isinstance(value, (list, tuple)):
            return type_of_sequence(value)(self._rebuilt(each, locals_) for each in value)
        if isinstance(value, dict):
            return {name: self._rebuilt(each, locals_) for name, each in value.items()}
        if type(value).__module__ == "numpy":  # a dim or a length, as users have them; rules ask for Python's
            number = as_int(value)
            return value if number is None else number
        return value

    # -- deciding -----------------------------------------------------------------------------------------------------

    def _decide(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[Any]) -> DispatchedOp:
        glue = self._dtensors[type(tensors[0])]
        name = glue.op_name(func)
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
            return decide_by_user_rule(rule, func, args, kwargs, tensors, glue)
        if all(_is_number(tensor, glue) for tensor in tensors) and _has_plain((args, kwargs), glue, self._dtensors):
            # Numbers, among plain tensors: those stay plain. (PyTorch's clipping multiplies every gradient by one number.)
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
        slots = [Slot(index, tensor._spec) for index, tensor in enumerate(tensors)]
        slotted_args, slotted_kwargs = self._rebuilt((list(args), kwargs), iter(slots))
        self._check_no_plain(name, (slotted_args, slotted_kwargs), glue)
        try:
            prepared = glue.decide(func, slotted_args, slotted_kwargs)
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
        decision = prepared.decision
        if len(prepared.order) != len(decision.inputs):
            raise ArgumentError(
                f"`{name}` was given a distributed tensor where it takes a number.",
                expected=f"{len(decision.inputs)} distributed tensors",
                got=f"{len(prepared.order)}: {describe([repr(tensor._spec) for tensor in tensors], 200)}",
                do="Pass the number itself, `x.item()`.",
            )
        moves: list[tuple[Layout | None, tuple[str, ...]]] = [(None, ())] * len(tensors)
        for index, target in zip(prepared.order, decision.inputs, strict=True):
            is_moved = target is not tensors[index]._spec.layout
            moves[index] = (target if is_moved else None, tied_axes(target, decision.outputs))
        call = DispatchedOp(
            tuple(moves), _positions(args, kwargs, self._dtensors), decision.outputs, prepared.is_sequence, prepared.local,
            prepared.returns_argument, _as_it_is if prepared.is_raw else None,
            prepared.returns_argument is None and has_empty_parts(tensors, decision), name, prepared.is_kept,
        )  # fmt: skip
        is_simple = (
            call.positions is not None
            and len(call.outputs) == 1
            and not (call.is_sequence or call.has_empty_parts or any(target or tied for target, tied in moves))
            and call.local is None
            and call.returns_argument is None
            and call.wrap_output is None
        )
        call = call._replace(is_view=decision.is_view and call.positions is not None and len(tensors) == 1)
        return call._replace(simple=call.outputs[0]) if is_simple else call

    def _check_no_plain(self, name: str, value: Any, glue: Glue) -> None:
        if isinstance(value, Slot):
            return
        if isinstance(value, (list, tuple)):
            for each in value:
                self._check_no_plain(name, each, glue)
        elif isinstance(value, dict):
            self._check_no_plain(name, list(value.values()), glue)
        elif glue.is_tensor(value) and not glue.is_plain_scalar(value) and not name.startswith(("_foreach", "_fused")):
            # Not a TypeError: PyTorch's operators swallow one, and say that they do not support the operands.
            raise ArgumentError(
                f"`{name}` has a plain tensor among its distributed ones.",
                expected="DTensors alone (numbers, and tensors without dims, may be mixed in)",
                got=describe(value),
                do="Say how it lies: `hp.distribute_tensor(tensor, mesh, placements)` of a whole tensor, `DTensor.from_local` of a part.",
            )


# What calls an operator without a rule, and what to do then; by the beginning of its name.
_INSTEAD = {
    "new_": "Make it with its layout: `hp.zeros(size, mesh, placements)`. (What asks for it: `fully_shard`, Adafactor and the like take plain parameters.)",
    **dict.fromkeys(
        ("kaiming_", "xavier_", "trunc_normal_", "orthogonal_", "uniform_", "normal_", "constant_"),
        "Fill a plain tensor, and copy it: `p.copy_(hp.distribute_tensor(whole, p.layout))`; or fill the parameter before it gets its layout.",
    ),
}


def _what_to_do(name: str) -> str:
    for beginning, advice in _INSTEAD.items():
        if name.startswith(beginning):
            return advice
    return (
        f"Register one (a subclass of `hp.DistributedOp`, made with the name {name!r}), or compute it on whole tensors: "
        '`with hp.unknown_ops("replicate"):`.'
    )


def _is_number(tensor: Any, glue: Glue) -> bool:
    """Whether a DTensor is one number, the same on all ranks, that nobody wants the gradient of."""
    return tensor._spec.shape == () and tensor._spec.layout.is_replicated and glue.is_plain_scalar(tensor)


def _has_plain(value: object, glue: Glue, dtensors: dict[type, Glue]) -> bool:
    """Whether plain tensors with dims are among the arguments."""
    if isinstance(value, (list, tuple)):
        return any(_has_plain(each, glue, dtensors) for each in value)
    if isinstance(value, dict):
        return _has_plain(list(value.values()), glue, dtensors)
    return glue.is_tensor(value) and type(value) not in dtensors and not glue.is_plain_scalar(value)


def _as_it_is(result: object) -> Any:
    return result


def type_of_sequence(value: Any) -> Callable[[Any], Any]:
    """What makes the same kind of list or tuple from an iterable; the framework's named results become tuples of their kind."""
    kind = type(value)
    if kind in (list, tuple):
        return kind
    if hasattr(kind, "_fields"):
        return lambda values: kind(*values)
    if isinstance(value, tuple):
        return lambda values: kind(tuple(values))
    return list


def _positions(args: Sequence[Any], kwargs: dict[str, Any], dtensors: dict[type, Glue]) -> tuple[int, ...] | None:
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
    """`with hp.unknown_ops("replicate"):` operators without a rule compute on whole tensors inside; `"error"` is the default.

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
