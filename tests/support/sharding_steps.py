"""Steps of several microbatches on a sharded model: weights, errors between them, microbatches without a backward."""

from __future__ import annotations

import torch
from torch import nn

from support.sharding import WIDTH, Program, Run
from support.sharding_programs import Stack, blocks_and_all, children_and_all, four_parts


def plain(run: Run, model: nn.Module) -> None:
    for number in range(3):
        with run.microbatch(model, last=number == 2):
            run.backward(model(run.data(2 + number, 4, of=number)).square().mean())


def weighted(run: Run, model: nn.Module) -> None:
    """As a mean over valid tokens: other numbers on each rank and microbatch, and no number at all where there are none."""
    for number in range(4):
        weight = float((3 * run.rank + 2 * number) % 4)
        with run.microbatch(model, last=number == 3, weight=weight):
            loss = model(run.data(3, 4, of=number)).square().mean()
            run.backward(loss if weight else loss * float("nan"))


class Extra(nn.Linear):
    """Has a parameter that it uses when asked."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.more = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor, is_more: bool = False) -> torch.Tensor:
        return super().forward(x) + (self.more if is_more else 0)


def extra_parts() -> nn.Module:
    return nn.ModuleList([Extra(), nn.Linear(WIDTH, WIDTH)])


def one_rank_without_weight(run: Run, model: nn.ModuleList) -> None:
    """A parameter that one rank alone uses, in a microbatch without weight."""
    for number in range(2):
        weight = 2.0 if number or run.rank else 0.0
        with run.microbatch(model, last=number == 1, weight=weight):
            run.backward(model[1](model[0](run.data(3, WIDTH, of=number), not weight)).square().mean())


def error_between(run: Run, model: nn.Module) -> None:
    """The second microbatch fails, in forward or in backward; the step begins again."""
    if run.is_sharded:
        try:
            for number in range(3):
                with run.microbatch(model, last=number == 2):
                    loss = model(run.data(2, 4, of=number)).square().mean()
                    if number == 1:
                        if run.number % 2:
                            loss.register_hook(_fail)
                            loss.backward()
                        _fail()
                    loss.backward()
        except RuntimeError:
            pass
    plain(run, model)


def _fail(*_: object) -> None:
    raise RuntimeError("on purpose")


def last_without_backward(run: Run, model: nn.Module) -> None:
    for number in range(3):
        with run.microbatch(model, last=number == 2):
            loss = model(run.data(2, 4, of=number)).square().mean()
            if number < 2 or run.number:  # a forward that is alive when the step ends keeps zero=2 whole for longer
                run.backward(loss)


def last_without_anything(run: Run, model: nn.Module) -> None:
    for number in range(2):
        with run.microbatch(model, last=False):
            run.backward(model(run.data(2, 4, of=number)).square().mean())
    with run.microbatch(model, last=True):
        pass


def two_in_one(run: Run, model: nn.Module) -> None:
    """Forwards of two microbatches, then both backwards: as a pipeline does."""
    for last in (False, True):
        with run.microbatch(model, last=last):
            losses = [model(run.data(2, 4, of=2 * last + of)).square().mean() for of in range(2)]
            for loss in losses:
                run.backward(loss)


def not_in_a_step_before(run: Run, model: nn.Module) -> None:
    """A backward outside, then a step: gradients add up as in one process."""
    run.backward(model(run.data(2, 4, of=7)).square().mean())
    plain(run, model)


def other_forward_between(run: Run, model: nn.Module) -> None:
    for number in range(2):
        with run.microbatch(model, last=number == 1):
            run.backward(model(run.data(2, 4, of=number)).square().mean())
        with torch.no_grad():
            run.losses.append(model(run.data(2, 4, of=5)).mean().item())


def one_part_a_microbatch(run: Run, model: nn.Module) -> None:
    for number in range(4):
        with run.microbatch(model, last=number == 3):
            run.backward(model(run.data(3, WIDTH, of=number), [number]).square().mean())


PROGRAMS = {
    "microbatches": Program(Stack, blocks_and_all, plain),
    "weights": Program(Stack, blocks_and_all, weighted, is_weighted=True),
    "used by one rank where nothing counts": Program(
        extra_parts, lambda model: list(model), one_rank_without_weight, is_weighted=True
    ),
    "an error between microbatches": Program(Stack, blocks_and_all, error_between),
    "the last without a backward": Program(Stack, blocks_and_all, last_without_backward),
    "the last without anything": Program(Stack, blocks_and_all, last_without_anything),
    "two forwards in each": Program(Stack, blocks_and_all, two_in_one),
    "a backward before the step": Program(Stack, blocks_and_all, not_in_a_step_before),
    "an evaluation between": Program(Stack, blocks_and_all, other_forward_between),
    "another part in each": Program(four_parts, children_and_all, one_part_a_microbatch),
}
