"""Stages that are not easy: what goes from one to the next is a dict, a view, the input itself, nothing that needs a gradient.

A program is a list of stages and microbatches for two ranks. `compare` trains it in a pipeline and in a plain loop. Everything here runs in
the workers of `support.processes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.core.parallel.pipeline.running import Microbatch, Pipeline
from hyper_parallel.core.parallel.pipeline.schedule import Schedule
from hyper_parallel.core.parallel.pipeline.stage import PipelineStage
from support.schedule_names import SCHEDULES

WIDTH = 6


class Program(NamedTuple):
    """What is trained.

    Attributes:
        stages: makes the modules, the same on every rank.
        microbatches: of one step.
        weights: what each of them counts.
        ties: of each stage, its tied weights.
    """

    stages: Callable[[], Sequence[nn.Module]]
    microbatches: Callable[[int], Sequence[Microbatch]]
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None
    weights: Sequence[float] | None = None
    ties: Sequence[dict[str, str]] = ({}, {}, {}, {})
    is_dynamic: bool = False


class Stage(nn.Module):
    """A linear layer, and what a function makes of it."""

    def __init__(
        self, function: Callable[..., Any], *, num_in: int = WIDTH, num_out: int = WIDTH, bias: bool = True
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(num_in, num_out, bias=bias)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.linear, *args, **kwargs)


class Plain(nn.Module):
    """A stage without parameters."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def simple(linear: nn.Linear, x: torch.Tensor, **_: Any) -> torch.Tensor:
    return torch.tanh(linear(x))


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def random(step: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def four(*functions: Callable[..., Any]) -> Callable[[], list[nn.Module]]:
    """Stages of these functions, with as many simple ones after them as make four."""
    return lambda: [Stage(function) for function in (*functions, *[simple] * (4 - len(functions)))]


def equal_batch(step: int) -> list[Microbatch]:
    return [Microbatch((random(10 * step + i, 2, WIDTH),), {}, random(99 + i, 2, WIDTH)) for i in range(4)]


def frozen(*numbers: int) -> Callable[[], list[nn.Module]]:
    def make() -> list[nn.Module]:
        stages = four()()
        for number in numbers:
            stages[number].requires_grad_(False)
        return stages

    return make


def tied() -> list[nn.Module]:
    """The first and the last stage have equal weights, which a model would share."""
    stages = four()()
    with torch.no_grad():
        stages[3].linear.weight.copy_(stages[0].linear.weight)
    return stages


def gives_dict(linear: nn.Linear, x: torch.Tensor) -> dict[str, Any]:
    return {
        "hidden": torch.tanh(linear(x)),
        "count": 3,
        "none": None,
        "ids": torch.arange(4),
        "unused": linear(x).exp(),
    }


def takes_dict(linear: nn.Linear, given: dict[str, Any]) -> torch.Tensor:
    return linear(given["hidden"]) * given["count"] + given["ids"].sum()


def gives_two(linear: nn.Linear, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = linear(x)
    return y.unflatten(-1, (2, -1)).transpose(0, 1), y[..., :2]  # views, both not contiguous


def takes_two(linear: nn.Linear, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return linear(first.transpose(0, 1).flatten(1)) + second.sum()


def adds_keyword(linear: nn.Linear, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return linear(x) * scale


def lengths(step: int) -> list[Microbatch]:
    return [
        Microbatch((random(10 * step + i, 1 + i + step, WIDTH),), {}, random(99 + i, 1 + i + step, WIDTH))
        for i in range(4)
    ]


def last_is_smaller(_: int) -> list[Microbatch]:
    return [Microbatch((random(i, n, WIDTH),), {}, random(99 + i, n, WIDTH)) for i, n in enumerate([3, 3, 3, 1])]


def with_keyword(step: int) -> list[Microbatch]:
    return [Microbatch(m.args, {"scale": random(i, 1, WIDTH)}, m.target) for i, m in enumerate(equal_batch(step))]


class TrainedLoss(nn.Module):
    """A loss with a weight of its own, which is no stage's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(random(7, WIDTH))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return mean_square(output * self.scale, target)


def weight_of_the_loss(name: str) -> bool | None:
    """Whether a weight of the loss gets the plain loop's gradient; None where this rank makes no loss."""
    loss_fn, expected = TrainedLoss(), TrainedLoss()
    program = Program(four(), equal_batch, loss_fn)
    pipeline = pipeline_of(program, name)
    pipeline.step_of(equal_batch(0))
    plain(program._replace(loss_fn=expected), 1)
    if loss_fn.scale.grad is None:
        return False if 3 in pipeline.stages else None
    return torch.allclose(loss_fn.scale.grad, expected.scale.grad, rtol=0, atol=1e-12)


def own_loss(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(x).square().mean()


PROGRAMS: dict[str, Program] = {
    "a dict with numbers, integers, nothing and an output that nobody uses": Program(
        four(gives_dict, takes_dict), equal_batch, mean_square
    ),
    "two outputs that are views": Program(four(gives_two, takes_two), equal_batch, mean_square),
    "one output twice": Program(
        four(lambda linear, x: (y := linear(x), y), lambda linear, a, b: linear(a) * b), equal_batch, mean_square
    ),
    "the input itself": Program(four(simple, lambda linear, x: x), equal_batch, mean_square),
    "a stage without parameters": Program(
        lambda: [Stage(simple), Plain(torch.tanh), Plain(lambda x: x[:]), Stage(simple)], equal_batch, mean_square
    ),
    "frozen first stages": Program(frozen(0, 1), equal_batch, mean_square),
    "a frozen stage in the middle": Program(frozen(2), equal_batch, mean_square),
    "a frozen last stage": Program(frozen(3), equal_batch, mean_square),
    "only the last stage is trained": Program(frozen(0, 1, 2), equal_batch, mean_square),
    "a gradient that stops in the middle": Program(four(simple, simple, lambda linear, x: linear(x.detach())), equal_batch, mean_square),
    "a keyword for every stage": Program(four(*[adds_keyword] * 4), with_keyword, mean_square),
    "a last microbatch that is smaller": Program(four(), last_is_smaller, mean_square, weights=(3, 3, 3, 1)),
    "other lengths in each step": Program(four(), lengths, mean_square, weights=(1, 2, 3, 4), is_dynamic=True),
    "a microbatch that counts nothing": Program(four(), equal_batch, mean_square, weights=(1, 0, 2, 0.5)),
    "the last stage makes the loss": Program(four(simple, simple, simple, own_loss), equal_batch),
    "a tied weight": Program(
        tied, equal_batch, mean_square, ties=({"linear.weight": "both"}, {}, {}, {"linear.weight": "both"})
    ),
}  # fmt: skip


def modules_of(program: Program) -> list[nn.Module]:
    torch.manual_seed(3)
    return [module.double() for module in program.stages()]


def plain(program: Program, num_steps: int) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Losses and gradients of a loop over the microbatches, in one process, without a package."""
    modules = modules_of(program)
    losses = []
    for step in range(num_steps):
        microbatches = program.microbatches(step)
        weights = program.weights or [1.0] * len(microbatches)
        total = 0.0
        for microbatch, weight in zip(microbatches, weights, strict=True):
            value: Any = microbatch.args
            for module in modules:
                value = module(*(value if isinstance(value, tuple) else (value,)), **microbatch.kwargs)
            loss = (program.loss_fn(value, microbatch.target) if program.loss_fn else value) * (weight / sum(weights))
            if loss.requires_grad:
                loss.backward()
            total += loss.item()
        losses.append(total)
    gradients = [{name: w.grad for name, w in module.named_parameters() if w.grad is not None} for module in modules]
    shared: dict[str, torch.Tensor] = {}
    for stage, ties in enumerate(program.ties):
        for name, key in ties.items():
            shared[key] = shared.get(key, 0) + gradients[stage][name]
    for stage, ties in enumerate(program.ties):
        gradients[stage].update({name: shared[key] for name, key in ties.items()})
    return losses, gradients


def schedule_of(name: str, num_ranks: int) -> Schedule:
    """A schedule of four stages and four microbatches on this many ranks."""
    return SCHEDULES[name](num_ranks, 4)


def pipeline_of(program: Program, name: str) -> Pipeline:
    platform = hp.get_platform()
    schedule = schedule_of(name, platform.get_world_size())
    modules = modules_of(program)
    stages = [
        PipelineStage(modules[index], index, 4, tied=program.ties[index])
        for index in schedule.placement.stages_on(platform.get_rank())
    ]
    return Pipeline(stages, schedule, loss_fn=program.loss_fn, dynamic_shapes=program.is_dynamic)


def compare(title: str, name: str, num_steps: int = 3) -> list[str]:
    """What differs from the plain loop, in words."""
    program = PROGRAMS[title]
    pipeline = pipeline_of(program, name)
    losses = [pipeline.step_of(program.microbatches(step), weights=program.weights).item() for step in range(num_steps)]
    expected_losses, expected = plain(program, num_steps)
    wrong = [
        f"loss {step}: {found}, expected {loss}"
        for step, (found, loss) in enumerate(zip(losses, expected_losses, strict=True))
        if abs(found - loss) > 1e-12
    ]
    for index, stage in pipeline.stages.items():
        found = {key: w.grad for key, w in stage.module.named_parameters() if w.grad is not None}
        if found.keys() != expected[index].keys():
            wrong.append(f"stage {index} has gradients of {sorted(found)}, expected {sorted(expected[index])}")
        wrong += [
            f"stage {index}, {key}: off by {(gradient - expected[index][key]).abs().max().item()}"
            for key, gradient in found.items()
            if key in expected[index] and not torch.allclose(gradient, expected[index][key], rtol=0, atol=1e-12)
        ]
    return wrong


def one_tensor_in_two_stages_of_each_rank() -> list[float]:
    """By how much gradients are off where both ranks have both stages, whose weight is one tensor."""

    class Shares(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(x))

    def stages() -> list[nn.Module]:
        linear = nn.Linear(WIDTH, WIDTH)
        return [Shares(linear), Shares(linear)]

    program = Program(stages, equal_batch, mean_square, ties=())
    modules = modules_of(program)
    Pipeline(
        [PipelineStage(module, index, 2) for index, module in enumerate(modules)],
        SCHEDULES["dualpipe"](2, 4),
        loss_fn=mean_square,
    ).step_of(equal_batch(0))
    _, (expected, _) = plain(program, 1)
    return [(w.grad - expected[name]).abs().max().item() for name, w in modules[0].named_parameters()]


def thawed(name: str) -> list[str]:
    """What differs from the plain loop where all weights were frozen when the pipeline was made."""
    program = PROGRAMS["a tied weight"]
    pipeline = pipeline_of(program._replace(stages=lambda: [module.requires_grad_(False) for module in tied()]), name)
    for stage in pipeline.stages.values():
        stage.module.requires_grad_(True)
    pipeline.step_of(program.microbatches(0))
    _, expected = plain(program, 1)
    return [
        f"stage {index}, {key}"
        for index, stage in pipeline.stages.items()
        for key, w in stage.module.named_parameters()
        if w.grad is None or not torch.allclose(w.grad, expected[index][key], rtol=0, atol=1e-12)
    ]


def made_without_data() -> float:
    """The loss of stages whose weights had no data when they were made stages."""
    with torch.device("meta"):
        module = Stage(simple).double()
    rank = hp.get_platform().get_rank()
    stage = PipelineStage(module, rank, 2)
    stage.init_parameters()
    return Pipeline(stage, SCHEDULES["one_f_one_b"](2, 4), loss_fn=mean_square).step_of(equal_batch(0)).item()


class Box:
    """A value that is equal to itself alone."""

    number = 1


def same_object_with_other_contents() -> list[int]:
    """What the second stage reads in an object of the first one's, which writes to it before its second step."""
    rank, box, read = hp.get_platform().get_rank(), Box(), []

    def gives(linear: nn.Linear, x: torch.Tensor) -> dict[str, Any]:
        return {"hidden": linear(x), "box": box}

    def takes(linear: nn.Linear, given: dict[str, Any]) -> torch.Tensor:
        read.append(given["box"].number)
        return linear(given["hidden"])

    module = Stage(takes if rank else gives).double()
    pipeline = Pipeline(PipelineStage(module, rank, 2), SCHEDULES["gpipe"](2, 4), loss_fn=mean_square)
    pipeline.step_of(equal_batch(0))
    pipeline.step_of(equal_batch(1))
    box.number = 2
    pipeline.step_of(equal_batch(2))
    return read


# -- what is refused, and what happens to the others ------------------------------------------------------------------


def refused(case: str) -> str:
    """What the error says that this rank raises."""
    program, platform = PROGRAMS["the input itself"], hp.get_platform()
    rank = platform.get_rank()
    modules = modules_of(program)
    schedule = schedule_of("zbv", 2)
    stages = [PipelineStage(modules[index], index, 4) for index in schedule.placement.stages_on(rank)]
    try:
        if case == "other stages":
            Pipeline([PipelineStage(modules[rank], rank, 4)], schedule)
        elif case == "another number of ranks":
            Pipeline(stages, SCHEDULES["gpipe"](3, 4))
        elif case == "no stages":
            Pipeline([modules[0]], schedule)
        elif case == "another schedule on one rank":
            Pipeline(stages, schedule if rank else SCHEDULES["dualpipe_v"](2, 4))
        elif case == "no schedule":
            Pipeline(stages, [])
        elif case == "a schedule that cannot run":
            broken = hp.Schedule.of([["0F0", "1F0", "0B0"], ["2F0", "3F0", "3B0", "2B0"]])
            Pipeline(
                [PipelineStage(modules[2 * rank], 2 * rank, 4), PipelineStage(modules[2 * rank + 1], 2 * rank + 1, 4)],
                broken,
            )
        elif case == "a tied weight that is not there":
            PipelineStage(modules[0], 0, 4, tied={"weight": "w"})
        elif case == "a place outside":
            PipelineStage(modules[0], 4, 4)
        else:
            pipeline = Pipeline(stages, schedule, loss_fn=mean_square)
            x = random(1, 8, WIDTH)
            if case == "a batch that cannot be cut":
                if rank == 0:  # only this one has the batch; the other would wait
                    pipeline.step(x[:7], target=x[:7])
                raise StopIteration
            if case == "another number of microbatches":
                pipeline.step_of([Microbatch((x,), {}, x)])
            elif case == "weights of nothing":
                pipeline.step(x, target=x, weights=[0, 0, 0, 0])
            elif case == "a weight without bound":
                pipeline.step(x, target=x, weights=[1, 0, 0, float("inf")])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def other_lengths_without_saying_so() -> None:
    """In its second step the pipeline is given longer microbatches, and does not say that shapes are dynamic."""
    program = PROGRAMS["other lengths in each step"]._replace(is_dynamic=False)
    pipeline = pipeline_of(program, "zbv")
    pipeline.step_of(program.microbatches(0))
    pipeline.step_of(program.microbatches(1))


def a_step_after_one_that_failed() -> str:
    """One rank's stage fails; what the same rank says of a step after that."""
    pipeline = pipeline_of(PROGRAMS["the input itself"], "zbv")
    microbatches = PROGRAMS["the input itself"].microbatches(0)
    if hp.get_platform().get_rank() == 0:
        pipeline.stages[0].module.register_forward_pre_hook(lambda *_: 1 / 0)
        for _ in range(2):
            try:
                pipeline.step_of(microbatches)
            except ZeroDivisionError:
                continue
            except RuntimeError as error:
                return str(error)
    return ""


def a_loss_of_nothing() -> str:
    """The loss function lets go of the output's graph."""
    schedule = SCHEDULES["one_f_one_b"](1, 4)
    module = modules_of(PROGRAMS["the input itself"])[0]
    pipeline = Pipeline(PipelineStage(module, 0, 1), schedule, loss_fn=lambda output, _: output.detach().mean())
    try:
        pipeline.step_of(equal_batch(0))
    except ValueError as error:
        return str(error)
    return "nothing was raised"


def a_loss_of_another_dtype() -> str:
    """What the rank with the loss says where it is float64 in the first step and float32 in the second."""
    schedule = SCHEDULES["one_f_one_b"](2, 4)
    rank = hp.get_platform().get_rank()
    dtypes = iter([torch.float64] * 4 + [torch.float32] * 4)
    pipeline = Pipeline(
        PipelineStage(modules_of(PROGRAMS["the input itself"])[rank], rank, 2),
        schedule,
        loss_fn=lambda output, target: mean_square(output, target).to(next(dtypes)),
    )
    pipeline.step_of(equal_batch(0))
    try:
        pipeline.step_of(equal_batch(1))
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


def an_output_that_is_written_over() -> str:
    """A stage gives its own buffer, and writes to it for the next microbatch while the first one is on its way."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.zeros(2, WIDTH, dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.last.copy_(x)
            return self.last

    rank = hp.get_platform().get_rank()
    schedule = SCHEDULES["gpipe"](2, 4)
    module = modules_of(PROGRAMS["the input itself"])[0] if rank else Writes()
    pipeline = Pipeline(PipelineStage(module, rank, 2), schedule, loss_fn=mean_square)
    try:
        pipeline.step_of(equal_batch(0))
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"


class Experts(nn.Module):
    """A layer of experts: what is sent away and fetched back is a sum here, and takes its time."""

    def __init__(self, coordinator: hp.HookCoordinator, calls: list[str]) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.coordinator, self.calls = coordinator, calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def hook(y: torch.Tensor, name: str) -> torch.Tensor:
            return hp.get_platform().differentiable_sync_hook(y, name, self.coordinator)

        y = hook(torch.tanh(self.router(x)), "A")
        self.calls.append("dispatch")
        y = hook(y * 1.0, "B")
        y = hook(torch.tanh(self.experts(y)), "C")
        self.calls.append("combine")
        return hook(y * 1.0, "D") + x


def experts_in_pairs() -> tuple[list[str], int]:
    """What differs from the plain loop where pairs of a schedule run at the same time, and how many pairs there were."""
    coordinator, calls = hp.HookCoordinator(timeout=30.0), []

    def stages() -> list[nn.Module]:
        return [Experts(coordinator, calls) for _ in range(4)]

    program = Program(stages, equal_batch, mean_square)
    schedule = SCHEDULES["dualpipe_v"](2, 4)
    modules = modules_of(program)
    rank = hp.get_platform().get_rank()
    numbers = schedule.placement.stages_on(rank)
    pipeline = Pipeline(
        [PipelineStage(modules[index], index, 4) for index in numbers],
        schedule,
        loss_fn=mean_square,
        coordinator=coordinator,
    )
    num_pairs = sum(bool(action.parts) for action in schedule.ranks[rank])
    found = [pipeline.step_of(program.microbatches(step)).item() for step in range(2)]
    expected_losses, expected = plain(program, 2)
    wrong = [f"loss {a}, expected {b}" for a, b in zip(found, expected_losses, strict=True) if abs(a - b) > 1e-12]
    for index in numbers:
        wrong += [
            f"stage {index}, {name}"
            for name, weight in modules[index].named_parameters()
            if not torch.allclose(weight.grad, expected[index][name], rtol=0, atol=1e-12)
        ]
    return wrong, num_pairs
