"""Bugs planted in PyTorch's glue: each is found by the programs that run in every test run."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hyper_parallel.core.swap import engines
from hyper_parallel.platform.torch.regions.saved_tensors import AsyncSaveOnCpu
from support.planted_bugs import GLUE
from support.planting import Bug, beside
from support.random_tensors import TensorProgram
from support.swapping import Swapping, gradients


def check(hook_class: Any, swapping: Swapping) -> None:
    """A short campaign: random programs, a layer under autocast, a policy, an in-place change, reference counting."""
    numbers = itertools.count()

    def hooks(*args: Any, **options: Any) -> Any:
        # A name of its own each time: what a block of the same name saved last would stay on the device (rule 10).
        return hook_class(*args, **{"name": f"block {next(numbers)}", **options})

    for seed in range(25):
        program = TensorProgram(seed)
        x = program.input("cpu")
        plain = gradients(program.loss, x)
        leaf = x.clone().requires_grad_()
        with hooks(name=f"program {seed}"):
            loss = program.loss(leaf)
        loss.backward()
        assert torch.equal(leaf.grad, plain[0])
        program.kept.clear()
    check_parameters(hooks, swapping)
    check_versions(hooks)
    check_references(hooks)
    check_policy(hooks, swapping)


def moved_by(swapping: Swapping, run: Any) -> int:
    before = swapping.offloaded_bytes
    run()
    return swapping.offloaded_bytes - before


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32, bias=False)
        self.register_buffer("scale", torch.rand(4, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


def check_parameters(hooks: Any, swapping: Swapping) -> None:
    module = Scaled()

    def x() -> torch.Tensor:
        # A new one each time: a disk thread may still hold the slot of the last run, and what has a slot moves nothing.
        return torch.randn(4, 32, requires_grad=True)

    def plain() -> None:
        with hooks(module=module):
            loss = module(x()).sum()
        loss.backward()

    def cast() -> None:
        with hooks(module=module), torch.autocast("cpu", torch.float16):
            loss = module(x()).float().sum()
        loss.backward()

    def no_module() -> None:
        with hooks():
            loss = nn.functional.linear(x(), module.linear.weight).sum()
        loss.backward()

    assert moved_by(swapping, plain) == 4 * 32 * 4, "the input alone"
    assert moved_by(swapping, no_module) == 4 * 32 * 4, "the input alone"
    assert moved_by(swapping, cast) <= 2 * 4 * 32 * 4, "the inputs in both dtypes at most"
    views = torch.randn(16, 16, requires_grad=True)

    def aliases() -> None:
        with hooks():
            y = views * 2
            loss = (y[::2] * y[1::2]).sum() + y.t().sin().sum()
        loss.backward()

    assert moved_by(swapping, aliases) == 16 * 16 * 4


def check_versions(hooks: Any) -> None:
    for policy in (None, lambda tensor: True):
        x = torch.randn(16, 16, requires_grad=True)
        with hooks(policy):
            y = x.exp()
            y.mul_(2)
        with pytest.raises(RuntimeError, match="changed in place"):
            y.sum().backward()
    # One storage saved in two versions: what was saved first is saved before the change, by a copy of the user's own.
    x = torch.randn(16, 16, requires_grad=True)
    with hooks():
        y = x * 1.0
        first = y.clone().sin()
        y = y.mul_(2)
        second = y.sin()
        y.detach()
    (first.sum() + second.sum()).backward()
    expected = x.detach().cos() + (x.detach() * 2).cos() * 2
    assert torch.equal(x.grad, expected)
    x = torch.randn(16, 16)
    leaf = x.clone().requires_grad_()
    with hooks():
        buffer = torch.zeros(16, 16)
        a = leaf * buffer
        between = leaf.sin()  # saves something: so what was saved before leaves
        with torch.no_grad():
            buffer += 1
        b = leaf * buffer
    b.sum().backward()
    assert torch.equal(leaf.grad, torch.ones(16, 16))
    del a, b, between


def check_references(hooks: Any) -> None:
    gc.collect()
    gc.disable()
    try:
        counts = []
        for _ in range(4):
            for policy in (None, lambda tensor: True):
                x = torch.randn(16, 16, requires_grad=True)
                with hooks(policy):
                    loss = x.exp().tanh().sum()
                loss.backward()
                with hooks(policy):
                    dropped = x.exp().tanh().sum()  # a forward without a backward
                del x, loss, dropped
            for managed in engines.all_engines().values():
                managed.engine.join()  # a copy under way holds its tensor
            counts.append(
                sum(
                    issubclass(type(obj), (torch.Tensor, torch.autograd.graph.saved_tensors_hooks))
                    for obj in gc.get_objects()
                )
            )
        assert counts[0] == counts[-1]
    finally:
        gc.enable()


def check_policy(hooks: Any, swapping: Swapping) -> None:
    def run(keep: bool) -> None:
        x = torch.randn(16, 16, requires_grad=True)
        with hooks(lambda tensor: keep):
            loss = x.exp().sum()
        loss.backward()

    assert moved_by(swapping, lambda: run(True)) == 0
    assert moved_by(swapping, lambda: run(False)) == 16 * 16 * 4


def test_the_glue_as_it_is_passes(tmp_path: Path) -> None:
    swapping = Swapping("cpu", tmp_path)
    with swapping.configured():
        check(AsyncSaveOnCpu, swapping)


@pytest.mark.parametrize("bug", GLUE, ids=lambda bug: bug.name)
def test_the_programs_find(bug: Bug, tmp_path: Path) -> None:
    module = beside(bug, AsyncSaveOnCpu)
    swapping = Swapping("cpu", tmp_path)
    found = None
    with swapping.configured():
        try:
            check(module.AsyncSaveOnCpu, swapping)
        except BaseException as error:
            found = f"{type(error).__name__}: {error}"
        gc.collect()
        torch.ones((), requires_grad=True).mul(2).backward()
    assert found is not None, "nothing found: the programs are blind here, or the statement does nothing"
