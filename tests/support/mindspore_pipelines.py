"""What `pipelines` is for PyTorch, on MindSpore: stages of a small model, trained by a pipeline and by a plain loop.

Everything here runs in the workers of `support.processes`.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

import hyper_parallel as hp
from hyper_parallel.core.parallel.pipeline.running import Pipeline
from hyper_parallel.core.parallel.pipeline.stage import PipelineStage
from support.schedule_names import SCHEDULES

WIDTH = 8
NUM_WORDS = 16
BATCH_PER_MICROBATCH = 3


class Block(nn.Cell):
    """A residual, a weight that is used twice, a bias that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Dense(WIDTH, 2 * WIDTH)
        self.down = nn.Dense(2 * WIDTH, WIDTH)
        self.twice = nn.Dense(WIDTH, WIDTH, has_bias=False)
        self.up.bias.requires_grad = False

    def construct(self, x: Tensor) -> Tensor:
        x = x + self.down(ops.tanh(self.up(x)))
        return ops.tanh(self.twice(ops.tanh(self.twice(x)))) + x


class First(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_WORDS, WIDTH)
        self.block = Block()

    def construct(self, words: Tensor) -> Tensor:
        return self.block(self.embedding(words))


class Last(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Dense(WIDTH, NUM_WORDS)

    def construct(self, x: Tensor) -> Tensor:
        return self.head(self.block(x))


def stages_of(num: int) -> list[nn.Cell]:
    """The cells of all stages, the same on every rank."""
    cells = [First(), *(Block() for _ in range(num - 2)), Last()]
    random = np.random.RandomState(7)
    for number, cell in enumerate(cells):
        for weight in cell.get_parameters():
            weight.name = f"stage{number}.{weight.name}"  # MindSpore wants names of all parameters to differ
            weight.set_data(Tensor(random.standard_normal(weight.shape).astype(np.float32) / 3))
    return cells


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return ops.cross_entropy(logits, target)


def batch(num_microbatches: int, step: int) -> tuple[Tensor, Tensor]:
    words = (
        np.random.RandomState(step).randint(0, NUM_WORDS, (2, num_microbatches * BATCH_PER_MICROBATCH)).astype(np.int32)
    )
    return Tensor(words[0]), Tensor(words[1])


def plain(num_stages: int, num_microbatches: int, num_steps: int) -> tuple[list[float], list[dict[str, np.ndarray]]]:
    """Losses and summed gradients of one process that goes through the microbatches in a loop."""
    cells = stages_of(num_stages)
    weights = [weight for cell in cells for weight in cell.trainable_params()]
    sums: list[np.ndarray] = [np.zeros(weight.shape, np.float32) for weight in weights]
    losses = []

    def forward(words: Tensor, target: Tensor) -> Tensor:
        x = words
        for cell in cells:
            x = cell(x)
        return loss_fn(x, target) / num_microbatches

    step_of = ms.value_and_grad(forward, None, ms.ParameterTuple(weights))
    for step in range(num_steps):
        total = np.float32(0)
        for words, target in zip(
            *(ops.chunk(part, num_microbatches) for part in batch(num_microbatches, step)), strict=True
        ):
            loss, gradients = step_of(words, target)
            total += loss.asnumpy()
            sums = [before + gradient.asnumpy() for before, gradient in zip(sums, gradients, strict=True)]
        losses.append(float(total))
    found = iter(sums)
    return losses, [{weight.name: next(found) for weight in cell.trainable_params()} for cell in cells]


def train(name: str, num_ranks: int, num_microbatches: int, num_steps: int = 2) -> tuple[float, list[str]]:
    """The largest difference of losses and gradients from those of one process, and what is wrong otherwise, on this rank."""
    schedule = SCHEDULES[name](num_ranks, num_microbatches)
    cells = stages_of(schedule.num_stages)
    rank = hp.get_platform().get_rank()
    stages = [PipelineStage(cells[i], i, schedule.num_stages) for i in schedule.placement.stages_on(rank)]
    pipeline = Pipeline(stages, schedule, loss_fn=loss_fn)
    expected_losses, expected = plain(schedule.num_stages, num_microbatches, num_steps)
    error, wrong = 0.0, []
    for step in range(num_steps):
        words, target = batch(num_microbatches, step)
        loss = float(pipeline.step(words, target=target).asnumpy())
        error = max(error, abs(loss - expected_losses[step]))
    for stage in stages:
        for weight in stage.module.get_parameters():
            truth = expected[stage.index].get(weight.name)
            if (weight._grad is None) != (truth is None):
                wrong.append(f"stage {stage.index}: {weight.name}")
            elif truth is not None:
                error = max(error, float(np.abs(weight._grad.asnumpy() - truth).max()))
    return error, wrong


class TrainedLoss(nn.Cell):
    """A loss with a weight of its own, which is no stage's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = ms.Parameter(Tensor(np.linspace(0.5, 2, NUM_WORDS).astype(np.float32)), name="scale")

    def construct(self, logits: Tensor, target: Tensor) -> Tensor:
        return loss_fn(logits * self.scale, target)


def weight_of_the_loss() -> float:
    """The largest difference of the gradient of a loss's weight from the plain loop's."""
    cells, cell = stages_of(2), TrainedLoss()
    schedule = hp.Schedule.of([["0F0", "1F0", "0F1", "1F1", "1B0", "0B0", "1B1", "0B1"]])
    pipeline = Pipeline([PipelineStage(each, i, 2) for i, each in enumerate(cells)], schedule, loss_fn=cell)
    words, target = batch(2, 0)
    pipeline.step(words, target=target)
    gradient_of = ms.grad(lambda x, y: cell(cells[1](cells[0](x)), y) / 2, None, ms.ParameterTuple([cell.scale]))
    parts = zip(*(ops.chunk(part, 2) for part in (words, target)), strict=True)
    expected = sum(gradient_of(*part)[0].asnumpy() for part in parts)
    return float(np.abs(cell.scale._grad.asnumpy() - expected).max())


def cut_by_cost() -> tuple[list[float], list[float], bool]:
    """Costs of stages, counted and measured, and whether measuring left no gradient."""
    model = nn.SequentialCell(*(nn.Dense(4, 4) for _ in range(2)), nn.Dense(4, 64))
    counted = hp.split_stages(model, 2, by="cost").costs
    measured = hp.split_stages(model, 2, by="cost", batch=Tensor(np.ones((2, 4), np.float32))).costs
    return counted, measured, all(weight._grad is None for weight in model.get_parameters())
