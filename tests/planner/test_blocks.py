"""Which modules of a model are planned where nobody names them."""

from __future__ import annotations

from typing import Any

import pytest


def test_members_of_lists_are_blocks_and_those_of_dicts_that_hold_no_lists() -> None:
    nn = pytest.importorskip("torch").nn
    from hyper_parallel.platform.torch.planner.blocks import find_blocks

    def block() -> Any:
        return nn.Sequential(linear(), linear())

    def linear() -> Any:
        return nn.Linear(2, 2)

    def found(*parts: Any) -> list[str]:
        return list(find_blocks(nn.Sequential(*parts)))

    assert found(block(), linear(), nn.Sequential(block(), block())) == ["2.0", "2.1"]
    assert found(nn.ModuleDict({"a": block(), "b": block()}), linear()) == ["0.a", "0.b"]
    assert found(nn.ModuleDict({"a": linear(), "b": linear()}), linear()) == ["1"], "these are too small"
    layers = nn.ModuleList([block(), block()])
    assert found(nn.ModuleDict({"first": block(), "layers": layers, "last": block()})) == ["0.layers.0", "0.layers.1"]
    encoders = {name: nn.Sequential(linear(), nn.ModuleList([block(), block()])) for name in ("text", "image")}
    assert found(nn.ModuleDict(encoders)) == ["0.text.1.0", "0.text.1.1", "0.image.1.0", "0.image.1.1"]


def test_members_of_a_dict_are_blocks_on_mindspore() -> None:
    pytest.importorskip("mindspore")
    from mindspore import nn

    from hyper_parallel.platform.mindspore.planner.blocks import find_blocks

    class Block(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.dense = nn.Dense(2, 2)

    class Model(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.CellDict({"a": Block(), "b": Block()})
            self.last = nn.Dense(2, 2)

    assert list(find_blocks(Model())) == ["blocks.a", "blocks.b"]
