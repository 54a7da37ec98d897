"""What regions and swap wrappers leave undone: hooks that would find nothing, questions whose answer is known. No times."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from hyper_parallel.core.activation_checkpoint import policies as p  # noqa: E402
from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy  # noqa: E402
from hyper_parallel.core.swap.by_hand.manager import SwapManager  # noqa: E402
from hyper_parallel.platform.torch.activation_checkpoint import swap_wrapper  # noqa: E402
from hyper_parallel.platform.torch.regions import attributes, frame, placeholders, region_function, saved_tensors  # noqa: E402
from hyper_parallel.platform.torch.regions.checkpoint import checkpoint  # noqa: E402
from hyper_parallel.platform.torch.regions.op_traits import traits_of  # noqa: E402
from hyper_parallel.platform.torch.regions.values import KnownOp, Value  # noqa: E402
from hyper_parallel.platform.torch.wrappers import quiet_calls  # noqa: E402
from support.swapping import Swapping  # noqa: E402


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the hooks of swap wrappers were called."""
    counts: Counter[str] = Counter()
    pack = saved_tensors.SavedTensorSwap.pack

    def counted(self: Any, tensor: torch.Tensor) -> Any:
        counts["pack"] += 1
        return pack(self, tensor)

    monkeypatch.setattr(saved_tensors.SavedTensorSwap, "pack", counted)
    return counts


def block() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))


def num_packs(packs: Counter[str], module: nn.Module, *args: Any, **kwargs: Any) -> int:
    packs.clear()
    result = module(*args, **kwargs)
    if result.requires_grad:
        result.sum().backward()
    return packs["pack"]


# -- swap wrappers that find nothing ------------------------------------------------------------------------------------------


def test_hooks_are_left_out_after_a_call_that_found_nothing(packs: Counter[str]) -> None:
    wrapped, x = swap_wrapper(block()), torch.randn(2, 4, requires_grad=True)
    assert num_packs(packs, wrapped, x) > 0
    assert num_packs(packs, wrapped, torch.randn(2, 4, requires_grad=True)) == 0


def test_gradients_are_the_same_without_hooks() -> None:
    plain, wrapped = block(), swap_wrapper(block())
    x = torch.randn(2, 4)
    for _ in range(3):
        plain.zero_grad()
        wrapped.zero_grad()
        plain(x).sum().backward()
        wrapped(x).sum().backward()
        for a, b in zip(plain.parameters(), wrapped.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)


def changes() -> dict[str, Any]:
    return {
        "another shape": (torch.randn(3, 4, requires_grad=True),),
        "another dtype": (torch.randn(2, 4, dtype=torch.float64, requires_grad=True),),
        "no gradient of the input": (torch.randn(2, 4),),
        "a part of a larger storage": (torch.randn(8, 4, requires_grad=True)[:2],),
    }


@pytest.mark.parametrize("change", list(changes()))
def test_hooks_come_back_when_the_input_looks_different(packs: Counter[str], change: str) -> None:
    wrapped = swap_wrapper(nn.GELU())
    x = torch.randn(2, 4, requires_grad=True)
    num_packs(packs, wrapped, x)
    assert num_packs(packs, wrapped, x) == 0
    packs.clear()
    wrapped(changes()[change][0] if change != "no gradient of the input" else torch.randn(2, 4)).sum()
    expected = 0 if change == "no gradient of the input" else 1  # nothing is saved then, hooks or not
    assert packs["pack"] == expected
    assert num_packs(packs, wrapped, x) == 1


def test_hooks_come_back_with_a_setting(packs: Counter[str], tmp_path: Path) -> None:
    wrapped, x = swap_wrapper(block()), torch.randn(2, 4, requires_grad=True)
    num_packs(packs, wrapped, x)
    assert num_packs(packs, wrapped, x) == 0
    swapping = Swapping("cpu", tmp_path)
    with swapping.configured():
        assert num_packs(packs, wrapped, x) > 0
        assert swapping.offloaded_bytes > 0
        assert num_packs(packs, wrapped, x) > 0  # it found something
    num_packs(packs, wrapped, x)
    assert num_packs(packs, wrapped, x) == 0


def test_hooks_come_back_in_another_mode(packs: Counter[str]) -> None:
    wrapped, x = swap_wrapper(block()), torch.randn(2, 4, requires_grad=True)
    num_packs(packs, wrapped, x)
    assert num_packs(packs, wrapped, x) == 0
    wrapped.eval()
    assert num_packs(packs, wrapped, x) > 0
    wrapped.train()
    assert num_packs(packs, wrapped, x) > 0
    with torch.autocast("cpu", torch.bfloat16):
        assert num_packs(packs, wrapped, x) > 0
    with torch.no_grad():
        num_packs(packs, wrapped, x)
    assert num_packs(packs, wrapped, x) > 0


