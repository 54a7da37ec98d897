"""The Lightning callback plans a step as the trainer runs it, and leaves nothing behind."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
lightning = pytest.importorskip("lightning")
from torch import nn  # noqa: E402

import hyper_parallel as hp  # noqa: E402
from hyper_parallel.integrations.lightning import MemoryPlanCallback  # noqa: E402
from support import planned_models as models  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("on_disk", "quiet"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),  # Lightning's own
]


@pytest.fixture
def quiet() -> Iterator[None]:
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


class Flat(lightning.LightningModule):  # type: ignore[misc]
    """Its blocks are its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(models.Residual(32) for _ in range(4))
        self.losses: list[float] = []

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.loss(batch[0])

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Network(Flat):
    """A model of somebody else's in it, as usual; no number of the batch is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.layers = nn.Sequential(*self.layers), nn.ModuleList()

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.net(batch[0]).square().mean()


class Transferring(Flat):
    """What it computes with is made while the batch is transferred, with random numbers."""

    def on_after_batch_transfer(self, batch: Any, number: int) -> Any:
        return [batch[0] + 0.1 * torch.randn_like(batch[0])]


class ByHand(Flat):
    automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        optimizer, loss = self.optimizers(), self.loss(batch[0])
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


class Failing(Flat):
    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        raise ZeroDivisionError


class Untrained(Flat):
    def configure_optimizers(self) -> Any:
        return None


def fitted(module: Any, *callbacks: Any, precision: Any = "32-true") -> Any:
    data = torch.utils.data.TensorDataset(torch.randn(768, 32, generator=torch.Generator().manual_seed(0)))
    loader = torch.utils.data.DataLoader(data, batch_size=256)
    trainer = lightning.Trainer(
        max_steps=3, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, precision=precision, callbacks=list(callbacks),
    )  # fmt: skip
    torch.manual_seed(1)
    trainer.fit(module, loader)
    return module


def parameter_bytes(module: Any) -> int:
    return sum(each.numel() * each.element_size() for each in module.parameters())


@pytest.mark.parametrize(
    ("kind", "precision"),
    [(Network, "32-true"), (Transferring, "32-true")]
    + [(Flat, precision) for precision in ("32-true", "bf16-mixed", "bf16-true", "64-true")],
)
def test_training_with_the_callback_has_the_losses_of_training_without(kind: Any, precision: str) -> None:
    callback = MemoryPlanCallback("60%")
    planned = fitted(kind(), callback, precision=precision)
    assert planned.losses == fitted(kind(), precision=precision).losses
    assert callback.plan is not None
    assert not callback.plan.is_empty
    assert hp.wrappers(planned) == []


def test_the_state_of_the_optimizer_counts() -> None:
    base_bytes = {}
    for kind in (Flat, Untrained):
        callback = MemoryPlanCallback("60%")
        module = fitted(kind(), callback)
        assert callback.plan is not None
        base_bytes[kind] = callback.plan.base_bytes
    assert base_bytes[Flat] - base_bytes[Untrained] == 2 * parameter_bytes(module)


def test_optimization_by_hand_is_refused_before_anything_runs() -> None:
    module = ByHand()
    before = [parameter.detach().clone() for parameter in module.parameters()]
    with pytest.raises(ValueError, match="automatic optimization"):
        fitted(module, MemoryPlanCallback("60%"))
    assert all(map(torch.equal, module.parameters(), before))
    assert all(parameter.grad is None for parameter in module.parameters())


def test_an_exception_in_training_takes_the_plan_off() -> None:
    module = Failing()
    with pytest.raises(ZeroDivisionError):
        fitted(module, MemoryPlanCallback("60%"))
    assert hp.wrappers(module) == []


def test_metrics_and_lists_of_the_first_epoch_are_those_of_training_without() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")

    class Metered(Flat):
        def __init__(self) -> None:
            super().__init__()
            self.metric = torchmetrics.MeanMetric()
            self.others = {"largest": [torchmetrics.MaxMetric()]}  # no submodule
            self.seen = 0
            self.outputs: list[float] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = self.loss(batch[0])
            self.metric.update(loss.detach())
            self.others["largest"][0].update(loss.detach())
            self.seen += len(batch[0])
            self.outputs.append(float(loss.detach()))
            self.log("loss", loss)
            return loss

    planned, plain = fitted(Metered(), MemoryPlanCallback("60%")), fitted(Metered())
    assert planned.losses == plain.losses == planned.outputs == plain.outputs
    assert planned.seen == plain.seen
    for ours, theirs in (planned.metric, plain.metric), (planned.others["largest"][0], plain.others["largest"][0]):
        assert torch.equal(ours.compute(), theirs.compute())
        assert ours._update_count == theirs._update_count == 3


def test_an_iterator_that_a_lightning_module_holds_is_named_before_training_step_runs() -> None:
    class Drawing(Flat):
        def __init__(self) -> None:
            super().__init__()
            self.data = torch.utils.data.DataLoader([1.0, 2.0])  # nobody's place in it
            self.schedule = {"factors": [iter([1.0, 2.0, 3.0])]}
            self.num_calls = [0]

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            self.num_calls[0] += 1
            return self.loss(batch[0]) * next(self.schedule["factors"][0])

    module = Drawing()
    with pytest.raises(ValueError, match=r"iterator there cannot be put back(?s:.*)module\.schedule\['factors'\]\[0\]"):
        fitted(module, MemoryPlanCallback("60%"))
    assert (module.num_calls, list(module.schedule["factors"][0])) == ([0], [1.0, 2.0, 3.0])


def test_what_a_lightning_module_holds_in_slots_is_that_of_training_without() -> None:
    class Meter:
        __slots__ = ("count", "total")

        def __init__(self) -> None:
            self.count, self.total = 0, torch.zeros(())

    class Metered(Flat):
        def __init__(self) -> None:
            super().__init__()
            self.meters = [Meter()]

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = self.loss(batch[0])
            self.meters[0].count += 1
            self.meters[0].total += loss.detach()
            return loss

    planned, plain = fitted(Metered(), MemoryPlanCallback("60%")), fitted(Metered())
    assert planned.losses == plain.losses
    assert planned.meters[0].count == 3
    assert torch.equal(planned.meters[0].total, plain.meters[0].total)
