"""The norm of all gradients of a model, wherever they are, and gradients that are no longer than that allows.

Within a stage a framework adds up over the ranks that have parts of a gradient. Over stages it is one exchange of a few
numbers: each rank tells the norm of each of its stages, and that of each weight with copies in other stages. All ranks
then combine the same numbers in the same order, each stage and each such weight once, and get the same result.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from hyper_parallel._base.errors import ArgumentTypeError, StateError, describe
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.parallel.gradients import GradientsBackend, gradients_of
from hyper_parallel.core.parallel.parts import Part, is_staged, parts_of
from hyper_parallel.core.parallel.pipeline.running import Pipeline
from hyper_parallel.platform import platform_of
from hyper_parallel.platform.arguments import check_flag, check_norm_arguments
from hyper_parallel.platform.interface import Platform
from hyper_parallel.platform.opaque import Tensor
from hyper_parallel.platform.selection import framework_of, imported_platform

__all__ = ["clip_grad_norm_", "combined_norm"]

# What a number is the norm of: ("stage", its index) or ("tied", the weight's name).
Key = tuple[str, int | str]


def clip_grad_norm_(
    run: Any,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    mesh: DeviceMesh | None = None,
    axis: str = "pp",
) -> Tensor:
    """Scale all gradients so that their total norm is at most `max_norm`; return the norm before.

    It is the norm of one process that has all gradients, the same number on every rank: parts of a gradient count once,
    wherever they are, and so do weights that stages share. A parameter without a gradient counts as zeros, also where
    only some ranks have none. All ranks that have a part of the model call it.

    Args:
        run: a module, parameters, a list of modules, a `PipelineStage`, a list of stages, or a `Pipeline`.
        max_norm: the largest norm that is left as it is.
        norm_type: the order of the norm, `math.inf` for the largest element.
        error_if_nonfinite: raise where the norm is infinite or no number, on every rank.
        mesh: for stages without a `Pipeline`: whose ranks along `axis` have them; all ranks of the world without.
        axis: the name of that axis.

    Example:
        `hp.clip_grad_norm_(pipeline, 1.0)` after `pipeline.step(batch)`.
    """
    if not is_staged(run):
        parameters = _parameters(run)
        platform = platform_of(parameters[0], call="clip_grad_norm_") if parameters else imported_platform()
        norm: Tensor = platform.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
        return norm
    parts = parts_of(run, "clip_grad_norm_")
    platform = platform_of(parts[0].module, call="clip_grad_norm_")
    order = check_norm_arguments(max_norm, norm_type)
    check_flag(error_if_nonfinite, "error_if_nonfinite")
    ours = gradients_of(parts[0].module, "clip_grad_norm_")
    weights = _weights(ours, parts)
    mine = {key: ours.norm(tensors, order) for key, tensors in weights.items()}
    if isinstance(run, Pipeline):
        everywhere = _gathered(platform, mine, run.group)
    else:
        everywhere = _gathered(platform, mine, None if mesh is None else mesh.get_group(axis))
    total = combined_norm([everywhere[key] for key in sorted(everywhere, key=str)], order)
    if error_if_nonfinite and not math.isfinite(total):
        raise StateError(
            "The total norm of the gradients is not finite.",
            expected="a number",
            got=str(total),
            where=f"{len({number for kind, number in everywhere if kind == 'stage'})} stages",
            do="Look for the first loss that is not finite, or pass error_if_nonfinite=False.",
        )
    factor = float(max_norm) / (total + 1e-6)
    if not factor >= 1.0:
        ours.scale([tensor for tensors in weights.values() for tensor in tensors], factor)
    return ours.number(total)


def _parameters(run: Any) -> list[Any]:
    given = list(run) if framework_of(run) is None and isinstance(run, Iterable) else [run]
    found: list[Any] = []
    for item in given:
        if framework_of(item) is None:
            raise ArgumentTypeError(
                "`clip_grad_norm_` takes a model or parameters.",
                expected="a module, parameters, or stages of a pipeline",
                got=describe(item),
            )
        is_module = hasattr(item, "named_modules") or hasattr(item, "cells_and_names")
        found += platform_of(item).parameters_dict(item).values() if is_module else [item]
    return list({id(parameter): parameter for parameter in found}.values())


def _weights(ours: GradientsBackend, parts: list[Part]) -> dict[Key, list[Tensor]]:
    """Sort this rank's weights by what they count for; one that two stages of this rank share is the first one's."""
    found: dict[Key, list[Tensor]] = {("stage", part.stage or 0): [] for part in parts}
    seen: set[int] = set()
    for part in parts:
        for name, weight in ours.parameters(part.module):
            if id(weight) not in seen:
                seen.add(id(weight))
                key: Key = ("tied", part.tied[name]) if name in part.tied else ("stage", part.stage or 0)
                found.setdefault(key, []).append(weight)
    return found


def _gathered(platform: Platform, mine: dict[Key, float], group: Any) -> Mapping[Key, float]:
    """The numbers of all ranks; of those with the same stage the first one's."""
    number = platform.get_world_size() if group is None else len(platform.get_process_group_ranks(group))
    found: list[Any] = [mine]
    if number > 1:
        found = [None] * number
        platform.all_gather_object(found, mine, group)
    everywhere: dict[Key, float] = {}
    for numbers in found:
        for key, norm in numbers.items():
            everywhere.setdefault(key, norm)
    return everywhere


def combined_norm(norms: Iterable[float], order: float) -> float:
    """Make the norm of all parts of the norms of the parts.

    Example:
        >>> combined_norm([3.0, 4.0], 2.0), combined_norm([3.0, 4.0], math.inf), combined_norm([], 2.0)
        (5.0, 4.0, 0.0)
    """
    found = list(norms)
    if any(math.isnan(norm) for norm in found):
        return math.nan
    largest = max(found, default=0.0)
    if math.isinf(order) or largest == 0.0 or math.isinf(largest):
        return largest
    # Over the largest, so that no power is too large for a number.
    return largest * float(math.fsum((norm / largest) ** order for norm in found) ** (1.0 / order))