def test_hooks_look_again_every_16th_call(packs: Counter[str]) -> None:
    wrapped, x = swap_wrapper(block()), torch.randn(2, 4, requires_grad=True)
    with_hooks = [number for number in range(40) if num_packs(packs, wrapped, x) > 0]
    assert with_hooks == [0, 16, 32]


def test_a_policy_is_asked_in_every_call(packs: Counter[str]) -> None:
    wrapped = swap_wrapper(block(), policy_fn=lambda _tensor: CheckpointPolicy.MUST_SAVE)
    x = torch.randn(2, 4, requires_grad=True)
    assert all(num_packs(packs, wrapped, x) > 0 for _ in range(4))


def test_hooks_stay_where_a_group_waits_for_the_block(packs: Counter[str]) -> None:
    wrapped, x = swap_wrapper(block()), torch.randn(2, 4, requires_grad=True)
    num_packs(packs, wrapped, x)
    SwapManager().set_current_group_name("group")
    try:
        assert all(num_packs(packs, wrapped, x) > 0 for _ in range(3))
    finally:
        SwapManager().set_current_group_name("")


def test_hooks_stay_inside_other_hooks(packs: Counter[str]) -> None:
    """Those around would get the residuals else."""
    wrapped, x = swap_wrapper(block()), torch.randn(2, 4, requires_grad=True)
    num_packs(packs, wrapped, x)
    around = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: around.append(1) or tensor, lambda packed: packed):
        assert num_packs(packs, wrapped, x) > 0
    assert len(around) < packs["pack"]


def test_objects_that_may_change_keep_the_hooks(packs: Counter[str]) -> None:
    class Cache:
        pass

    class Takes(nn.Module):
        def forward(self, x: torch.Tensor, cache: object) -> torch.Tensor:
            return x.sin()

    wrapped, x = swap_wrapper(Takes()), torch.randn(2, 4, requires_grad=True)
    assert [num_packs(packs, wrapped, x, cache=Cache()) for _ in range(3)] == [1, 1, 1]
    assert [num_packs(packs, wrapped, x, cache={"a": [1, None, "b"]}) for _ in range(3)] == [1, 0, 0]
    assert num_packs(packs, wrapped, x, cache={"a": [2, None, "b"]}) == 1


def test_a_wrapper_that_is_gone_leaves_nothing() -> None:
    before = len(quiet_calls._nothing_found)
    wrapped = swap_wrapper(block())
    wrapped(torch.randn(2, 4, requires_grad=True)).sum().backward()
    assert len(quiet_calls._nothing_found) == before + 1
    del wrapped
    assert len(quiet_calls._nothing_found) == before


# -- regions ------------------------------------------------------------------------------------------------------------------


def test_a_policy_that_the_op_alone_decides_is_asked_once_per_op() -> None:
    asked: Counter[str] = Counter()

    class Counting(p.Matcher):
        def __call__(self, ctx: Any, op: Any, /, *args: Any, **kwargs: Any) -> bool:
            asked["call"] += 1
            return False

        def of_op(self, op: Any) -> bool:
            asked[str(op)] += 1
            return False

    policy = p.save(Counting())
    for _ in range(3):
        x = torch.randn(3, requires_grad=True)
        checkpoint(lambda x: x.sin().sin().cos(), x, policy_fn=policy).sum().backward()
    assert asked == {"aten.sin.default": 1, "aten.cos.default": 1}


