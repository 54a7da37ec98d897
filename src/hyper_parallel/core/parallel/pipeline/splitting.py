"""A model cut into stages: a sequence of modules, or a model with a list of blocks.

Example: of `nn.Sequential(embedding, *six_blocks, head)` two stages are the first four modules and the last four.
Parameters keep the names that they have in the whole model: the second stage's first block is still "4".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hyper_parallel._base.errors import ArgumentError, describe
from hyper_parallel._base.whole_numbers import as_int
from hyper_parallel.core.parallel.backend import Blocks, ParallelBackend, parallel_of
from hyper_parallel.core.parallel.pipeline.cutting import even_cut
from hyper_parallel.core.parallel.pipeline.measuring import measured_alike
from hyper_parallel.core.parallel.pipeline.stage import PipelineStage
from hyper_parallel.platform import platform_of
from hyper_parallel.platform.opaque import Module

__all__ = ["Stages", "split_stages"]


class Stages(list[PipelineStage]):
    """The stages of a model, a list. Printed, it says which blocks each one has, and what they cost.

    Attributes:
        blocks: of each stage, the names of its blocks.
        costs: of each stage, the sum of its blocks' costs; None where nobody asked for costs.
    """

    def __init__(
        self, stages: Sequence[PipelineStage], blocks: Sequence[Sequence[str]], costs: Sequence[float] | None
    ) -> None:
        super().__init__(stages)
        self.blocks = [list(names) for names in blocks]
        self.costs = None if costs is None else list(costs)

    def __str__(self) -> str:
        lines = []
        for number, names in enumerate(self.blocks):
            cost = "" if self.costs is None else f", {self.costs[number] / sum(self.costs):.1%} of the cost"
            what = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            lines.append(f"stage {number}: {what}{cost}")
        return "\n".join(lines)


def split_stages(
    model: Module,
    num: int,
    *,
    by: str | Sequence[str] = "layers",
    batch: Any = None,
    costs: Sequence[float] | None = None,
) -> Stages:
    """Cut a model into stages. Nothing is copied: the stages hold the model's own parameters.

    A weight that is in several stages is tied: in a `Pipeline` its copies have one gradient.

    Args:
        model: an `nn.Sequential` or `nn.SequentialCell`, whose modules are its blocks; or, on PyTorch, a model that
            calls the blocks of an `nn.ModuleList` in order, such as Hugging Face's. What such a model does before its
            blocks is the first stage's, what it does after them the last one's; each stage takes the whole batch.
        num: how many stages, as many as the schedule has.
        by: "layers" gives all stages as many blocks as can be, the first ones one more; "cost" makes the dearest stage
            as cheap as can be; or the names of the blocks that stages 1, 2, ... begin with.
        batch: an example of what the model takes; a dict of keywords, a tuple of arguments or a single one. With
            by="cost" forward and backward of each block are timed with it, on rank 0, and all ranks must call this.
            A model that takes no token ids needs one to be looked into.
        costs: figures of your own for by="cost", one for each block. Without them and without a batch weights are
            counted, but for those of embeddings.

    Raises:
        ValueError: there are fewer blocks than stages; no block of such a name; the model's forward is not one that
            can be cut. Give `PipelineStage`s of your own then.

    Example:
        >>> import torch, hyper_parallel as hp
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(5)))
        >>> [list(dict(stage.module.named_parameters())) for stage in hp.split_stages(model, 2)]
        [['0.weight', '1.weight', '2.weight'], ['3.weight', '4.weight']]
        >>> print(hp.split_stages(model, 2, by="cost", costs=[4, 1, 1, 1, 1]))
        stage 0: 0, 50.0% of the cost
        stage 1: 1 to 4, 50.0% of the cost
    """
    backend = parallel_of(model, "split_stages")
    blocks = backend.blocks(model, by, batch)
    whole = as_int(num)
    if whole is None or not 1 <= whole <= len(blocks.names):
        raise ArgumentError(
            "Each stage has a block at least.", expected=f"num from 1 to {len(blocks.names)}", got=describe(num)
        )
    figures = _costs(model, backend, blocks, by, batch, costs)
    begins = even_cut(figures, whole) if figures is not None else _begins(blocks.names, whole, by)
    ends = [*begins[1:], len(blocks.names)]
    modules = [blocks.stage(begin, end) for begin, end in zip(begins, ends, strict=True)]
    tied = _tied(backend, modules)
    stages = [PipelineStage(module, index, whole, tied=tied[index]) for index, module in enumerate(modules)]
    parts = list(zip(begins, ends, strict=True))
    return Stages(
        stages,
        [blocks.names[begin:end] for begin, end in parts],
        None if figures is None else [sum(figures[begin:end]) for begin, end in parts],
    )


def _tied(backend: ParallelBackend, modules: Sequence[Module]) -> list[dict[str, str]]:
    """Of each stage, the weights that another one has as well, by the name in the first of them."""
    seen: dict[int, list[tuple[int, str]]] = {}
    for stage, module in enumerate(modules):
        for name, weight in backend.stage(module).weights():
            seen.setdefault(id(weight), []).append((stage, name))
    tied: list[dict[str, str]] = [{} for _ in modules]
    for places in seen.values():
        if len(places) > 1:
            for stage, name in places:
                tied[stage][name] = places[0][1]
    return tied


def _costs(
    model: Module, backend: ParallelBackend, blocks: Blocks, by: object, batch: object, given: Sequence[float] | None
) -> list[float] | None:
    """What each block costs, None where stages are not cut by cost."""
    if by != "cost":
        if given is not None:
            raise ArgumentError("Costs are for stages that are cut by cost.", expected='by="cost"', got=describe(by))
        return None
    if given is None:
        found: Sequence[float] = (
            [float(number) for number in blocks.num_weights()]
            if batch is None
            else measured_alike(platform_of(model), backend, blocks, batch)
        )
        return list(found) if sum(found) > 0 else [1.0] * len(found)
    if len(given) != len(blocks.names) or not all(math.isfinite(cost) and cost >= 0 for cost in given):
        raise ArgumentError(
            "Each block has a cost.", expected=f"{len(blocks.names)} finite numbers from 0", got=describe(list(given))
        )
    if not sum(given) > 0:
        raise ArgumentError("Blocks cost something.", expected="a number above 0", got=describe(list(given)))
    return [float(cost) for cost in given]


def _begins(names: Sequence[str], num: int, by: object) -> list[int]:
    """The number of the block with which each stage begins."""
    if by == "layers":
        size, more = divmod(len(names), num)
        return [stage * size + min(stage, more) for stage in range(num)]
    if isinstance(by, str) or not isinstance(by, Sequence):
        raise ArgumentError(
            "`by` says where stages begin.", expected='"layers", "cost" or a list of names', got=describe(by)
        )
    unknown = [name for name in by if name not in names]
    begins = [0, *(names.index(name) for name in by if name in names)]
    if unknown or len(begins) != num or begins != sorted(set(begins)):
        raise ArgumentError(
            "`by` names the blocks with which stages 1, 2, ... begin, in order.",
            expected=f"{num - 1} of {', '.join(names[1:])}",
            got=describe(list(by)),
        )
    return begins
