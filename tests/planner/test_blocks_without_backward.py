"""Blocks that backward does not come to are left alone; the others are planned, with the gradients of the plain run."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import hyper_parallel as hp  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_disk")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Any) -> Any:
        return x + self.down(nn.functional.gelu(self.up(x)))


class InPlace(Block):
    def forward(self, x: Any) -> Any:
        x += super().forward(x * 2)  # into a view, where the block before gives one: what hangs on that is lost
        return x


class Pair(Block):
    """The first thing that it gives leads to no loss."""

    def forward(self, x: Any) -> Any:
        x = x[1] if isinstance(x, tuple) else x
        return x * 3, super().forward(x)


class Net(nn.Module):
    def __init__(self, kind: type[Block] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList(kind() for _ in range(5))

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x[1] if isinstance(x, tuple) else x


class Detached(Net):
    def forward(self, x: Any) -> Any:
        x = self.layers[0](self.first(x))
        return self.layers[4](self.layers[3](self.layers[2](x)) + self.layers[1](x).detach())


class EarlyExit(Net):
    def forward(self, x: Any) -> Any:
        given = [x := layer(x) for layer in self.layers]
        return given[3]


class TwiceOneDetached(Net):
    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x) + layer(x).detach()
        return x


def frozen() -> Net:
    model = Net()
    for part in (model.first, model.layers[0], model.layers[1]):
        part.requires_grad_(False)
    return model


MODELS = {
    "a detached branch": (Detached, [3]),
    "an early exit": (EarlyExit, [4]),
    "frozen first blocks": (frozen, [0, 1]),
    "each block twice, once detached": (TwiceOneDetached, [1, 3, 5, 7, 9]),
    "blocks that write into their input": (lambda: Net(InPlace), []),
    "outputs of which the first leads to no loss": (lambda: Net(Pair), []),
}


def loss_of(output: Any) -> Any:
    return output.square().mean()


def gradients(model: Any, inputs: Any) -> dict[str, Any]:
    model.zero_grad(set_to_none=True)
    loss_of(model(inputs)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_such_a_model_is_planned(name: str) -> None:
    make, without = MODELS[name]
    model, inputs = make(), torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
    plain = gradients(model, inputs)
    plan = hp.plan_memory(model, inputs, loss_fn=loss_of, budget="85%", progress=False)
    assert [index for index, region in enumerate(plan.profile.regions) if region.residual_bytes == 0] == without
    assert not plan.is_empty
    assert plan.measured is not None
    assert plan.measured.peak_bytes <= plan.budget_bytes
    plan.apply(model)
    for _ in range(2):
        found = gradients(model, inputs)
        assert found.keys() == plain.keys()
        assert all(torch.equal(found[each], plain[each]) for each in plain)
    assert not plan.stats(model)
    plan.remove(model)
