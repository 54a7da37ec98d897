"""Whether the batch of a step is within the one that a plan was made for. It is asked before every training step.

Worked example: planned for `input_ids int64[4, 512]`. `[4, 512]` is the SAME, `[3, 512]` and `[4, 128]` are SMALLER,
`[8, 64]` is LARGER.

One rule holds for the first step and all later ones. A tensor is within another if it has as many dims, none of them
longer, and its elements are no larger. A batch is within another if each of its tensors is within the one in the same
place. What is within needs no more memory, so it runs under the plan. What is not is told before it runs, or planned
anew. Bytes alone would not do: `[2, 4096]` has fewer than `[64, 256]`, and attention needs more for it.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

from hyper_parallel.core.planner.model.mismatches import MismatchError, Mismatches

_META = re.compile(r"(\w+)\[((?:[0-9]{1,18}(?:, [0-9]{1,18})*)?)\]")  # as frameworks' `look` says it: "float32[2, 8]"
_MAX_KNOWN = 4096  # batches of different looks that are remembered; beyond, all are looked at again
_WHAT = "A batch is larger than the one that the plan was made for, and its step may need more than the budget."


class Fit(Enum):
    """How a batch compares with the plan's."""

    SAME = "of the same look"
    SMALLER = "within it"
    LARGER = "not within it"
    UNJUDGED = "not a training step's"


class _TensorMeta(NamedTuple):
    item_bytes: int
    shape: tuple[int, ...]
    words: str

    @property
    def is_number(self) -> bool:
        return math.prod(self.shape) <= 1

    def is_within(self, other: _TensorMeta) -> bool:
        return (
            len(self.shape) == len(other.shape)
            and self.item_bytes <= other.item_bytes
            and all(mine <= theirs for mine, theirs in zip(self.shape, other.shape, strict=True))
        )


class _Judged(NamedTuple):
    """The judgement on one batch; `where`, `expected`, `got`: of the first tensor that is larger."""

    fit: Fit
    where: str = ""
    expected: str = ""
    got: str = ""


class PlannedBatch:
    """The batch that a plan was made for, with which others are compared.

    `meta`: what the plan says of it, or None if it does not say; `meta_of`: the framework's function for other batches;
    `forward`: what the model is called by, so that an argument is the same whether it comes by name or by place.
    """

    def __init__(self, meta: object, meta_of: Callable[[Any], Any], forward: Callable[..., Any]) -> None:
        self._meta_of = meta_of
        self._signature = _signature(forward)
        self._planned = None if meta is None else dict(self._places(*_as_arguments(meta)))
        self._known: dict[Any, _Judged] = {}

    def judged(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Judged:
        """Compare a batch with the plan's.

        An answer is remembered by dtypes and shapes, since each step asks.
        """
        if self._planned is None:
            return _Judged(Fit.SAME)
        key = _key(args), _key(kwargs)
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            known = self._known[key] = self._judge(
                self._meta_of(list(args)), self._meta_of(dict(kwargs)), self._planned
            )
        return known

    def _judge(self, args: list[Any], kwargs: dict[str, Any], planned_metas: Mapping[str, _TensorMeta]) -> _Judged:
        found = dict(self._places(args, kwargs))
        for where, meta in found.items():
            planned = planned_metas.get(where)
            if planned is None and meta.is_number:  # as Hugging Face's Trainer gives the number of labels
                continue
            if planned is None or not meta.is_within(planned):
                return _Judged(Fit.LARGER, where, "no tensor" if planned is None else planned.words, meta.words)
        return _Judged(Fit.SAME if found == planned_metas else Fit.SMALLER)

    def _places(self, args: list[Any], kwargs: dict[str, Any]) -> Iterator[tuple[str, _TensorMeta]]:
        """List the tensors of a batch by the names of the arguments that they are in."""
        named: Mapping[str, Any] = {**{str(number): argument for number, argument in enumerate(args)}, **kwargs}
        if self._signature is not None:
            try:
                bound = self._signature.bind_partial(None, *args, **kwargs)
            except TypeError:
                pass  # the model itself will say so
            else:
                named = dict(list(bound.arguments.items())[1:])
        for name, value in named.items():
            yield from _tensors(name, value)


class BatchCheck:
    """Compares the batch of each training step under a plan with the plan's, before the step runs.

    Attributes:
        tells: a batch that is larger is told, or counted; False: whoever manages the model plans anew for it
    """

    def __init__(self, batch: PlannedBatch, mismatches: Mismatches, *, was_training: bool, do: str) -> None:
        self.tells = True
        self._batch = batch
        self._mismatches = mismatches
        self._was_training = was_training
        self._do = do

    def fit(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_training: bool) -> Fit:
        """Compare the batch of a forward with gradients.

        `is_training`: the mode of the model; in eval mode nobody trains, unless it was planned so.

        Raises:
            MismatchError: the batch is larger, and nobody asked to count that.
        """
        if self._was_training and not is_training:
            return Fit.UNJUDGED
        judged = self._batch.judged(args, kwargs)
        if judged.fit is Fit.LARGER and self.tells:
            self._mismatches.counts["batches larger than planned"] += 1
            if self._mismatches.raises:
                raise MismatchError(
                    _WHAT,
                    expected=f"at most {judged.expected}",
                    got=judged.got,
                    where=f"argument `{judged.where}` of the model",
                    do=self._do,
                )
        return judged.fit


def _signature(forward: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(forward)
    except (TypeError, ValueError):  # of a builtin
        return None


def _as_arguments(meta: object) -> tuple[list[Any], dict[str, Any]]:
    """Take a plan's batch apart into arguments and keywords."""
    if isinstance(meta, dict):
        if meta.keys() == {"args", "kwargs"} and isinstance(meta["args"], list) and isinstance(meta["kwargs"], dict):
            return meta["args"], meta["kwargs"]
        return [], meta
    return (meta, {}) if isinstance(meta, list) else ([meta], {})


def _tensors(where: str, meta: object) -> Iterator[tuple[str, _TensorMeta]]:
    if isinstance(meta, dict):
        for name, item in meta.items():
            yield from _tensors(f"{where}.{name}", item)
    elif isinstance(meta, (list, tuple)):
        for number, item in enumerate(meta):
            yield from _tensors(f"{where}[{number}]", item)
    elif isinstance(meta, str) and (found := _META.fullmatch(meta)):
        dtype, dims = found.groups()
        bits = re.search(r"[0-9]{1,4}", dtype)
        shape = tuple(int(dim) for dim in dims.split(",")) if dims else ()
        yield where, _TensorMeta(max(int(bits.group()) // 8, 1) if bits else 1, shape, meta)


def _key(value: Any) -> Any:
    """Make something equal for batches of the same dtypes and shapes.

    It is made in each step, so it makes no words.
    """
    if isinstance(value, Mapping):
        return tuple((name, _key(item)) for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    if getattr(value, "is_nested", False):  # has no shape
        return value.dtype, value.numel()
    if (shape := getattr(value, "shape", None)) is not None and hasattr(value, "dtype"):
        return value.dtype, tuple(shape)
    if fields := tensor_fields(value):
        return type(value), _key(fields)
    return type(value)


def tensor_fields(value: object) -> dict[str, Any]:
    """List the fields of a dataclass, or of another object the attributes that are tensors.

    It is empty for what is no object of a user's.
    """
    if isinstance(value, type) or callable(value):
        return {}
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    found = getattr(value, "__dict__", None) or {}
    return {name: item for name, item in found.items() if hasattr(item, "shape") and hasattr(item, "dtype")}


UNKNOWN_BATCH = PlannedBatch(None, lambda batch: None, lambda: None)
