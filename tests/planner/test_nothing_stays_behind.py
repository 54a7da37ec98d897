"""Planning leaves nothing behind: a model that moves all that a forward can move trains afterwards as one that was never planned."""

from __future__ import annotations

import array
import collections
import random
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from torch import nn  # noqa: E402

import hyper_parallel as hp  # noqa: E402
from hyper_parallel._base.errors import StateError  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_disk")
WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.Dropout(0.2)
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return x + self.dropout(self.down(nn.functional.gelu(self.up(x)))) / self.calls


class Mean:
    """As a library's metrics do: a tensor that is added to, in an object in an object."""

    def __init__(self) -> None:
        self.sum, self.count, self.parts = torch.zeros(()), 0, []


class Log:
    def __init__(self) -> None:
        self.mean = Mean()


class Restless(nn.Module):
    """Its forward moves whatever can be moved."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, WIDTH, max_norm=1.0)
        self.blocks = nn.Sequential(*(Block() for _ in range(3)))
        self.clipped, self.decayed, self.frozen = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("replaced", torch.ones(()))
        self.last: Any = None
        self.history = torch.zeros(3)
        self.list: list[Any] = []
        self.dict: dict[str, int] = collections.Counter()
        self.set: set[int] = set()
        self.recent: Any = collections.deque(maxlen=2)
        self.log = Log()
        self.bias = np.zeros(WIDTH, dtype=np.float32)
        self.tallies = array.array("d", [0.0])
        self.generators = [random.Random(0), np.random.default_rng(0), torch.Generator().manual_seed(0)]

    def forward(self, ids: Any) -> Any:
        number = len(self.list)
        with torch.no_grad():
            self.clipped.weight.clamp_(-0.2, 0.2)
        self.decayed.weight.data.mul_(0.9)
        self.frozen.requires_grad_(number % 2 == 1)
        self.replaced = self.replaced * 1.5
        self.list.append(number)
        self.dict["steps"] += 1
        self.set.add(number)
        self.recent.append(number)
        self.bias += 0.1
        self.tallies.append(1.0)
        draws = random.random() + np.random.random() + self.generators[0].random() + self.generators[1].random()
        noise = torch.rand(WIDTH, generator=self.generators[2])
        x = self.norm(self.blocks(self.words(ids)))
        x = self.frozen(self.decayed(self.clipped(x))) * self.replaced + draws * noise + torch.from_numpy(self.bias)
        mean = self.log.mean
        mean.sum += x.detach().mean()
        mean.count += 1
        mean.parts.append(x.detach().mean())
        self.history.add_(mean.sum / mean.count)
        self.last = x * 2  # with its history
        return x / (1 + self.dict["steps"] + len(self.recent) + len(self.tallies)) ** 0.5 + self.history.mean()


def make() -> Any:
    for each in (random.seed, np.random.seed, torch.manual_seed):
        each(0)
    model = Restless()
    with torch.no_grad():
        model.words.weight.mul_(3)
    return model


def batch(size: int = 512) -> Any:
    return torch.arange(size) % 16


class Loss:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Any) -> Any:
        self.calls += 1
        return output.square().mean() * self.calls


def trained(model: Any, loss_fn: Any, run: Callable[[Any], Any] = lambda step: step()) -> list[Any]:
    """Losses, and all that the model has at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[Any] = []

    def step() -> None:
        loss = loss_fn(model(batch()))
        losses.append(loss.item())
        loss.backward()

    for _ in range(3):
        run(step)
        optimizer.step()
        optimizer.zero_grad()
    return [losses, state_of(model)]


def state_of(model: Any) -> Any:
    mean = model.log.mean
    return {
        **{name: tensor.tolist() for name, tensor in model.state_dict().items()},
        "history": model.history.tolist(),
        "log": (mean.sum.item(), mean.count, [each.item() for each in mean.parts]),
        "python": [model.list, dict(model.dict), model.set, list(model.recent), model.bias.tolist()],
        "calls": [block.calls for block in model.blocks],
        "frozen": [each.requires_grad for each in model.parameters()],
        "draws": [random.random(), np.random.random(), torch.rand(1).item(), model.generators[0].random(),
                  model.generators[1].random(), torch.rand(1, generator=model.generators[2]).item()],
    }  # fmt: skip


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "plan_memory": lambda model, loss: hp.plan_memory(model, batch(), loss_fn=loss, budget="90%", progress=False),
    "explain": lambda model, loss: hp.explain(model, batch(), loss_fn=loss, progress=False),
    "largest": lambda model, loss: hp.largest(
        model, lambda n: batch(128 * n), "2MiB", at_most=2, loss_fn=loss, progress=False
    ),
    "verify": lambda model, loss: hp.plan_memory(
        model, batch(), loss_fn=loss, budget="90%", verify=False, progress=False
    ).verify(model, batch(), loss_fn=loss),
}


