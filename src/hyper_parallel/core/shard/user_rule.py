"""Turns a user's `DistributedOp` into a `DispatchedOp`: what the rule is asked, and how its answer is understood."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.dispatched_op import DispatchedOp, has_empty_parts
from hyper_parallel.core.shard.rule_answer import tied_axes
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.platform.opaque import Tensor

if TYPE_CHECKING:
    from hyper_parallel.core.shard._op_dispatch import DispatchBackend

__all__ = ["decide_by_user_rule"]


def decide_by_user_rule(
    rule: Any, func: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[Any], backend: DispatchBackend
) -> DispatchedOp:
    """Make the op that a user's own rule describes: its arguments stay where they are."""
    layouts, extra_args = _layouts_and_others(args, kwargs, backend)
    if hasattr(rule, "choose_layouts"):
        return _decide_by_short_rule(rule, args, kwargs, tensors, backend)
    local: Any = None
    if rule.preprocess is not None:
        _, _, cache_values = rule.preprocess(args, kwargs)
        answer = rule.infer_layout(cache_values)
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise _wrong_answer(rule, "a pair (layouts, extra), because the rule has a `preprocess`", answer)
        answered, extra_args = answer
        local = _Preprocessed(rule, backend, args, kwargs)
    else:
        answered = rule.infer_layout(layouts, extra_args)
    is_sequence = isinstance(answered, (tuple, list))
    outputs = tuple(answered) if is_sequence else (answered,)
    for layout in outputs:
        if layout is not None and not isinstance(layout, Layout):
            raise _wrong_answer(rule, "a Layout, None, or a tuple of these", answered)
    if rule.get_expand_impl is not None:
        replacement = rule.get_expand_impl(func, answered, layouts, extra_args)
        if replacement is not None:
            local = _Replaced(replacement, local)
    specs = _ShapesFromInputs(rule, [tensor._spec for tensor in tensors], extra_args)
    moves = tuple(
        (None, tied_axes(tensor._spec.layout, [_anything(layout) for layout in outputs])) for tensor in tensors
    )
    wrapper = _Wrapper(rule, backend, specs, outputs, is_sequence)
    return DispatchedOp(
        moves, None, (), is_sequence, local, None, wrapper, has_empty_parts(tensors, None), rule.op_name
    )


def _decide_by_short_rule(
    rule: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[Any], backend: DispatchBackend
) -> DispatchedOp:
    """Make the op of a rule that also says how the arguments must lie: they are moved there."""
    layouts, extra_args = _layouts_and_others(args, kwargs, backend)
    if None in layouts:
        raise ArgumentError(
            f"`{rule.op_name}` has a plain tensor among its distributed ones.",
            expected=f"DTensors alone, as {type(rule).__name__} says how each of them lies",
            got=str(layouts),
            do="Distribute it, or write the rule as a subclass of `hp.DistributedOp`.",
        )
    chosen = rule.choose_layouts([tensor._spec for tensor in tensors])
    outputs = [_anything(layout) for layout in chosen.outputs]
    moves = tuple(
        (None if target is tensor._spec.layout else target, tied_axes(target, outputs))
        for tensor, target in zip(tensors, chosen.inputs, strict=True)
    )
    placed = [Spec(target, tensor._spec.shape) for tensor, target in zip(tensors, chosen.inputs, strict=True)]
    is_sequence = len(chosen.outputs) > 1
    wrapper = _Wrapper(rule, backend, _ShapesFromInputs(rule, placed, extra_args), chosen.outputs, is_sequence)
    return DispatchedOp(moves, None, (), is_sequence, None, None, wrapper, has_empty_parts(tensors, None), rule.op_name)


def _anything(layout: Layout | None) -> Spec | None:
    """Return a spec of that layout whose shape says nothing."""
    return None if layout is None else Spec(layout, (1,) * layout.ndim)


def _layouts_and_others(
    args: Sequence[Any], kwargs: dict[str, Any], backend: DispatchBackend
) -> tuple[list[Layout | None], list[Any]]:
    layouts: list[Layout | None] = []
    others: list[Any] = []

    def note(value: object, is_nested: bool) -> None:
        if hasattr(value, "_spec"):
            layouts.append(value._spec.layout)
        elif backend.is_tensor(value):
            layouts.append(None)
        elif isinstance(value, (list, tuple)) and _has_tensors(value, backend):
            for item in value:
                note(item, True)
        elif not is_nested:
            others.append(value)

    for value in (*args, *kwargs.values()):
        note(value, False)
    return layouts, others


def _has_tensors(value: object, backend: DispatchBackend) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_has_tensors(item, backend) for item in value)
    return backend.is_tensor(value)


def _wrong_answer(rule: Any, expected: str, got: object) -> ArgumentTypeError:
    return ArgumentTypeError(
        f"The rule of {rule.op_name!r} answered what is no layout.",
        expected=expected,
        got=describe(got),
        where=f"{type(rule).__name__}.infer_layout",
    )


class _Preprocessed:
    """The local call of a rule that prepares its arguments itself.

    It is given DTensors, as when it was asked for its layouts; their local tensors are already tied, so that what it
    takes out of them gets the gradient that rule T1 asks for.
    """

    def __init__(self, rule: Any, backend: DispatchBackend, args: Any, kwargs: Any) -> None:
        self._rule, self._backend = rule, backend
        self._specs: list[Spec | None] = []  # one per tensor among the arguments, None for a plain one
        self._walk((args, kwargs), lambda tensor: self._specs.append(getattr(tensor, "_spec", None)))

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        specs = iter(self._specs)

        def wrapped(tensor: Tensor) -> Any:
            spec = next(specs)
            return tensor if spec is None else self._backend.wrap(tensor, spec)

        whole_args, whole_kwargs = self._walk((list(args), kwargs), wrapped)
        local_args, local_kwargs, _ = self._rule.preprocess(whole_args, whole_kwargs)
        return func(*local_args, **local_kwargs)

    def _walk(self, value: Any, function: Any) -> Any:
        if self._backend.is_tensor(value):
            return function(value)
        if isinstance(value, (list, tuple)):
            found = [self._walk(item, function) for item in value]
            return found if isinstance(value, list) else tuple(found)
        if isinstance(value, dict):
            return {key: self._walk(item, function) for key, item in value.items()}
        return value


