"""The Lightning callback plans a step as the trainer runs it, and leaves nothing behind."""

from __future__ import annotations

import copy
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


class Direct(Flat):
    """Its forward is called, and not itself, so that no hook of its own is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loss(x)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.forward(batch[0])


class Logging(Flat):
    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.loss(batch[0])
        self.log("index", float(index), on_epoch=True)
        return loss


class Failing(Flat):
    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        raise ZeroDivisionError


class Untrained(Flat):
    def configure_optimizers(self) -> Any:
        return None


def fitted(module: Any, *callbacks: Any, precision: Any = "32-true", sizes: Any = (256, 256, 256)) -> Any:
    """`sizes`: of the batches, in their order."""
    data = torch.randn(sum(sizes), 32, generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader([[batch] for batch in data.split(sizes)], batch_size=None)
    trainer = lightning.Trainer(
        max_steps=len(sizes), accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
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


@pytest.mark.parametrize("budget", ["60%", "1TiB"], ids=["planned", "empty"])
@pytest.mark.parametrize("kind", [Flat, Network, Direct])
def test_a_larger_batch_is_told_before_it_trains_and_a_smaller_one_is_not(kind: Any, budget: str) -> None:
    module, callback = kind(), MemoryPlanCallback(budget)
    with pytest.raises(
        RuntimeError, match=r"at most float32\[256, 32\], got float32\[512, 32\]; argument `batch\[0\]`"
    ):
        fitted(module, callback, sizes=(256, 128, 512, 256))
    assert callback.plan is not None
    assert callback.plan.is_empty == (budget == "1TiB")
    assert module.losses == fitted(kind(), sizes=(256, 128)).losses
    assert callback.stats == {"batches larger than planned": 1}
    assert "training_step" not in vars(module)
    assert len(fitted(module, sizes=(512,)).losses) == 3


def test_with_replan_a_larger_batch_is_planned_and_what_is_logged_is_of_training_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes, callback = (256, 320, 256, 320), MemoryPlanCallback("80%", on_oom="replan")
    planned, plain = fitted(Logging(), callback, sizes=sizes), fitted(Logging(), sizes=sizes)
    assert planned.losses == plain.losses
    assert planned.trainer.callback_metrics == plain.trainer.callback_metrics != {}
    assert callback.stats == {"plans made anew": 1}
    assert "hyper_parallel: in training plans were made anew, 1 in all" in capsys.readouterr().err


def test_a_copy_of_the_module_in_training_has_a_training_step_of_its_own() -> None:
    class Copying(Flat):
        def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
            trainer, self._trainer = self._trainer, None
            copied = copy.deepcopy(self)
            self._trainer = trainer
            assert hp.wrappers(copied) == [] != hp.wrappers(self)
            assert copied.training_step.__self__ is copied
            self.losses.append(float(copied.training_step(batch, index)))

    assert len(fitted(Copying(), MemoryPlanCallback("60%")).losses) == 3


WRONG = [
    ({"on_oom": "replam"}, "`on_oom` has no such choice"),
    ({"budget": 60}, 'Did you mean "60%"'),
    ({"loss_fn": 3}, "`loss_fn` gives the loss"),
    ({"reserve": -1}, "reserve is negative"),
    ({"keeps_output": "no"}, "`keeps_output` is yes or no"),
    ({"verify": None}, "`verify` is yes or no"),
    ({"progress": "bar"}, "`progress` says whether"),
    ({"longest": 3}, "longest"),
]


@pytest.mark.parametrize(("options", "said"), WRONG, ids=[next(iter(options)) for options, _ in WRONG])
def test_a_wrong_option_is_told_when_the_callback_is_made(options: Any, said: str) -> None:
    with pytest.raises((TypeError, ValueError), match=said):
        MemoryPlanCallback(**options)


def test_a_batch_that_is_given_is_planned_with_in_place_of_the_first() -> None:
    sizes, largest = (128, 256, 128), [torch.zeros(256, 32)]
    callback = MemoryPlanCallback(
        "60%", batch=largest, regions=["module.layers.*"], optimizer=torch.optim.SGD([nn.Parameter()])
    )
    planned = fitted(Flat(), callback, sizes=sizes)
    assert planned.losses == fitted(Flat(), sizes=sizes).losses
    assert callback.plan is not None
    assert callback.plan.profile.identity.batch == [["float32[256, 32]"]]
    assert callback.stats == {}


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
