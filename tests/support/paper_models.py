"""Large models that exist as descriptions alone: a Llama of any size, in stages, slices and shards, with Adam's state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel import DeviceMesh
from hyper_parallel.core.dtensor.boxes import Box, boxes_of
from hyper_parallel.core.parallel.saving.checksums import CHUNK_BYTES
from hyper_parallel.core.parallel.saving.description import Described, Description, Spread, merged_spread
from hyper_parallel.core.parallel.saving.manifest import SavedItem, SavedTensor
from hyper_parallel.core.parallel.saving.reading import chunks_of, parts_of
from hyper_parallel.core.parallel.saving.writers import WritePlan, size_bytes

# What each weight of a block is split by: which dim tensor parallel takes. Shapes in widths: (3.25, 1) is 3.25 w x w.
BLOCK = {
    "q_proj.weight": ((1.0, 1.0), 0), "k_proj.weight": ((0.125, 1.0), 0), "v_proj.weight": ((0.125, 1.0), 0),
    "o_proj.weight": ((1.0, 1.0), 1), "gate_proj.weight": ((3.25, 1.0), 0), "up_proj.weight": ((3.25, 1.0), 0),
    "down_proj.weight": ((1.0, 3.25), 1), "input_layernorm.weight": ((1.0,), None), "post_layernorm.weight": ((1.0,), None),
}  # fmt: skip


class _Stage:
    """The tensors of one stage, on `dp * tp` ranks of its own."""

    def __init__(self, number: int, dp: int, tp: int) -> None:
        first = number * dp * tp
        ranks = [[first + d * tp + t for t in range(tp)] for d in range(dp)]
        self._number = number
        self._mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp"))
        self._spreads: dict[Any, Spread] = {}
        self.tensors: dict[str, Described] = {}

    def add(self, name: str, shape: tuple[int, ...], dim: int | None) -> None:
        axes: list[Any] = ["dp"] + [None] * (len(shape) - 1)
        if dim is not None:
            axes[dim] = ("tp", "dp") if dim == 0 else "tp"
        layout = self._mesh.layout(*axes)
        if (layout, shape) not in self._spreads:
            self._spreads[layout, shape] = merged_spread(dict(boxes_of(layout, shape)))
        spread = self._spreads[layout, shape]
        self.tensors[f"model/{name}"] = Described("BF16", shape, spread, self._number)
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            self.tensors[f"optimizer/{name}/{kind}"] = Described("F32", shape, spread, self._number)
        self.tensors[f"optimizer/{name}/step"] = Described("F32", (), None, self._number)


def described_model(
    *, layers: int, width: int, pp: int, dp: int, tp: int, vocabulary: int = 128256
) -> tuple[list[Description], list[int], list[float]]:
    """A description for each stage, which one each rank has, and what a fair share of each rank is in bytes.

    Parameters are bfloat16, the optimizer's three copies float32, all sharded over `dp`.
    """
    per_stage = dp * tp
    descriptions = []
    for number in range(pp):
        stage = _Stage(number, dp, tp)
        for layer in range(number * layers // pp, (number + 1) * layers // pp):
            for name, (sizes, dim) in BLOCK.items():
                stage.add(f"layers.{layer}.{name}", tuple(int(size * width) for size in sizes), dim)
        if number == 0:
            stage.add("embed.weight", (vocabulary, width), 0)
        if number == pp - 1:
            stage.add("head.weight", (vocabulary, width), 0)
        descriptions.append(Description(stage.tensors, {}, {}))
    description_of = [rank // per_stage for rank in range(pp * per_stage)]
    totals = [
        sum(size_bytes(tensor.dtype, tensor.shape) for tensor in description.tensors.values())
        for description in descriptions
    ]
    return descriptions, description_of, [totals[stage] / per_stage for stage in description_of]


def plans_of_reading(
    plan: WritePlan, descriptions: Sequence[Description], description_of: Sequence[int], every: int = 1
) -> list[float]:
    """For some ranks, what each reads to load what it had, over what it has: chunks are read whole."""
    saved = saved_tensors(plan)
    boxes: dict[int, list[tuple[SavedTensor, Box]]] = {rank: [] for rank in range(0, len(description_of), every)}
    for stage, description in enumerate(descriptions):
        ranks = {rank for rank in boxes if description_of[rank] == stage}
        for key, tensor in description.tensors.items():
            if tensor.spread is None:
                for rank in ranks:
                    boxes[rank].append((saved[key], Box((), ())))
                continue
            for box, holders in tensor.spread:
                for rank in ranks.intersection(holders):
                    boxes[rank].append((saved[key], box))
    return [_read_share(wanted) for wanted in boxes.values()]


def _read_share(wanted: Sequence[tuple[SavedTensor, Box]]) -> float:
    num_read = num_wanted = 0
    for tensor, box in wanted:
        num_wanted += box.num_elements * tensor.element_bytes
        for part in parts_of(tensor, box):
            whole = part.item.box.num_elements * tensor.element_bytes
            for chunk in chunks_of(part, tensor.element_bytes):
                num_read += min(CHUNK_BYTES, whole - chunk * CHUNK_BYTES)
    return num_read / num_wanted


def saved_tensors(plan: WritePlan) -> dict[str, SavedTensor]:
    """As a manifest would have them, without bytes."""
    items: dict[str, list[SavedItem]] = {key: [] for key in plan.tensors}
    for rank, written in enumerate(plan.items):
        for item in written:
            items[item.key].append(SavedItem(rank, 0, item.box, None))
    return {key: SavedTensor(tensor.dtype, tensor.shape, tuple(items[key])) for key, tensor in plan.tensors.items()}
