"""What modules have as Python's own: a second run finds it as the forward did, and leaves it as if it had not been."""

from __future__ import annotations

import collections
import gc
import random
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy
from hyper_parallel.core.regions.policy import RegionPolicy
from hyper_parallel.core.regions.python_state import PythonState, as_then
from hyper_parallel.platform.torch.regions.attributes import TORCH
from hyper_parallel.platform.torch.regions.unwatched_region import UnwatchedRegion
from hyper_parallel.platform.torch.wrappers.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

aten = torch.ops.aten


class Moving(nn.Module):
    """Reads and moves an attribute of each kind in every forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)
        self.count, self.word = 0, ""
        self.history: list[float] = []
        self.table: dict[str, Any] = {"step": 0, "inner": {"seen": [1.0]}}
        self.met: set[int] = set()
        self.last = collections.deque([1.0], maxlen=3)
        self.schedule = types.SimpleNamespace(factor=1.0)
        self.python, self.numpy = random.Random(1), np.random.default_rng(1)
        self.old_numpy, self.array = np.random.RandomState(1), np.zeros(3)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.word += "a"
        self.history.append(self.count * 2.0)
        self.table["step"] += 1
        self.table["inner"]["seen"].append(0.5)
        self.met.add(self.count)
        self.last.append(float(self.count))
        self.schedule.factor *= 1.5
        self.array += 1
        x = self.layer(torch.tanh(x * self.schedule.factor)) / self.count**0.5 * sum(self.history) * len(self.word)
        x = x * self.table["step"] * sum(self.table["inner"]["seen"]) * len(self.met) * sum(self.last) * self.array[1]
        x = x * self.python.random() * self.numpy.random() * self.old_numpy.rand()
        x = x.sin() if self.count % 2 else x.cos()
        return torch.sigmoid(x * torch.rand(8, generator=self.generator))

    def state(self) -> list[Any]:
        generators = ("python", "numpy", "old_numpy", "generator")
        attributes = {name: value for name, value in vars(self).items() if name[0] != "_" and name not in generators}
        states = self.python.getstate(), self.numpy.bit_generator.state, repr(self.old_numpy.get_state())
        return [repr(attributes), *states, self.generator.get_state().tolist()]


class _Policy(RegionPolicy):
    is_pure = True

    def __init__(self) -> None:
        self.observer = UnwatchedRegion(is_dynamic=False)

    def answer(self, context: Any, op: Any, args: Any, kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is aten.addmm.default else CheckpointPolicy.MUST_RECOMPUTE


def unwatched(module: nn.Module) -> Callable[..., Any]:
    policy = _Policy()
    return lambda *args: policy.observer.call(module, policy, args, {})


HOW: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "watched": checkpoint_wrapper,
    "to its end": lambda module: checkpoint_wrapper(module, early_stop=False),
    "policy": lambda module: checkpoint_wrapper(module, policy_fn=[aten.addmm.default]),
    "unwatched": unwatched,
    "reentrant": lambda module: checkpoint_wrapper(module, CheckpointImpl.REENTRANT),
}


def trained(module: Any, call: Callable[..., Any], num_steps: int = 5) -> list[torch.Tensor]:
    found = []
    for seed in range(num_steps):
        torch.manual_seed(seed)
        x = torch.randn(4, 8, requires_grad=True)
        loss = call(x * 1).square().sum()
        loss.backward()
        found += [loss.detach(), x.grad]
    return [*found, *(parameter.grad for parameter in module.parameters())]


@pytest.mark.parametrize("how", HOW)
def test_what_a_module_counts_collects_and_draws_is_that_of_one_run_and_so_are_the_numbers(how: str) -> None:
    plain, module = Moving(), Moving()
    expected = trained(plain, plain)
    assert all(map(torch.equal, expected, trained(module, HOW[how](module))))
    assert module.state() == plain.state()
    assert module.count == 5


@pytest.mark.parametrize("how", HOW)
def test_what_is_set_between_forward_and_backward_is_for_the_next_forward(how: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.drop, self.scale = nn.Linear(8, 8), nn.Dropout(0.5), [1.0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(self.drop(self.layer(x).sin()) * self.scale[0])

    torch.manual_seed(0)
    module, found = Scaled(), []
    for call in (module, HOW[how](module)):
        for seed in range(4):
            torch.manual_seed(seed)
            module.train()
            module.scale[:] = [seed + 1.0]
            x = torch.randn(4, 8, requires_grad=True)
            module.zero_grad()
            loss = call(x * 1).sum()
            module.eval()
            module.scale.append(7.0)
            module.scale[0] = -1.0
            loss.backward()
            found += [x.grad, *(parameter.grad for parameter in module.parameters())]
            assert not module.drop.training
            assert module.scale == [-1.0, 7.0]
    assert all(map(torch.equal, found[: len(found) // 2], found[len(found) // 2 :]))


def test_what_a_forward_puts_aside_is_the_forwards_own_and_is_not_kept_when_it_is_replaced() -> None:
    class Aside(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.aside = [x.sin()]
            return x.cos() * x

    module = Aside()
    region = checkpoint_wrapper(module)
    losses, put, memory = [], [], []
    for seed in range(2):
        torch.manual_seed(seed)
        x = torch.randn(4, requires_grad=True)
        losses.append(region(x * 1).sum())
        put.append(weakref.ref(module.aside[0]))
        memory.append(weakref.ref(module.aside[0].untyped_storage()))
    gc.collect()
    assert memory[0]() is None, "the second note leads to what the first forward has put aside"
    for loss in losses:
        loss.backward()
    assert put[1]() is module.aside[0]


def test_an_attribute_that_a_second_run_makes_first_is_gone_after_it_and_one_that_it_deletes_is_back() -> None:
    class Filling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if hasattr(self, "first"):
                del self.first
                self.scale = 2.0
            return (x.sin() * self.scale).cos()

    module = Filling()
    region = checkpoint_wrapper(module)
    for _ in range(3):
        x = torch.randn(4, requires_grad=True)
        region(x * 1).sum().backward()
        assert torch.equal(x.grad, torch.autograd.grad((x.sin() * 2.0).cos().sum(), x)[0])
        assert vars(module).keys() - vars(nn.Module()).keys() == {"scale"}


# -- notes ------------------------------------------------------------------------------------------------------------------


class Plain:
    """An object of a user's class."""

    def __init__(self) -> None:
        self.number, self.inner = 1, [1, [2]]