class _Replaced:
    """The local call of a rule that replaces the local operation."""

    def __init__(self, replacement: Any, inner: Any) -> None:
        self._replacement = replacement
        self._inner = inner

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self._inner is not None:
            return self._inner(self._replacement, args, kwargs)
        return self._replacement(*args, **kwargs)


class _ShapesFromInputs:
    """Finds the global shape of an output from its local one.

    It is what the rule's own `infer_shape` says, else that of inputs that are split alike.

    A dim that no axis splits is as long as it is locally. A split one is as long as that of an input that is split by
    the same axes and is locally as long as this one. Where there is none, the parts are taken to be equal if all parts
    of the inputs are; else the rule is asked for `infer_shape`, since a rank that holds less than others cannot know
    how much they hold.
    """

    def __init__(self, rule: Any, inputs: Sequence[Spec], extra_args: Any) -> None:
        self._rule = rule
        self._inputs = inputs
        self._extra_args = extra_args

    def global_shape(self, index: int, layout: Layout, local_shape: Sequence[int], coordinate: tuple[int, ...]) -> Any:
        if self._rule.infer_shape is not None:
            answer = self._rule.infer_shape([spec.shape for spec in self._inputs], self._extra_args)
            return tuple(answer[index]) if answer and isinstance(answer[0], (tuple, list)) else tuple(answer)
        if layout.ndim != len(local_shape):
            raise ArgumentError(
                f"The rule of {self._rule.op_name!r} answered a layout of other dims than the output has.",
                expected=f"{len(local_shape)} dims, for the local shape {tuple(local_shape)}",
                got=repr(layout),
                where=f"{type(self._rule).__name__}.infer_layout",
            )
        return tuple(self._length(layout, dim, length, coordinate) for dim, length in enumerate(local_shape))

    def _length(self, layout: Layout, dim: int, local_length: int, coordinate: tuple[int, ...]) -> int:
        axes = layout.axes_of(dim)
        parts = math.prod(layout.mesh.size(axis) for axis in axes)
        if parts == 1:
            return local_length
        for spec in self._inputs:
            own = spec.local_shape_at(coordinate)
            for own_dim in range(spec.ndim):
                if spec.layout.axes_of(own_dim) == axes and own[own_dim] == local_length:
                    return int(spec.shape[own_dim])
        for spec in self._inputs:
            for own_dim, length in enumerate(spec.shape):
                if length % math.prod(spec.layout.mesh.size(axis) for axis in spec.layout.axes_of(own_dim)):
                    raise ArgumentError(
                        f"The global shape of what {self._rule.op_name!r} returns is not known: its inputs are split "
                        "unevenly.",
                        expected="`infer_shape(self, shapes, extra_args)` in the rule",
                        got=f"none, and {spec}",
                        where=type(self._rule).__name__,
                        do="Let it answer the global shape of each output.",
                    )
        return local_length * parts


class _Wrapper:
    """Makes DTensors of local results."""

    def __init__(
        self,
        rule: Any,
        backend: DispatchBackend,
        shapes: _ShapesFromInputs,
        layouts: tuple[Layout | None, ...],
        is_sequence: bool,
    ) -> None:
        self._rule, self._backend, self._shapes, self._layouts = rule, backend, shapes, layouts
        self._is_sequence = is_sequence

    def __call__(self, result: Any) -> Any:
        layouts = self._layouts
        if self._rule.wrap_output is not None:
            return self._rule.wrap_output(result, layouts if self._is_sequence else layouts[0])
        if not self._is_sequence:
            if isinstance(result, (tuple, list)):
                raise _wrong_answer(self._rule, f"{len(result)} layouts, one per output", "one layout")
            return self._wrapped(result, 0, layouts[0])
        if not isinstance(result, (tuple, list)) or len(result) != len(layouts):
            outputs = f"{len(result)} outputs" if isinstance(result, (tuple, list)) else "one output"
            raise _wrong_answer(self._rule, f"as many layouts as there are outputs: {outputs}", list(layouts))
        return type(result)(
            self._wrapped(value, i, layout) for i, (value, layout) in enumerate(zip(result, layouts, strict=True))
        )

    def _wrapped(self, value: Any, index: int, layout: Layout | None) -> Any:
        if layout is None or not self._backend.is_tensor(value):
            return value
        if hasattr(self._rule, "choose_layouts") and layout.ndim < len(value.shape):
            layout = layout.replace(axes_per_dim=(*layout.axes_per_dim, *((),) * (len(value.shape) - layout.ndim)))
        coordinate = self._backend.coordinate(layout)
        shape = self._shapes.global_shape(index, layout, tuple(value.shape), coordinate)
        spec = Spec(layout, shape)
        if spec.local_shape_at(coordinate) != tuple(value.shape):
            raise ArgumentError(
                f"An output of {self._rule.op_name!r} does not have the shape that its layout gives it.",
                expected=f"{spec.local_shape_at(coordinate)}, for {spec}",
                got=str(tuple(value.shape)),
                do="Let `infer_layout` answer the layout that the output has, or give the rule an `infer_shape`.",
            )
        return self._backend.wrap(value, spec)
