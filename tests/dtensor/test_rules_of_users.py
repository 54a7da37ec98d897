"""Rules that users write: as a class, as an equation, as one-axis strategies; registration and its errors.

On PyTorch, in one process and in four.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

import hyper_parallel as hp
from hyper_parallel import DistributedOp, EinsumRule, Partial, Replicate, Shard, StrategyRule
from hyper_parallel.core.shard import registry
from hyper_parallel.platform import selection
from support import processes, user_rules

torch = pytest.importorskip("torch")


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[hp.DeviceMesh]:
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", "torch")
    yield hp.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    selection._forget()


@pytest.fixture(autouse=True)
def no_rule_stays() -> Iterator[None]:
    before = dict(registry._rules)
    yield
    for name in set(registry._rules) - set(before):
        registry.unregister(name)


class FirstLayout(DistributedOp):
    def infer_layout(self, layouts: Any, extra_args: Any = None) -> Any:
        return layouts[0]


def test_a_name_has_one_rule_unless_it_is_overridden() -> None:
    FirstLayout("MineAlone")
    with pytest.raises(ValueError, match="(?s)MineAlone.*FirstLayout.*override=True"):
        FirstLayout("MineAlone")
    second = FirstLayout("MineAlone", override=True)
    assert registry.by_name("MineAlone") is second


def test_a_built_in_name_is_taken_and_can_be_overridden(mesh: hp.DeviceMesh) -> None:
    x = hp.distribute_tensor(torch.ones(2, 2), mesh, [Shard(0)])
    assert x.exp().layout is x.layout
    with pytest.raises(ValueError, match="(?s)exp.*this package"):
        FirstLayout("exp")
    seen = []

    class Seen(FirstLayout):
        def infer_layout(self, layouts: Any, extra_args: Any = None) -> Any:
            seen.append((layouts, extra_args))
            return layouts[0]

    Seen("exp", override=True)
    assert torch.equal(x.exp().to_local(), torch.ones(2, 2).exp())
    assert seen == [([x.layout], [])]
    x.exp()
    assert len(seen) == 1, "decided once"


@pytest.mark.parametrize("framework", ["torch", "mindspore"])
def test_the_dispatcher_is_given_a_dict_of_keywords(monkeypatch: pytest.MonkeyPatch, framework: str) -> None:
    pytest.importorskip(framework)
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", framework)
    try:
        x = hp.ones((4,), hp.init_device_mesh("cpu", (1,)))
        tensors = importlib.import_module(f"hyper_parallel.platform.{framework}.dtensor.tensor")
        dispatch, given = tensors._dispatch, []
        monkeypatch.setattr(tensors, "_dispatch", lambda *call: given.append(call[2:]) or dispatch(*call))
        assert (x + x).sum().to_local() == 8
    finally:
        selection._forget()
    assert given == [({},), ({},)]


def test_an_operator_without_a_rule_gets_one(mesh: hp.DeviceMesh) -> None:
    x = hp.distribute_tensor(torch.ones(2, 3), mesh, [Shard(0)])
    with pytest.raises(NotImplementedError, match="`cummax` has no rule"):
        torch.cummax(x, 1)

    class Rule(DistributedOp):
        def infer_layout(self, layouts: Any, extra_args: Any = None) -> Any:
            assert extra_args == [1]
            return layouts[0], None  # the second output stays plain

    Rule("cummax")
    values, indices = torch.cummax(x, 1)
    assert isinstance(values, hp.DTensor)
    assert not isinstance(indices, hp.DTensor)


@pytest.mark.parametrize(
    ("answer", "words"),
    [("tp", "no layout"), (3, "no layout"), ([None, 3], "no layout")],
)
def test_an_answer_that_is_no_layout_is_told_with_the_rule(mesh: hp.DeviceMesh, answer: Any, words: str) -> None:
    class Wrong(DistributedOp):
        def infer_layout(self, layouts: Any, extra_args: Any = None) -> Any:
            return answer

    Wrong("cummax")
    with pytest.raises(TypeError, match=f"(?s)cummax.*{words}.*Wrong.infer_layout"):
        torch.cummax(hp.distribute_tensor(torch.ones(2, 3), mesh), 1)


def test_a_layout_of_other_dims_and_a_wrong_number_of_outputs_are_told(mesh: hp.DeviceMesh) -> None:
    class Dims(DistributedOp):
        def infer_layout(self, layouts: Any, extra_args: Any = None) -> Any:
            return mesh.layout(None), None

    Dims("cummax")
    x = hp.distribute_tensor(torch.ones(2, 3), mesh)
    with pytest.raises(ValueError, match="other dims"):
        torch.cummax(x, 1)
    FirstLayout("cummin")
    with pytest.raises(TypeError, match="2 layouts"):
        torch.cummin(x, 1)


def test_a_rule_without_infer_layout_says_so(mesh: hp.DeviceMesh) -> None:
    DistributedOp("cummax")
    with pytest.raises(NotImplementedError, match="infer_layout"):
        torch.cummax(hp.distribute_tensor(torch.ones(2, 3), mesh), 1)


@pytest.mark.parametrize(
    ("equation", "words"),
    [("a b", "->"), ("a, b -> c", "output only"), ("a a -> a", "twice"), ("a? -> a", "no name"), ("-> a", "xpected")],
)
def test_what_is_no_equation_is_told_with_an_example(equation: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){words}"):
        EinsumRule("Equation", equation)


def test_strategies_of_different_lengths_and_things_that_are_no_placements_are_told() -> None:
    with pytest.raises(ValueError, match="2 to 1"):
        StrategyRule("S", [([Shard(0)], [Shard(0)]), ([Shard(0), Replicate()], [Shard(0)])])
    with pytest.raises(TypeError, match="placements"):
        StrategyRule("S", [(["tp"], [Shard(0)])])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="beginning"):
        StrategyRule("S", [([Shard(-1)], [Shard(0)])])
    with pytest.raises(ValueError, match="at least one"):
        StrategyRule("S", [])
    assert Partial("sum").op == "sum"


@pytest.mark.parametrize("mesh_name", ["4", "2x2"])
def test_an_equation_and_strategies_are_extended_to_all_axes_with_gradients(mesh_name: str) -> None:
    for found in processes.pool("torch", 4).run(user_rules.short_rules, mesh_name, deadline_s=120):
        assert found["compared"] >= 25
        assert found["largest difference"] < 1e-5


def test_a_rule_that_prepares_its_arguments_and_replaces_the_operation_has_right_gradients() -> None:
    for found in processes.pool("torch", 4).run(user_rules.prepared_rule, deadline_s=60):
        assert all(found.values()), found
