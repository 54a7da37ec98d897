"""A training loop that still has the model's output, over backward and the next forward, stays inside the budget."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import hyper_parallel as hp  # noqa: E402
from hyper_parallel.platform.torch.planner.meters import memory_meter  # noqa: E402
from hyper_parallel.platform.torch.planner.profiling import ProfiledModel  # noqa: E402
from support import planned_models as models  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_disk")
WIDTH, WORDS, ROWS = 32, 512, 128


class Output:
    """As a library's: an object with the loss and the logits that it was computed from."""

    def __init__(self, loss: Any, logits: Any) -> None:
        self.loss, self.logits = loss, logits


class Language(nn.Module):
    def __init__(self, width: int = WIDTH, words: int = WORDS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(models.Residual(width) for _ in range(6))
        self.head = nn.Linear(width, words)

    def forward(self, ids: Any) -> Output:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return Output(nn.functional.cross_entropy(logits, ids), logits)


def peak_of_loop(model: Any, ids: Any, num_steps: int) -> int:
    """Above where the loop begins. A CPU's meter knows only what it has seen begin, so it runs from the first step on."""
    meter = memory_meter(ids.device)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with meter.running():
        meter.mark("loop")
        for _ in range(num_steps):
            out = model(ids)
            out.loss.backward()
            model.zero_grad(set_to_none=False)
        del out
    return max(span.peak_bytes for span in meter.spans())


def device_or_skip(device: str) -> Any:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return torch.device(device)


@pytest.mark.parametrize("budget", ["100%", "85%", "75%"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_budget_holds_where_the_loop_keeps_the_output(device: str, budget: str) -> None:
    place = device_or_skip(device)
    scale = 1 if device == "cpu" else 8
    model = Language(WIDTH * scale, WORDS * scale).to(place)
    ids = (torch.arange(ROWS * scale) % WORDS).to(place)
    without = ProfiledModel(model, ids).base_bytes()  # no step was seen yet
    plan = hp.plan_memory(model, ids, budget=budget, progress=False)
    if device == "cuda":
        model(ids).loss.backward()  # libraries have their memory
        torch.cuda.synchronize()
    plan.apply(model)
    above = peak_of_loop(model, ids, 3)
    plan.remove(model)
    assert without + above <= plan.budget_bytes


def test_what_a_loop_keeps_is_alive_before_its_next_step() -> None:
    model, ids = Language(), torch.arange(ROWS)
    kept, dropped = (
        hp.plan_memory(model, ids, budget="100%", keeps_output=keeps, verify=False, progress=False)
        for keeps in (True, False)
    )
    assert kept.base_bytes - dropped.base_bytes == ROWS * WORDS * 4 + 4
    assert kept.profile.peak_bytes - dropped.profile.peak_bytes == ROWS * WORDS * 4


def test_the_step_of_a_plan_that_was_loaded_is_kept_as_it_was_planned(tmp_path: Any) -> None:
    model, ids = Language(), torch.arange(ROWS)
    plan = hp.plan_memory(model, ids, budget="85%", keeps_output=False, progress=False)
    plan.save(tmp_path / "plan.json")
    verified = hp.MemoryPlan.load(tmp_path / "plan.json").verify(model, ids)
    assert plan.measured is not None
    assert verified.measured is not None
    assert verified.measured.peak_bytes == plan.measured.peak_bytes
    assert ProfiledModel(model, ids, keeps_output=False).base_bytes() == plan.base_bytes
