"""What a call that takes "the model" takes: a module, some modules, stages of a pipeline, or a pipeline.

Example: `parts_of([stage0, stage3])` are the modules of two stages, with what their tied weights are called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hyper_parallel._base.errors import ArgumentTypeError, describe
from hyper_parallel.core.parallel.pipeline.running import Pipeline
from hyper_parallel.core.parallel.pipeline.stage import PipelineStage
from hyper_parallel.platform.opaque import Module
from hyper_parallel.platform.selection import framework_of

__all__ = ["Part", "is_staged", "parts_of"]


class Part(NamedTuple):
    """A module that this rank has. `stage` is its place in a pipeline; `tied` are weights by what copies are called."""

    module: Module
    stage: int | None
    tied: Mapping[str, str]


def is_staged(model: object) -> bool:
    """Say whether this is a pipeline, a stage, or a list of stages."""
    if isinstance(model, (list, tuple)):
        return any(isinstance(item, PipelineStage) for item in model)
    return isinstance(model, (Pipeline, PipelineStage))


def parts_of(model: Any, call: str) -> list[Part]:
    """Return the modules of this rank, stages in order.

    Raises:
        TypeError: it is none of these.
    """
    if isinstance(model, Pipeline):
        given: list[Any] = list(model.stages.values())
    else:
        given = list(model) if isinstance(model, (list, tuple)) else [model]
    stages = [item for item in given if isinstance(item, PipelineStage)]
    wrong = [item for item in given if not isinstance(item, PipelineStage) and not _is_module(item)]
    if wrong or not given or (stages and len(stages) < len(given)):
        raise ArgumentTypeError(
            f"`{call}` takes a model.",
            expected="a module, a list of modules, a PipelineStage, a list of stages, or a Pipeline",
            got=describe(wrong[0] if wrong else model),
        )
    if stages:
        ordered = sorted(stages, key=lambda stage: stage.index)
        return [Part(stage.module, stage.index, stage.tied) for stage in ordered]
    return [Part(module, None, {}) for module in given]


def _is_module(item: object) -> bool:
    return framework_of(item) is not None and (hasattr(item, "named_modules") or hasattr(item, "cells_and_names"))
