"""What a model and its optimizer are to a checkpoint: tensors by key, and plain values.

Keys: `model/<name>` for parameters and buffers, `optimizer/<parameter>/<name>` for state of an optimizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, HyperParallelError, describe
from hyper_parallel.core.parallel.pipeline.running import Pipeline
from hyper_parallel.core.parallel.pipeline.stage import PipelineStage
from hyper_parallel.core.parallel.saving.backend import Held, OptimizerState, SavingBackend, saving_of
from hyper_parallel.core.parallel.saving.description import Described, Description
from hyper_parallel.core.parallel.saving.values import to_json
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.opaque import Module
from hyper_parallel.platform.selection import backend

__all__ = ["Contents", "ModelPart", "contents_of", "parts_of_model", "state_key"]


class ModelPart(NamedTuple):
    """A module, and which stage of a pipeline it is."""

    module: Module
    stage: int | None
    tied: Mapping[str, str]


@dataclass
class Contents:
    """What this rank has. `aliases`, `ties` and `stages` are by key, as in a `Description`."""

    backend: SavingBackend
    held: dict[str, Held] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    ties: dict[str, str] = field(default_factory=dict)
    stages: dict[str, int | None] = field(default_factory=dict)
    optimizer: OptimizerState | None = None
    optimizer_values: Any = None  # {"groups": …, "values": …} as JSON

    def description(self) -> Description:
        tensors = {
            key: Described(held.dtype, held.shape, held.spread, self.stages.get(key)) for key, held in self.held.items()
        }
        return Description(tensors, self.aliases, self.ties)


def parts_of_model(model: object) -> list[ModelPart]:
    """Take a model apart: a module alone, or stages of a pipeline in order."""
    if isinstance(model, Pipeline):
        model = list(model.stages.values())
    if isinstance(model, PipelineStage):
        model = [model]
    if not isinstance(model, (list, tuple)):
        return [ModelPart(model, None, {})]
    if not model or not all(isinstance(stage, PipelineStage) for stage in model):
        raise ArgumentTypeError(
            "A model is a module, or a list of stages.",
            expected="a module or cell, `hp.PipelineStage`s or an `hp.Pipeline`",
            got=describe(model),
        )
    return [ModelPart(stage.module, stage.index, stage.tied) for stage in sorted(model, key=lambda stage: stage.index)]


def backend_of(model: object, call: str) -> tuple[SavingBackend, HyperParallelError | None]:
    """The framework of a model. For one that is no model, that of the process and the error: all ranks hear of it."""
    try:
        return saving_of(parts_of_model(model)[0].module, call), None
    except HyperParallelError as error:
        return backend(get_platform(), SavingBackend, call), error


def contents_of(saving: SavingBackend, model: object, optimizer: object, *, is_written: bool) -> Contents:
    """Collect all that this rank has. `is_written`: the tensors will be loaded into."""
    contents = Contents(saving)
    seen: dict[int, str] = {}
    alive: list[Any] = []  # an identity says nothing once its object has gone
    parameters: dict[str, Any] = {}
    ties: dict[str, str] = {}
    for part in parts_of_model(model):
        for name, tensor in saving.tensors(part.module).items():
            key = f"model/{name}"
            if key in contents.held or key in contents.aliases:
                if seen.get(id(tensor)) == contents.aliases.get(key, key):
                    continue
                raise ArgumentError(
                    "Two modules call two tensors by one name.",
                    where=name,
                    do="Make stages by `hp.split_stages`, or of modules that keep their names of the whole model.",
                )
            if id(tensor) in seen:
                contents.aliases[key] = seen[id(tensor)]
                continue
            seen[id(tensor)] = key
            alive.append(tensor)
            contents.held[key] = saving.held(tensor, name, is_written=is_written)
            contents.stages[key] = part.stage
            if name in part.tied:
                contents.ties[key] = f"model/{part.tied[name]}"
                ties[name] = part.tied[name]
        for name, parameter in saving.parameters(part.module).items():
            parameters.setdefault(name, parameter)
    if optimizer is not None:
        contents.optimizer = saving.optimizer(optimizer, parameters)
        if not is_written:
            _add_optimizer(contents, contents.optimizer, ties)
    return contents


def state_key(param: str, name: str) -> str:
    return f"optimizer/{param}/{name}"


def split_state_key(key: str) -> tuple[str, str]:
    param, _, name = key.removeprefix("optimizer/").rpartition("/")
    return param, name


def _add_optimizer(contents: Contents, optimizer: OptimizerState, ties: Mapping[str, str]) -> None:
    values: dict[str, dict[str, Any]] = {}
    for param, states in optimizer.states().items():
        for name, value in states.items():
            key = state_key(param, name)
            if not contents.backend.is_tensor(value):
                values.setdefault(param, {})[name] = to_json(value, f"state {name!r} of {param}")
                continue
            held = contents.backend.held(value, f"state {name!r} of {param}", is_written=False)
            _check_lies_as(held, contents.held.get(f"model/{param}"), param, name)
            contents.held[key] = held
            contents.stages[key] = contents.stages.get(f"model/{param}")
            if param in ties:
                contents.ties[key] = state_key(ties[param], name)
    groups = [
        {"params": group.params, "options": to_json(group.options, "a parameter group")} for group in optimizer.groups()
    ]
    contents.optimizer_values = {"groups": groups, "values": values}


def _check_lies_as(state: Held, parameter: Held | None, param: str, name: str) -> None:
    """A plain tensor beside a parameter in parts: nobody can tell whether all ranks have the same."""
    if parameter is None or parameter.spread is None or state.spread is not None or state.shape in ((), (1,)):
        return
    if len({box for box, _ in parameter.spread}) > 1:
        raise ArgumentError(
            "State of an optimizer does not say how it lies on the ranks.",
            expected="a distributed tensor, as the parameter is, or a single number",
            got=f"a plain {state.dtype}{list(state.shape)}",
            where=f"state {name!r} of {param}",
            do="Let the optimizer keep state with the parameter's layout (`torch.zeros_like(parameter)`).",
        )


def merged_optimizer(found: Iterable[Any]) -> Any:
    """Put what ranks say of their optimizers together: groups with equal options become one."""
    groups: dict[str, dict[str, Any]] = {}
    values: dict[str, Any] = {}
    is_there = False
    for entry in found:
        if entry is None:
            continue
        is_there = True
        for param, states in entry["values"].items():
            values.setdefault(param, {}).update(states)
        for group in entry["groups"]:
            known = groups.setdefault(json.dumps(group["options"], sort_keys=True), {**group, "params": []})
            there = set(known["params"])
            known["params"] = known["params"] + [param for param in group["params"] if param not in there]
    return {"groups": list(groups.values()), "values": values} if is_there else None
