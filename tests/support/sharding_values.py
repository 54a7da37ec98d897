"""Sharded units with values that are not easy: nested, hidden and missing outputs, odd shapes, several dtypes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from support.sharding import WIDTH, Of, Program, Run
from support.sharding_programs import (
    Stack,
    blocks_and_all,
    children,
    children_and_all,
    embedding_model,
    of_width,
    tokens,
)


def loss_itself(run: Run, model: nn.Module) -> None:
    run.backward(model(run.data(3, WIDTH)))


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


# -- inputs and outputs ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Answer:
    hidden: torch.Tensor
    rest: dict[str, Any]
    nothing: None = None


def gives_answer(self: Any, x: torch.Tensor) -> Answer:
    hidden = torch.tanh(self.linear(x))
    return Answer(hidden, {"more": [hidden * 2, (x, 3)], "ids": torch.arange(3), "unused": self.linear(x).exp()})


def takes_answer(self: Any, given: Answer, *, scale: float) -> dict[str, Any]:
    return {"loss": (self.linear(given.hidden) + given.rest["more"][0]).square().mean() * scale, "none": None}


def answering() -> nn.Module:
    return Of(
        lambda self, x: self.second(self.first(x), scale=2.0)["loss"],
        first=Of(gives_answer, linear=nn.Linear(WIDTH, WIDTH)),
        second=Of(takes_answer, linear=nn.Linear(WIDTH, WIDTH)),
    )


class Hidden:
    """An object that nobody looks into."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def hiding() -> nn.Module:
    return Of(
        lambda self, x: self.second(self.first(x)).tensor.square().mean(),
        first=Of(lambda self, x: Hidden(torch.tanh(self.linear(x))), linear=nn.Linear(WIDTH, WIDTH)),
        second=Of(lambda self, given: Hidden(self.linear(given.tensor)), linear=nn.Linear(WIDTH, WIDTH)),
    )


def to_a_list() -> nn.Module:
    """A unit whose output is None: it leaves its result in a list of the caller's."""

    def outer(self: Any, x: torch.Tensor) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        assert self.first(x, kept) is None
        return self.second(kept[0])

    return Of(
        outer,
        first=Of(lambda self, x, kept: kept.append(torch.tanh(self.linear(x))), linear=nn.Linear(WIDTH, WIDTH)),
        second=nn.Linear(WIDTH, WIDTH),
    )


def passes_through() -> nn.Module:
    """A unit that gives its input back among its outputs, and a view of it."""
    return Of(
        lambda self, x: self.second(self.first(self.zero(x))),
        zero=nn.Linear(WIDTH, WIDTH),
        first=Of(lambda self, x: (x, x[:1], self.linear(x)), linear=nn.Linear(WIDTH, WIDTH)),
        second=Of(lambda self, xs: self.linear(xs[0]) + xs[1] * xs[2], linear=nn.Linear(WIDTH, WIDTH)),
    )


def in_place_on_output() -> nn.Module:
    return Of(
        lambda self, x: self.second(self.first(x).mul_(2).add_(1)),
        first=nn.Linear(WIDTH, WIDTH),
        second=nn.Linear(WIDTH, WIDTH),
    )


def input_with_gradient(run: Run, model: nn.Module) -> None:
    x = run.data(3, 4).requires_grad_()
    run.backward(model(x).square().mean())
    assert x.grad is not None
    run.losses.append(float(x.grad.sum()))


# -- shapes, dtypes ----------------------------------------------------------------------------------------------------


def odd_shapes() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scalar + self.one
        x = x @ self.column.T @ self.row.repeat(1, 1)
        return (x[:, :5] * self.uneven).sum(-1) + self.cube.sum() * self.empty.sum() + self.cube.mean()

    return Of(
        forward,
        scalar=parameter(),
        one=parameter(1),
        column=parameter(1, WIDTH),
        row=parameter(1, 7),
        uneven=parameter(3, 5),
        cube=parameter(1, 3, 6),
        empty=parameter(0, 3),
    )


def not_contiguous() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x @ self.turned * self.wide

    return Of(
        forward,
        turned=nn.Parameter(torch.randn(7, WIDTH).T),
        wide=nn.Parameter(torch.randn(1, 14)[:, ::2]),
    )


def mixed_dtypes() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.single(x.float()).double() + self.double_(x)
        return torch.view_as_real(y * self.turn).sum(-1) * self.count.double().sum()

    return Of(
        forward,
        single=nn.Linear(WIDTH, 3).float(),
        double_=nn.Linear(WIDTH, 3),
        turn=nn.Parameter(torch.randn(3, dtype=torch.complex128)),
        count=nn.Parameter(torch.arange(3), requires_grad=False),
    )


PROGRAMS: dict[str, Program] = {
    "nested outputs": Program(answering, children_and_all, loss_itself),
    "outputs in an object": Program(hiding, children_and_all, loss_itself),
    "outputs in an object, units alone": Program(hiding, children, loss_itself),
    "None as an output": Program(to_a_list, children_and_all, of_width),
    "inputs among the outputs": Program(passes_through, children_and_all, of_width),
    "an output that is written to": Program(in_place_on_output, children_and_all, of_width),
    "an input without a gradient": Program(embedding_model, children_and_all, tokens),
    "an input with a gradient": Program(Stack, blocks_and_all, input_with_gradient),
    "odd shapes": Program(odd_shapes, lambda model: [model], of_width),
    "parameters that are not contiguous": Program(not_contiguous, lambda model: [model], of_width),
    "mixed dtypes": Program(mixed_dtypes, lambda model: [model], of_width, largest=1e-4),  # float32 in it
}
