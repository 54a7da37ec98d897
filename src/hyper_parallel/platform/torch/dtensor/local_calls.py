"""Local calls that are not just the operator on local tensors.

They know local shapes, counts of the whole tensor, parts of a table, or draw random numbers.

Each takes the function and its arguments with local tensors in the places of the distributed ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.dtensor.boxes import box_of
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.rule_answer import LocalCall, RuleAnswer
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.platform.torch.dtensor.losses import cross_entropy_call
from hyper_parallel.platform.torch.dtensor.movement import coordinate_on

__all__ = ["drawn_alike", "local_call"]


def local_call(answer: RuleAnswer, inputs: Sequence[Spec], name: str) -> LocalCall | None:
    """Return the local implementation that an answer names; None: the function itself."""
    if answer.how is None:
        return None
    if answer.how == "cross_entropy":
        return cross_entropy_call(answer, inputs)
    return _MAKERS[answer.how](answer, inputs, name)


def _to_local_shape(answer: RuleAnswer, inputs: Sequence[Spec], name: str) -> LocalCall:
    layout = answer.outputs[0].layout
    shape = answer.outputs[0].local_shape_at(coordinate_on(layout))
    if name in ("expand", "broadcast_to", "expand_as"):
        return lambda func, args, kwargs: _first(args, kwargs).expand(shape)
    if name == "view":
        return lambda func, args, kwargs: _first(args, kwargs).view(shape)
    return lambda func, args, kwargs: _first(args, kwargs).reshape(shape)


def _first(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the tensor itself, named or not."""
    tensor: torch.Tensor = args[0] if args else kwargs["input"]
    return tensor


def _squeeze(answer: RuleAnswer, inputs: Sequence[Spec], name: str) -> LocalCall:
    dims = answer.facts["dims"]
    return lambda func, args, kwargs: _first(args, kwargs).squeeze(dims)


def _by_positions(answer: RuleAnswer, inputs: Sequence[Spec], name: str) -> LocalCall:
    """Refuse a mask where positions are taken.

    It would leave as many elements as its values say, on each rank another number.
    """

    def call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
        index = args[1] if name == "__getitem__" else None
        for item in index if isinstance(index, (list, tuple)) else (index,):
            if isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8):
                raise ArgumentError(
                    "A distributed tensor cannot be indexed by a mask: the shape would depend on its values.",
                    expected="positions, of an integer dtype",
                    got=str(item.dtype),
                    do="Use `torch.where(mask, x, other)`, or `x.full_tensor()[mask.full_tensor()]`.",
                )
        result: torch.Tensor = func(*args, **kwargs)
        return result

    return call


def _mean(answer: RuleAnswer, inputs: Sequence[Spec], name: str) -> LocalCall:
    """Divide a local sum by the global count: uneven parts weigh what they should."""
    count = answer.facts["count"]
    if not answer.outputs[0].layout.partial or not _newly_partial(answer):
        return lambda func, args, kwargs: func(*args, **kwargs)

    def call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
        return torch.sum(*args, **kwargs) / count

    return call


def _newly_partial(answer: RuleAnswer) -> bool:
    before = {axis for axis, _ in answer.inputs[0].partial}
    return any(axis not in before for axis, _ in answer.outputs[0].layout.partial)


def _like(answer: RuleAnswer, inputs: Sequence[Spec], name: str) -> LocalCall | None:
    return _random(answer, inputs, name) if name in ("rand_like", "randn_like") else None


def _random(answer: RuleAnswer, inputs: Sequence[Spec], name: str) -> LocalCall | None:
    layout = answer.outputs[0].layout
    if layout.is_replicated:
        return None  # ranks with the same seed draw the same numbers, those of a single device
    shape = answer.outputs[0].shape

    def call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        with drawn_alike(layout, shape):
            return func(*args, **kwargs)

    return call


def _rows_of_a_part(answer: RuleAnswer, inputs: Sequence[Spec], name: str) -> LocalCall:
    """Let each rank look up the rows it has, and leave zeros for the others; the parts are then summed."""
    table = inputs[1]
    layout = answer.inputs[1]
    box = box_of(layout, table.shape, coordinate_on(layout))
    first, count = box.starts[0], box.sizes[0]

    def call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
        given = dict(zip(("input", "weight", "padding_idx"), args, strict=False)) | kwargs
        ids, weight, padding = given["input"], given["weight"], given.get("padding_idx")
        if torch.any((ids < 0) | (ids >= table.shape[0])) if ids.device.type == "cpu" else False:
            return func(*args, **kwargs)  # the framework's own error, for the ids as they are
        is_here = (ids >= first) & (ids < first + count)
        if count == 0:
            return weight.new_zeros((*ids.shape, weight.shape[1]))
        if padding is not None:
            padding = padding % table.shape[0] - first
            padding = padding if 0 <= padding < count else None
        rows = F.embedding((ids - first).masked_fill(~is_here, 0), weight, padding)
        return rows * is_here.unsqueeze(-1).to(rows.dtype)

    return call


_MAKERS: dict[str, Callable[..., LocalCall | None]] = {
    "to_local_shape": _to_local_shape,
    "squeeze": _squeeze,
    "by_positions": _by_positions,
    "mean": _mean,
    "like": _like,
    "random": _random,
    "rows_of_a_part": _rows_of_a_part,
}


@contextlib.contextmanager
def drawn_alike(layout: Layout, shape: tuple[int, ...]) -> Iterator[None]:
    """Let ranks that hold the same part draw the same numbers inside, and others draw others.

    One number is drawn from the process's own generator, which has the same state on all ranks of a program that was
    seeded alike. Together with the place of the part it seeds the generators for the time of the call; afterwards they
    go on as if one number had been drawn.
    """
    box = box_of(layout, shape, coordinate_on(layout))
    seed = int(torch.randint(0, 2**48, (), dtype=torch.int64, device="cpu"))
    for start in box.starts:
        seed = (seed * 6364136223846793005 + start + 1442695040888963407) % 2**63
    cpu = torch.get_rng_state()
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    module = torch.get_device_module(device) if device is not None else None
    on_device = module.get_rng_state() if module is not None else None
    try:
        torch.manual_seed(seed)
        yield
    finally:
        torch.set_rng_state(cpu)
        if module is not None:
            module.set_rng_state(on_device)