@pytest.fixture
def plainly(on_disk: None) -> list[Any]:  # with as many threads as the test
    return trained(make(), Loss())


@pytest.mark.parametrize("call", CALLS)
def test_training_after_planning_is_training_without(call: str, plainly: Any) -> None:
    model, loss = make(), Loss()
    seen: list[Any] = []
    model.blocks[0].register_forward_hook(lambda *_: seen.append(1))
    hooks, last = len(model.blocks[0]._forward_hooks), model.last
    CALLS[call](model, loss)
    assert (loss.calls, len(seen), len(model.blocks[0]._forward_hooks), model.last) == (0, 0, hooks, last)
    losses, state = trained(model, loss)
    assert losses == plainly[0]
    assert {name: value for name, value in state.items() if value != plainly[1][name]} == {}


SEEN: list[Any] = []
num_seen = 0


def note_call(*_: Any) -> None:
    global num_seen
    num_seen += 1
    SEEN.append(num_seen)


def test_globals_of_a_hook_and_what_a_backward_hook_notes_are_as_they_were() -> None:
    model = nn.Sequential(Block(), Block())
    seen: list[Any] = []
    model[0].register_forward_hook(note_call)
    model[1].register_full_backward_hook(lambda *_: seen.append(num_seen))
    x = torch.ones(4, WIDTH, requires_grad=True)
    hp.plan_memory(model, x, loss_fn=lambda y: y.sum(), budget="100%", regions=["0", "1"], progress=False)
    assert (SEEN, num_seen, seen) == ([], 0, [])
    model(x).sum().backward()
    assert (SEEN, num_seen, seen) == ([1], 1, [1])
    SEEN.clear()


def test_gradients_that_an_attribute_has_stay_as_they_were() -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(Block(), Block())
            self.shift = [torch.ones(WIDTH, requires_grad=True)]

        def forward(self, x: Any) -> Any:
            return self.blocks(x) + self.shift[0]

    model = Shifted()
    hp.plan_memory(model, torch.ones(4, WIDTH), loss_fn=lambda y: y.sum(), budget="100%", progress=False)
    assert model.shift[0].grad is None


def test_a_batch_that_the_forward_writes_into_is_as_it_was() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(Block(), Block())

        def forward(self, x: Any) -> Any:
            x.mul_(2)
            return self.blocks(x)

    x = torch.ones(4, WIDTH)
    hp.plan_memory(Writes(), x, loss_fn=lambda y: y.sum(), budget="100%", progress=False)
    assert torch.equal(x, torch.ones(4, WIDTH))


def test_what_cannot_be_put_back_is_named_before_a_step_runs() -> None:
    model = make()
    model.blocks[1].noises = (each for each in range(1000))
    with pytest.raises(ValueError, match=r"what a module takes from an iterator.*\n.*blocks\.1\.noises"):
        CALLS["plan_memory"](model, Loss())
    assert model.list == []
    lazy = nn.Sequential(nn.Sequential(nn.LazyLinear(4), nn.Tanh()), nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    with pytest.raises(ValueError, match=r"Run the model once before planning"):
        hp.plan_memory(lazy, torch.ones(2, 4), loss_fn=lambda y: y.sum(), progress=False)


def test_weights_that_no_op_is_seen_to_write_are_told() -> None:
    class ByNumpy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(Block(), Block())

        def forward(self, x: Any) -> Any:
            weights = self.blocks[1].up.weight.detach().numpy()
            np.multiply(weights, 0.5, out=weights)
            return self.blocks(x)

    with pytest.raises(StateError, match=r"blocks\.1\.up\.weight"):
        hp.plan_memory(ByNumpy(), torch.ones(4, WIDTH), loss_fn=lambda y: y.sum(), budget="100%", progress=False)
