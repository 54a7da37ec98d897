"""A model that is a sequence of modules, cut into stages.

Example: of `nn.Sequential(embedding, *six_blocks, head)` two stages are the first four modules and the last four.
Parameters keep the names that they have in the whole model: the second stage's first block is still "4".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hyper_parallel._base.errors import ArgumentError, ComesLaterError, describe
from hyper_parallel._base.whole_numbers import as_int
from hyper_parallel.core.parallel.backend import parallel_of
from hyper_parallel.core.parallel.pipeline.stage import PipelineStage
from hyper_parallel.platform.opaque import Module

__all__ = ["split_stages"]


def split_stages(
    model: Module, num: int, *, by: str | Sequence[str] = "layers", batch: Mapping[str, Any] | None = None
) -> list[PipelineStage]:
    """Cut a sequence of modules into stages. Nothing is copied: the stages hold the model's own modules.

    A weight that is in several stages is tied: in a `Pipeline` its copies have one gradient.

    Args:
        model: an `nn.Sequential` or `nn.SequentialCell`: each module takes what the one before it gives.
        num: how many stages, as many as the schedule has.
        by: "layers" gives all stages as many modules as can be, the first ones one more; or the names of the modules
            that stages 1, 2, ... begin with.

    Raises:
        TypeError: the model is no sequence. Give `PipelineStage`s of your own then.
        ValueError: there are fewer modules than stages, or no module of such a name.

    Example:
        >>> import torch, hyper_parallel as hp
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(5)))
        >>> [list(dict(stage.module.named_parameters())) for stage in hp.split_stages(model, 2)]
        [['0.weight', '1.weight', '2.weight'], ['3.weight', '4.weight']]
    """
    backend = parallel_of(model, "split_stages")
    blocks = backend.blocks(model, by, batch)
    whole = as_int(num)
    if whole is None or not 1 <= whole <= len(blocks.names):
        raise ArgumentError(
            "Each stage has a block at least.", expected=f"num from 1 to {len(blocks.names)}", got=describe(num)
        )
    begins = _begins(blocks.names, whole, by)
    ends = [*begins[1:], len(blocks.names)]
    modules = [blocks.stage(begin, end) for begin, end in zip(begins, ends, strict=True)]
    seen: dict[int, list[tuple[int, str]]] = {}
    for stage, module in enumerate(modules):
        for name, weight in backend.stage(module).weights():
            seen.setdefault(id(weight), []).append((stage, name))
    tied: list[dict[str, str]] = [{} for _ in modules]
    for places in seen.values():
        if len(places) > 1:
            for stage, name in places:
                tied[stage][name] = places[0][1]
    return [PipelineStage(module, index, whole, tied=tied[index]) for index, module in enumerate(modules)]


def _begins(names: Sequence[str], num: int, by: object) -> list[int]:
    """The number of the module with which each stage begins."""
    if by == "layers":
        size, more = divmod(len(names), num)
        return [stage * size + min(stage, more) for stage in range(num)]
    if by == "cost":
        raise ComesLaterError(
            "Stages by measured cost come later.", do='Take by="layers", or name the modules that stages begin with.'
        )
    if isinstance(by, str) or not isinstance(by, Sequence):
        raise ArgumentError("`by` says where stages begin.", expected='"layers" or a list of names', got=describe(by))
    unknown = [name for name in by if name not in names]
    begins = [0, *(names.index(name) for name in by if name in names)]
    if unknown or len(begins) != num or begins != sorted(set(begins)):
        raise ArgumentError(
            "`by` names the modules with which stages 1, 2, ... begin, in order.",
            expected=f"{num - 1} of {', '.join(names[1:])}",
            got=describe(list(by)),
        )
    return begins