def test_a_policy_with_a_function_of_the_users_is_asked_in_both_runs() -> None:
    asked: Counter[bool] = Counter()

    def matches(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        asked[ctx.is_recompute] += 1
        return False

    assert not p.save(matches).is_pure
    assert p.save(p.matmuls & ~p.in_module("a") | p.larger_than(1)).is_pure
    x = torch.randn(3, requires_grad=True)
    checkpoint(lambda x: x.sin().sin().cos(), x, policy_fn=p.save(matches)).sum().backward()
    assert asked[False] == 3
    assert asked[True] >= 2


def test_attributes_are_noted_anew_only_where_a_forward_has_changed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[int] = []
    note = attributes.PythonState
    monkeypatch.setattr(attributes, "PythonState", lambda *given, **named: notes.append(1) or note(*given, **named))

    class Same(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin().sin()

    class Counts(nn.Module):
        num_calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.num_calls += 1
            self.last = x.detach() + 1  # nothing needs it
            return x.sin().sin()

    for module, num_notes in ((Same(), 1), (Counts(), 4)):
        notes.clear()
        for _ in range(4):
            checkpoint(module, torch.randn(3, requires_grad=True)).sum().backward()
        assert len(notes) == num_notes
    assert module.num_calls == 4
    assert not placeholders.is_placeholder(module.last)


# -- what a call shares with the one before ---------------------------------------------------------------------------------------


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The record of each call."""
    found: list[Any] = []
    finish = frame.Frame._finish
    monkeypatch.setattr(frame.Frame, "_finish", lambda self, record: found.append(record) or finish(self, record))
    return found


def step(module: nn.Module, x: torch.Tensor, **options: Any) -> torch.Tensor:
    checkpoint(module, x, **options).sum().backward()
    return x.grad


def test_a_second_call_shares_what_its_ops_look_like(records: list[Any]) -> None:
    module = block()
    for _ in range(3):
        step(module, torch.randn(2, 4, requires_grad=True))
    first, second, third = ([op.rest for op in record.ops] for record in records)
    assert all(a is b is c for a, b, c in zip(first, second, third, strict=True))
    assert not records[1].has_news()


def test_ops_that_look_different_share_nothing_and_give_the_right_gradients(records: list[Any]) -> None:
    class Changing(nn.Module):
        factor: float = 2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.sin() * self.factor).sin()

    module = Changing()
    for factor, shape in [(2, (3,)), (2.0, (3,)), (True, (3,)), (3, (3,)), (3, (2, 3)), (float("nan"), (3,))]:
        module.factor = factor
        x = torch.randn(shape, requires_grad=True)
        plain = x.detach().clone().requires_grad_()
        module(plain).sum().backward()
        assert torch.equal(step(module, x), plain.grad) or factor != factor
        arguments = [argument for op in records[-1].ops for argument in op.rest]
        assert repr(factor) in map(repr, arguments)  # 2, 2.0 and True are equal


def test_what_is_remembered_of_a_call_holds_no_tensor_and_ends_with_the_module() -> None:
    gc.collect()
    before = len(region_function._known)
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.GELU())
    x = torch.randn(2, 4, requires_grad=True)
    step(module, x)
    assert len(region_function._known) == before + 1
    todo: list[Any] = [region_function._known[module].ops]
    while todo:
        each = todo.pop()
        assert not isinstance(each, (torch.Tensor, torch.UntypedStorage, torch.Generator, Value, FrameType))
        if isinstance(each, (list, tuple)):
            todo += each
        elif isinstance(each, KnownOp):
            todo += [each.rest, each.types, each.view, each.where]
    del module, todo
    gc.collect()
    assert len(region_function._known) == before


def test_names_are_those_of_the_model_that_runs(records: list[Any]) -> None:
    class Model(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inner, x)

    inner = block()
    step(inner, torch.randn(2, 4, requires_grad=True))
    Model(inner)(torch.randn(2, 4, requires_grad=True)).sum().backward()
    step(inner, torch.randn(2, 4, requires_grad=True))
    names = [[op.module for op in record.ops] for record in records]
    assert names == [["0", "1", "2"], ["inner.0", "inner.1", "inner.2"], ["0", "1", "2"]]


def test_a_function_of_the_users_is_told_the_module_in_every_call() -> None:
    told: list[tuple[str, int]] = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        if not ctx.is_recompute and op is torch.ops.aten.addmm.default:
            told.append((ctx.module, ctx.occurrence))
        return False

    module = block()
    for _ in range(3):
        step(module, torch.randn(2, 4, requires_grad=True), policy_fn=policy)
    assert told == [("0", 0), ("2", 0)] * 3


def test_generators_are_as_without_a_region_when_ops_are_known() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.GELU(), nn.Dropout(0.5))
    results = []
    for run in (module, lambda x: checkpoint(module, x, policy_fn=p.save(p.random_ops))):
        torch.manual_seed(0)
        gradients = []
        for _ in range(3):
            x = torch.ones(2, 4, requires_grad=True)
            run(x).sum().backward()
            gradients.append(x.grad)
        results.append((*gradients, torch.get_rng_state()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_calls_of_a_module_are_counted_alike_in_every_step() -> None:
    """Also those in which only ops run that the name alone decides."""
    told: list[tuple[str, int]] = []

    def matches(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        if not ctx.is_recompute:
            told.append((ctx.module, ctx.call))
        return False

    class Inner(nn.Module):
        def forward(self, x: torch.Tensor, last: bool) -> torch.Tensor:
            return x.sin().cos() if last else x.sin()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(self.inner(x, False), True)

    module, policy = Twice(), p.save(p.ops("aten.cos") & matches)
    for policy_fn in (None, policy, policy, policy):
        step(module, torch.randn(3, requires_grad=True), policy_fn=policy_fn)
    assert told == [("inner", 1)] * 3


def test_ops_that_recording_looks_at_are_no_common_ones() -> None:
    """Random ones are, if they are nothing else; cuDNN's recurrent layers keep what they made, which only the longer way does."""
    aten = torch.ops.aten
    assert [traits_of(op).is_common for op in (aten.mm.default, aten.native_dropout.default)] == [True, True]
    others = (
        aten._cudnn_rnn.default,
        aten._to_copy.default,
        aten.add_.Tensor,
        aten.empty.memory_format,
        aten.view.default,
    )
    assert [traits_of(op).is_common for op in others] == [False] * 5
