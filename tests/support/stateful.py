"""Random modules with state of Python's own, tensors from outside, inner gradients and experts, trained for some steps.

Each part stands for one thing that a second run can get wrong. A module has some of them, one after the other, and what
they are is drawn from its seed. Whatever a part reads is the same in a second run, or can be put back: so all of these
must be as in the plain run, bit for bit.
"""

from __future__ import annotations

import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

WIDTH = 4
NUM_STEPS = 4
Part = Callable[["Stateful", torch.Tensor, int], torch.Tensor]
PARTS: dict[str, Part] = {}
_TABLE = [torch.linspace(0.5, 1.5, WIDTH) * (number + 1) for number in range(3)]


def part(function: Part) -> Part:
    PARTS[function.__name__] = function
    return function


@part
def counter_of_forwards(m: Stateful, h: torch.Tensor, k: int) -> torch.Tensor:
    m.count += 1
    return h / m.count**0.5


@part
def branch_on_a_counter(m: Stateful, h: torch.Tensor, k: int) -> torch.Tensor:
    m.table["step"] += 1
    return (torch.sin, torch.cos, torch.tanh)[m.table["step"] % 3](h)


@part
def annealing(m: Stateful, h: torch.Tensor, k: int) -> torch.Tensor:
    m.schedule.step += 1
    return torch.sigmoid(h * max(1, m.schedule.step - 2)) * h


@part
def own_numpy_generator(m: Stateful, h: torch.Tensor, k: int) -> torch.Tensor:
    return h * float(m.numpy.random()) + torch.from_numpy(m.numpy.random(WIDTH, dtype=np.float32)).to(h.device)


@part
def own_python_generator(m: Stateful, h: torch.Tensor, k: int) -> torch.Tensor:
    return h.roll(m.python.randrange(3), -1) * h


@part
def layers_dropped_at_random(m: Stateful, h: torch.Tensor, k: int) -> torch.Tensor:
    for layer in m.experts:
        if random.random() < 0.5:
            h = h + layer(h).tanh()
    return h


@part
def history(m: Stateful, h: torch.Tensor, k: int) -> torch.Tensor:
    m.history.append(len(m.history) * 0.5)
    return h * (1 + sum(m.history))


@part
def tensor_from_outside(m: Stateful, h: torch.Tensor, k: int) -> torch.Tensor:
    return h * _TABLE[k % 3].to(h.device)


@part
def tensor_made_in_each_run(m: Stateful, h: torch.Tensor, k: int) -> torch.Tensor:
    return h + torch.tensor([0.5, 1.0, k, 2.0], device=h.device)


@part
def tensor_that_was_counted_to(m: Stateful, h: torch.Tensor, k: int) -> torch.Tensor:
    m.count += 1
    return h * _TABLE[m.count % 3].to(h.device)


@part
def inner_gradient(m: Stateful, h: torch.Tensor, k: int) -> torch.Tensor:
    with torch.enable_grad():
        inner = h.detach().requires_grad_()
        (found,) = torch.autograd.grad((inner.sin() * (k + 1)).sum(), inner)
    return h * found


@part
def experts(m: Stateful, h: torch.Tensor, k: int) -> torch.Tensor:
    p = m.router(h).softmax(-1)
    chosen = p.argmax(-1)
    y = torch.zeros_like(h)
    for number, expert in enumerate(m.experts):
        rows = (chosen == number).nonzero().flatten()
        y[rows] += expert(h[rows]) * p[rows, number, None]
    return y + h


@part
def experts_that_have_rows(m: Stateful, h: torch.Tensor, k: int) -> torch.Tensor:
    weights, chosen = m.router(h).softmax(-1).max(-1)
    y = torch.zeros_like(h)
    for number, expert in enumerate(m.experts):
        rows = torch.where(chosen == number)[0]
        if len(rows):
            y = y.index_add(0, rows, expert(h[rows]).sin() * weights[rows, None])
    return y + h


@part
def number_of_a_tensor(m: Stateful, h: torch.Tensor, k: int) -> torch.Tensor:
    return h / (1 + h.detach().abs().max().item())


@part
def buffer_that_is_replaced(m: Stateful, h: torch.Tensor, k: int) -> torch.Tensor:
    out = h * (1 + m.mean)
    m.mean = m.mean * 0.5 + h.detach().mean(0) * 0.5
    return out


@part
def buffer_that_is_written(m: Stateful, h: torch.Tensor, k: int) -> torch.Tensor:
    with torch.no_grad():
        m.written.lerp_(h.mean(0), 0.5)
    return h * (1 + m.written.clone())


@part
def dropout(m: Stateful, h: torch.Tensor, k: int) -> torch.Tensor:
    return F.dropout(h, 0.25)


@part
def in_place(m: Stateful, h: torch.Tensor, k: int) -> torch.Tensor:
    return (h * 2).mul_(0.5 + k).tanh_()


@part
def layer(m: Stateful, h: torch.Tensor, k: int) -> torch.Tensor:
    return m.experts[k % 3](h).sin()


class Stateful(nn.Module):
    """Parts of its seed, between two layers."""

    def __init__(self, seed: int, parts: tuple[str, ...] = (), *, freezes: bool | None = None) -> None:
        super().__init__()
        choose = random.Random(seed)
        torch.manual_seed(seed)
        drawn = [(choose.choice(list(PARTS)), choose.randrange(4)) for _ in range(choose.randint(1, 4))]
        self.parts = [(name, 1) for name in parts] or drawn
        self.up, self.down, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("written", torch.zeros(WIDTH))
        self.count, self.history, self.table = 0, [1.0], {"step": 0}
        self.schedule = types.SimpleNamespace(step=0)
        self.numpy, self.python = np.random.default_rng(seed), random.Random(seed)
        self.freezes = choose.random() < 0.25 if freezes is None else freezes  # a parameter in turn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x).sin()
        for name, k in self.parts:
            h = PARTS[name](self, h, k)
        return x + self.down(h.tanh())


def trained(module: Stateful, call: Callable[..., Any], seed: int, device: str) -> list[Any]:
    """What steps leave: losses, parameters and buffers, Python's state and the generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    found: list[Any] = []
    for step in range(NUM_STEPS):
        if module.freezes:
            module.up.weight.requires_grad_(step % 2 == 0)
        optimizer.zero_grad()
        loss = call(torch.randn(4, WIDTH).to(device).requires_grad_()).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    found += [tensor.tolist() for tensor in module.state_dict().values()]
    found += [module.count, module.history, module.table, module.schedule.step, module.numpy.random()]
    return [*found, module.python.random(), random.random(), torch.rand(1).item()]
