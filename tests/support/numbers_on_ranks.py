"""How tests of numbers run their programs on ranks, and a model that both frameworks have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hyper_parallel.platform import selection
from support import processes
from support.backends import Backend

DEADLINE_S = 100
OF_TRANSFORMERS = {"llama", "gpt2", "mixtral"}


def run(number: int, name: str, *arguments: Any, framework: str = "torch") -> list[Any]:
    """What a function of `number_programs` or `norm_programs`, or of their MindSpore twin, answers on each rank."""
    if framework == "mindspore":
        pytest.importorskip("mindspore")
        from support import mindspore_number_programs

        programs = [mindspore_number_programs]
    else:
        pytest.importorskip("torch")
        from support import norm_programs, number_programs

        programs = [number_programs, norm_programs]
    if arguments and arguments[0] in OF_TRANSFORMERS:
        pytest.importorskip("transformers", reason="the models are in the package `transformers`")
    function = next(getattr(module, name) for module in programs if hasattr(module, name))
    return processes.pool(framework, number).run(function, *arguments, deadline_s=DEADLINE_S)


@pytest.fixture
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The framework that a test is about is the process's own, for calls that get no tensor or module."""
    selection._forget()
    backend = request.getfixturevalue("backend") if "backend" in request.fixturenames else None
    name = "torch" if backend is None else backend.name.partition("-")[0]
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", name)
    yield
    selection._forget()


def layers(backend: Backend) -> Any:
    """Two linear layers in a row, on any framework."""
    if backend.name.startswith("mindspore"):
        from mindspore import nn

        return nn.SequentialCell(nn.Dense(4, 4), nn.Dense(4, 4))
    from torch import nn as torch_nn

    return torch_nn.Sequential(torch_nn.Linear(4, 4), torch_nn.Linear(4, 4))
