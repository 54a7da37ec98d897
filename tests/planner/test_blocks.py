"""Which modules of a model are planned where nobody names them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import hyper_parallel as hp
from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.platform import selection
from hyper_parallel.platform.patterns import matching


@pytest.fixture(autouse=True)
def no_platform_left() -> Iterator[None]:
    yield
    selection._forget()  # planning has chosen the framework of the model


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
    assert found(nn.ModuleDict({"a": linear(), "b": linear()}), linear()) == ["0.a", "0.b", "1"]
    assert found(nn.ModuleList([linear(), linear()]), nn.ModuleDict({"a": block(), "b": block()})) == ["1.a", "1.b"]
    layers = nn.ModuleList([block(), block()])
    assert found(nn.ModuleDict({"first": block(), "layers": layers, "last": block()})) == ["0.layers.0", "0.layers.1"]
    encoders = {name: nn.Sequential(linear(), nn.ModuleList([block(), block()])) for name in ("text", "image")}
    assert found(nn.ModuleDict(encoders)) == ["0.text.1.0", "0.text.1.1", "0.image.1.0", "0.image.1.1"]


def test_a_list_of_layers_without_parts_is_planned_and_what_is_never_called_is_no_block() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("scipy", reason="the solver is in SciPy")
    nn = torch.nn
    from hyper_parallel.platform.torch.planner.blocks import find_blocks

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(16, 32), nn.Linear(32, 16)
            self.lstms = nn.ModuleList(nn.LSTM(32, 32, batch_first=True) for _ in range(4))

        def forward(self, x: Any) -> Any:
            x = self.embedding(x)
            for lstm in self.lstms:
                x = lstm(x)[0]
            return self.head(x).sum()

    plan = hp.plan_memory(Model(), torch.arange(16).repeat(8, 2), budget="70%", progress=False)
    assert [region.path for region in plan.profile.regions] == ["embedding", *(f"lstms.{n}" for n in range(4)), "head"]
    assert plan.measured.peak_bytes <= plan.budget_bytes
    stage = {"resnets": nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))}
    stages = nn.ModuleList(nn.ModuleDict(stage) for _ in range(2))
    assert list(find_blocks(nn.ModuleDict({"down": stages}))) == [
        f"down.{stage}.resnets.{at}" for stage in range(2) for at in range(2)
    ]


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


def test_a_star_in_the_name_of_a_block_stands_for_anything_and_of_modules_inside_each_other_the_outer_counts() -> None:
    nn = pytest.importorskip("torch").nn
    from hyper_parallel.platform.torch.planner.blocks import find_blocks

    def block() -> Any:
        return nn.ModuleDict({"resnets": nn.ModuleList([nn.Sequential(nn.Linear(2, 2)) for _ in range(2)])})

    model = nn.ModuleDict({"down_blocks": nn.ModuleList([block(), block()]), "resnet": nn.Linear(2, 2)})
    inner = [f"down_blocks.{block}.resnets.{number}" for block in range(2) for number in range(2)]
    assert list(find_blocks(model, ["*resnets.*"])) == inner
    assert list(find_blocks(model, ["*.resnets.?"])) == inner
    assert list(find_blocks(model, "*resnets*")) == inner, "a list of modules is never called itself"
    assert list(find_blocks(model, ["down_blocks.1.*", "resnet"])) == [*inner[2:], "resnet"]
    with pytest.raises(ArgumentError, match="matches no module.*\n.*\nThe model has down_blocks, down_blocks.0, "):
        find_blocks(model, ["resnets.*"])


def test_the_patterns_of_blocks_and_of_a_shard_plan_mean_the_same() -> None:
    from hyper_parallel.core.shard.shard_module import _matches

    names = ["layers.0.mlp", "layers.0.mlp.up", "layers.10.mlp", "head"]
    for pattern in ("layers.*.mlp", "*.mlp", "*mlp*", "layers.?.mlp", "head", "*"):
        assert list(_matches({pattern: 1}, names, "module")) == matching(pattern, names)
    assert matching("*.mlp", names) == ["layers.0.mlp", "layers.10.mlp"]
    assert matching("layers.*", names) == names[:3]


def test_blocks_that_are_named_for_a_refusal_are_the_parts_of_one_or_what_is_in_none() -> None:
    nn = pytest.importorskip("torch").nn
    from hyper_parallel.platform.torch.planner.blocks import find_blocks, suggested

    def stage() -> Any:
        return nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(3)))

    stages = nn.ModuleDict({"stem": nn.Linear(2, 2), "stages": nn.ModuleList([stage(), stage()])})
    blocks = find_blocks(stages, ["stages.*"])
    assert suggested(stages, blocks, "stages.1") == ["stages.*.*"]
    assert suggested(stages, blocks) == ["stem"]
    lstms = nn.ModuleDict({"e": nn.Embedding(2, 2), "l": nn.ModuleList(nn.LSTM(2, 2) for _ in range(2))})
    assert suggested(lstms, ["e"]) == ["l.*"]
    assert suggested(lstms, ["e", "l.0", "l.1"], "l.0") == []
    one = nn.ModuleDict({"only": nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})})
    assert suggested(one, ["only"], "only") == ["only.*"]


def test_a_model_that_calls_its_blocks_through_a_python_list_is_refused_with_the_lists_name() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("scipy", reason="the solver is in SciPy")
    nn = torch.nn

    class Model(nn.Module):
        def __init__(self, num_hidden: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(3))
            self.hidden = list(self.blocks[:num_hidden])

        def forward(self, x: Any) -> Any:
            for block in [*self.hidden, *self.blocks[len(self.hidden) :]]:
                x = block(x)
            return x.sum()

    for num_hidden in (3, 1):
        model = Model(num_hidden)
        with pytest.raises(
            ArgumentError, match=f"such as a Python list.\n.*{num_hidden} of 3 calls .* `hidden`; Model"
        ):
            hp.plan_memory(model, torch.ones(2, 4), budget="50%", progress=False)
        assert not any("Wrapper" in type(each).__name__ for each in model.modules())
    assert hp.plan_memory(Model(0), torch.ones(2, 4), budget="100%", progress=False).is_empty


def test_on_mindspore_a_model_that_calls_its_blocks_through_a_python_list_is_refused_with_the_lists_name() -> None:
    pytest.importorskip("mindspore")
    pytest.importorskip("scipy", reason="the solver is in SciPy")
    from mindspore import mint, nn

    class Model(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.CellList([nn.SequentialCell(nn.Dense(4, 4)) for _ in range(3)])
            self.hidden = {"all": 0, **dict(enumerate(self.blocks))}

        def construct(self, x: Any) -> Any:
            for number in range(3):
                x = self.hidden[number](x)
            return x.sum()

    with pytest.raises(ArgumentError, match="such as a Python list.\n.*3 of 3 calls by another reference, `hidden`"):
        hp.plan_memory(Model(), mint.ones((2, 4)), budget="50%", progress=False)
