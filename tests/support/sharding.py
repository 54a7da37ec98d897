"""A sharded model beside the same model in one process, which sees the data of all ranks.

A `Program` is a model, what of it is sharded, and one step. `differences` runs it for some steps on both and says, in
words, where losses, gradients or parameters differ. Everything here runs in the workers of `support.processes`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import hyper_parallel as hp
from hyper_parallel.core.parallel.sharding.fully_shard import units_in
from hyper_parallel.core.parallel.sharding.order import ORDER
from support.process_worker import keep_platform_groups

LARGEST = 1e-12
WIDTH = 5


class Settings(NamedTuple):
    """How a model is sharded. `num_copies`: how many ranks have the same part."""

    zero: int = 3
    prefetch: int = 1
    num_copies: int = 1
    reduce: str | None = None
    num_steps: int = 3


class Of(nn.Module):
    """A module with these children, whose forward is a function of it."""

    def __init__(self, function: Callable[..., Any], **children: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Run:
    """What one step of a program sees: whose data it has, and how microbatches are run."""

    def __init__(self, rank: int, number: int, *, is_sharded: bool, reduce: str | None = None) -> None:
        self.rank = rank
        self.number = number
        self.is_sharded = is_sharded
        self.losses: list[float] = []
        self._reduce = reduce
        self.sum_of_weights = 0.0

    def data(self, *shape: int, of: int = 0) -> torch.Tensor:
        seed = 1000 * self.number + 100 * self.rank + of
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    def integers(self, high: int, *shape: int, of: int = 0) -> torch.Tensor:
        seed = 1000 * self.number + 100 * self.rank + of
        return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))

    def backward(self, loss: torch.Tensor) -> None:
        self.losses.append(loss.item())
        loss.backward()

    @contextmanager
    def microbatch(self, model: nn.Module, *, last: bool, weight: float | None = None) -> Iterator[None]:
        if self.is_sharded:
            with hp.accumulate(model, last=last, weight=weight, reduce=self._reduce):
                yield
            return
        before = {weight: weight.grad for weight in model.parameters()}
        for parameter in before:
            parameter.grad = None
        yield
        self.sum_of_weights += 0.0 if weight is None else weight
        for parameter, earlier in before.items():
            found, parameter.grad = parameter.grad, earlier
            if found is not None and weight is not None:
                found = found * weight if weight else torch.zeros_like(found)
            if found is not None:
                parameter.grad = found if earlier is None else earlier + found


class Program(NamedTuple):
    """What is trained.

    Attributes:
        model: makes it, the same on every rank.
        units: what of it is sharded, inner ones first.
        step: forward and backward of the data of one rank.
        between: what is done to the model after the step with this number, before the optimizer steps.
        is_weighted: whether microbatches have weights.
        largest: difference, of values in float64.
    """

    model: Callable[[], nn.Module]
    units: Callable[[Any], Sequence[Any]]
    step: Callable[[Run, Any], None]
    between: Callable[[Any, int], None] | None = None
    is_weighted: bool = False
    largest: float = LARGEST


@contextmanager
def float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def mesh_of(num_copies: int = 1) -> hp.DeviceMesh:
    size = dist.get_world_size()
    if num_copies == 1:
        mesh = hp.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    else:
        mesh = hp.init_device_mesh("cpu", (num_copies, size // num_copies), mesh_dim_names=("copies", "dp"))
    for name in mesh.axis_names:
        mesh.get_group(name)
    keep_platform_groups()
    return mesh


def shard(modules: Sequence[Any], settings: Settings = Settings(), **others: Any) -> None:  # noqa: B008 - it is a tuple
    mesh = mesh_of(settings.num_copies)
    for module in modules:
        hp.fully_shard(
            module,
            mesh=mesh,
            replicate_axis=None if settings.num_copies == 1 else "copies",
            zero=settings.zero,
            prefetch=settings.prefetch,
            **others,
        )


def differences(program: Program, settings: Settings = Settings()) -> list[str]:  # noqa: B008 - it is a tuple
    """Train it sharded, and in this process alone with the data of all ranks."""
    with float64():
        torch.manual_seed(0)
        whole = program.model()
        sharded = copy.deepcopy(whole)
        shard(program.units(sharded), settings)
        return [*_train(program, settings, whole, sharded), *what_is_left(sharded)]


def _train(program: Program, settings: Settings, whole: nn.Module, sharded: nn.Module) -> list[str]:
    wrong = []
    if [name for name, _ in whole.named_parameters()] != [name for name, _ in sharded.named_parameters()]:
        wrong.append("the names of the parameters")
    # AdamW has no rule for distributed complex numbers.
    theirs, ours = (
        torch.optim.AdamW([p for p in model.parameters() if p.is_floating_point()], lr=1e-2)
        for model in (whole, sharded)
    )
    size = dist.get_world_size()
    for number in range(settings.num_steps):
        runs = [Run(rank, number, is_sharded=False) for rank in range(size)]
        divide_by = 0.0
        for run in runs:
            program.step(run, whole)
            divide_by += run.sum_of_weights if program.is_weighted else 1
        for parameter in whole.parameters():
            if parameter.grad is not None:
                parameter.grad /= divide_by
        mine = Run(dist.get_rank(), number, is_sharded=True, reduce=settings.reduce)
        program.step(mine, sharded)
        if not _are_close(mine.losses, runs[mine.rank].losses, program.largest):
            wrong.append(f"step {number}: losses {mine.losses}, of one process {runs[mine.rank].losses}")
        wrong += [f"step {number}: {text}" for text in wrong_gradients(whole, sharded, program.largest)]
        if program.between is not None:
            program.between(whole, number)
            program.between(sharded, number)
        for model, optimizer in ((whole, theirs), (sharded, ours)):
            optimizer.step()
            model.zero_grad()
    return [*wrong, *wrong_values(whole, sharded, program.largest)]


def _are_close(found: list[float], expected: list[float], largest: float) -> bool:
    return len(found) == len(expected) and all(
        abs(one - other) <= largest * max(1.0, abs(other)) or (math.isnan(one) and math.isnan(other))
        for one, other in zip(found, expected, strict=True)
    )


def wrong_gradients(whole: nn.Module, sharded: nn.Module, largest: float = LARGEST) -> list[str]:
    """Say which gradients differ. All ranks agree first about which there are: `full_tensor` is a collective."""
    wrong = []
    have: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(have, [parameter.grad is not None for parameter in sharded.parameters()])
    for place, ((name, expected), found) in enumerate(zip(whole.named_parameters(), sharded.parameters(), strict=True)):
        of_ranks = [each[place] for each in have]
        if set(of_ranks) != {expected.grad is not None}:
            wrong.append(f"{name} has a gradient on ranks {of_ranks}, in one process {expected.grad is not None}")
        elif expected.grad is not None:
            assert found.grad is not None
            error = worst(found.grad.full_tensor(), expected.grad)
            if not error <= largest:
                wrong.append(f"the gradient of {name} is wrong by {error}")
    return wrong


def wrong_values(whole: nn.Module, sharded: nn.Module, largest: float = LARGEST) -> list[str]:
    wrong = []
    for (name, expected), found in zip(whole.named_parameters(), sharded.parameters(), strict=True):
        error = worst(found.detach().full_tensor(), expected.detach())
        if not error <= largest:
            wrong.append(f"{name} is wrong by {error}")
    return wrong


def worst(found: torch.Tensor, expected: torch.Tensor) -> float:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if not expected.numel():
        return 0.0
    return float((found - expected).abs().max()) / max(1.0, float(expected.abs().max()))


def what_is_left(model: nn.Module) -> list[str]:
    """Say what a step has left: leases, passes, whole memory."""
    wrong = [repr(unit) for unit in units_in(model) if unit.is_leased]
    wrong += [
        f"{unit.name} has memory" for unit in units_in(model) if unit.memory._storage.size() and not unit.is_leased
    ]
    wrong += [
        f"{unit.name} has gradients" for unit in units_in(model) if unit.memory.holds_gradients or unit.memory.has_sums
    ]
    if ORDER._passes or ORDER._ahead or ORDER._forward.stack:
        wrong.append(f"passes {ORDER._passes}, ahead {list(ORDER._ahead)}, forwards {ORDER._forward.stack}")
    return wrong
