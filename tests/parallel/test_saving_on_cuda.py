"""Checkpoints of models on a GPU: values, background saves from pinned memory, and loads from and to the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hyper_parallel as hp
from hyper_parallel.platform import selection

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device here; last results are in benchmarks/results", allow_module_level=True)
nn = torch.nn


@pytest.fixture(autouse=True)
def _on_pytorch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", "torch")
    yield
    selection._forget()


def trained(device: str, seed: int) -> tuple[Any, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 300), nn.LayerNorm(300).bfloat16(), nn.Linear(300, 7)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=device == "cuda")
    for value in model.parameters():
        value.grad = torch.randn_like(value)
    optimizer.step()
    return model, optimizer


def same(first: Any, second: Any) -> bool:
    return all(
        torch.equal(one.cpu(), two.cpu())
        for one, two in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize("source", ["cuda", "cpu"])
@pytest.mark.parametrize("target", ["cuda", "cpu"])
@pytest.mark.parametrize("in_background", [False, True])
def test_a_model_on_cuda_is_saved_and_loaded(source: str, target: str, in_background: bool, tmp_path: Path) -> None:
    model, optimizer = trained(source, 0)
    saving = hp.save(tmp_path / "a", model=model, optimizer=optimizer, background=in_background)
    expected = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    if saving is not None:
        with torch.no_grad():
            for value in model.parameters():
                value.zero_()
        saving.wait()
    again, fresh = trained(target, 1)
    hp.load(tmp_path / "a", model=again, optimizer=fresh)
    assert all(torch.equal(value.cpu(), expected[name]) for name, value in again.state_dict().items())
    for one, two in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert all(torch.equal(one[name].cpu(), two[name].cpu()) for name in one)
    if source == target:
        for value in again.parameters():
            value.grad = torch.ones_like(value)
        fresh.step()


def test_values_are_those_of_the_stream_that_computed_them(tmp_path: Path) -> None:
    model = nn.Linear(4096, 4096, bias=False).cuda()
    for number in range(5):
        with torch.no_grad():
            for _ in range(50):
                model.weight.add_(1.0)  # still running when the save begins
            expected = model.weight.clone()
        saving = hp.save(tmp_path / str(number), model=model, background=True)
        with torch.no_grad():
            model.weight.zero_()
        saving.wait()
        again = nn.Linear(4096, 4096, bias=False)
        hp.load(tmp_path / str(number), model=again)
        assert torch.equal(again.weight, expected.cpu())
        with torch.no_grad():
            model.weight.copy_(expected)