def test_a_note_that_holds_all_puts_the_same_objects_back() -> None:
    module = nn.Linear(2, 2)
    module.one, module.items, module.tensor = Plain(), {"a": [torch.ones(2)], "b": {1, 2}}, torch.zeros(2)
    module.register_buffer("buffer", torch.ones(2))
    held = module.one, module.items, module.items["a"], module.items["a"][0], module.tensor, module.buffer
    note = PythonState([module], TORCH, holds=True)
    assert note.is_now()
    inner, first = module.one.inner, module.items["b"]
    module.one.number, module.one = 5, Plain()
    inner[1].append(3)
    first.add(9)
    module.items["a"].clear()
    module.items = {}
    module.tensor, module.buffer, module.added = torch.ones(3), torch.zeros(2), 1
    assert not note.is_now()
    note.put_back()
    assert note.is_now()
    now = module.one, module.items, module.items["a"], module.items["a"][0], module.tensor, module.buffer
    assert all(a is b for a, b in zip(held, now, strict=True))
    assert (module.one.number, inner, first) == (1, [1, [2]], {1, 2})
    assert not hasattr(module, "added")


def test_what_a_note_has_put_back_and_nothing_leads_to_any_more_is_afterwards_as_it_was_found() -> None:
    module = nn.Linear(2, 2)
    module.log = log = [1.0]
    then = PythonState([module], TORCH, holds=False)
    module.log = [2.0]
    log.append(3.0)
    with as_then(then):
        assert module.log is log
        assert log == [1.0]
    assert (log, module.log) == ([1.0, 3.0], [2.0])
