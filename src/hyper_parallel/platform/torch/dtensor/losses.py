"""Cross entropy of logits that are split by rows, by classes, or both."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch.autograd.function import once_differentiable

from hyper_parallel.core.dtensor.boxes import box_of
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.shard.communication_log import why
from hyper_parallel.core.shard.rule_answer import RuleAnswer
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.platform.torch.dtensor.movement import coordinate_on, reduce_values

__all__ = ["cross_entropy_call"]

_SIGNATURE = inspect.signature(F.cross_entropy)


def cross_entropy_call(answer: RuleAnswer, inputs: Sequence[Spec]) -> Callable[..., torch.Tensor] | None:
    """Return the local call; None where nothing is split, and it is the function itself."""
    layout = answer.inputs[0]
    mesh = layout.mesh
    classes: int = answer.facts["classes"]
    class_axes = tuple(axis for axis in layout.axes_of(classes) if mesh.size(axis) > 1)
    row_axes = tuple(axis for axis in layout.varying_axes if axis not in class_axes)
    if not class_axes and not row_axes:
        return None
    box = box_of(layout, inputs[0].shape, coordinate_on(layout))
    num_rows = inputs[0].num_elements // max(inputs[0].shape[classes], 1)
    part = _Part(mesh, class_axes, box.starts[classes], inputs[0].shape[classes])

    def call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
        bound = _SIGNATURE.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        logits, target, reduction = given["input"], given["target"], given["reduction"]
        is_by_index = target.ndim == logits.ndim - 1
        if class_axes:
            losses = _SplitClasses.apply(logits, target, part, given["ignore_index"], float(given["label_smoothing"]))
        else:
            options = {"ignore_index": given["ignore_index"], "label_smoothing": given["label_smoothing"]}
            losses = F.cross_entropy(logits, target, reduction="none", **options)
        if reduction == "none":
            return losses
        total = losses.sum()
        if reduction == "sum":
            return total
        if not is_by_index:
            return total / num_rows
        count = (target != given["ignore_index"]).sum()
        if row_axes:
            with why("implied", "cross_entropy"):
                count = reduce_values(count, mesh, row_axes, "sum")
        return total / count

    return call


class _Part:
    """The classes that this rank has, and the axes over which ranks have all of them together."""

    def __init__(self, mesh: DeviceMesh, axes: tuple[str, ...], first: int, num_classes: int) -> None:
        self.mesh, self.axes, self.first, self.num_classes = mesh, axes, first, num_classes

    def reduced(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        with why("implied", "cross_entropy"):
            return reduce_values(tensor, self.mesh, self.axes, op)


class _SplitClasses(torch.autograd.Function):
    """Losses per row of logits [rows, classes of this rank] (or [classes]).

    Two reductions in forward, none in backward.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, part: _Part, ignore_index: int, smoothing: float
    ) -> torch.Tensor:
        x = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        highest = x.amax(-1) if x.shape[-1] else x.new_full(x.shape[:-1], float("-inf"))
        highest = part.reduced(highest, "max")
        shifted = x - highest.unsqueeze(-1)
        exponentials = shifted.exp()
        local = target - part.first
        is_here = (local >= 0) & (local < x.shape[-1])
        index = local.masked_fill(~is_here, 0).unsqueeze(-1)
        picked = shifted.gather(-1, index).squeeze(-1) if x.shape[-1] else shifted.sum(-1)
        sums = [exponentials.sum(-1), picked * is_here]
        if smoothing:
            sums.append(shifted.sum(-1))
        total, right, *everything = part.reduced(torch.stack(sums), "sum")
        losses = total.log() - right
        if smoothing:
            losses = (1 - smoothing) * losses + smoothing * (total.log() - everything[0] / part.num_classes)
        counts = target != ignore_index
        ctx.save_for_backward(exponentials / total.unsqueeze(-1), index, is_here, counts)
        ctx.smoothing, ctx.num_classes, ctx.dtype = smoothing, part.num_classes, logits.dtype
        return (losses * counts).to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        softmax, index, is_here, counts = ctx.saved_tensors
        wanted = torch.full_like(softmax, ctx.smoothing / ctx.num_classes)
        if softmax.shape[-1]:
            wanted.scatter_add_(-1, index, ((1 - ctx.smoothing) * is_here).to(wanted.dtype).unsqueeze(-1))
        result = (softmax - wanted) * (grad * counts).to(softmax.dtype).unsqueeze(-1)
        return result.to(ctx.dtype), None, None, None, None
