"""What a plan's regions know of their earlier calls: they ask less, say the same, and leave little to the garbage collector; and what is known of their memory."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint as torch_checkpoint  # noqa: E402
from torch.utils.checkpoint import create_selective_checkpoint_contexts  # noqa: E402

from hyper_parallel.core.planner.model.choices import RECOMPUTE, SAVE, recompute_all  # noqa: E402
from hyper_parallel.core.planner.search.choosing import timeline_under  # noqa: E402
from hyper_parallel.core.planner.search.settings import candidates  # noqa: E402
from hyper_parallel.core.planner.solve.block import base_of  # noqa: E402
from hyper_parallel.core.regions.module_calls import ModuleCalls  # noqa: E402
from hyper_parallel.platform.torch.planner.applying import Applied, PlannedPolicy  # noqa: E402
from hyper_parallel.platform.torch.planner.profiling import ProfiledModel  # noqa: E402
from hyper_parallel.platform.torch.regions import frame, region_function  # noqa: E402
from hyper_parallel.platform.torch.regions.module_paths import CALL, ModulePaths  # noqa: E402

Said = list[tuple[str, Any, Any]]  # of each op: its name, where it is, what the plan says


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).sin().sin())


class Mixture(nn.Module):
    """How many rows an expert gets depends on the data; `also` runs an op that no plan knows."""

    also = False

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(3))
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (x[:, 0].detach() * 3).long().clamp(0, 2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            out = out.index_add(0, rows, expert(x[rows]))
        if self.also:
            out = out.cosh()
        return self.last(out.sin()).sin()


class Twice(nn.Module):
    """Calls one module twice: where an op is does not tell which of the calls it is."""

    def __init__(self) -> None:
        super().__init__()
        self.expert = Expert()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.expert(self.expert(x)).sin()


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def rows(*firsts: float) -> torch.Tensor:
    x = torch.linspace(-1, 1, 4 * len(firsts)).view(-1, 4).clone()
    x[:, 0] = torch.tensor(firsts)
    return x


def applied(model: Model, batch: torch.Tensor, on_mismatch: str = "error") -> Applied:
    """Every second op that may be is saved, another one in each block."""
    profile = ProfiledModel(model, batch).profile()
    decision = []
    for number, region in enumerate(profile.regions):
        needed = [index for index, op in enumerate(region.ops) if op.is_needed]
        decision.append(base_of(region, frozenset(needed[number::2]), can_swap=False).decision)
    assert {SAVE, RECOMPUTE} <= set(decision[0].ops)
    return Applied(model, profile.regions, decision, on_mismatch)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[Said]:
    """What was said in each call of a region."""
    found: list[Said] = []
    finish = frame.Frame._finish

    def noting(self: Any, record: Any) -> None:
        found.append([(str(op.func), op.where, op.policy) for op in record.ops])
        finish(self, record)

    monkeypatch.setattr(frame.Frame, "_finish", noting)
    return found


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    asked: Counter[str] = Counter()
    answer = PlannedPolicy.planned_answer

    def counted(self: Any, op: Any, module: str, where: Any, output: Any) -> Any:
        asked[str(op)] += 1
        return answer(self, op, module, where, output)

    monkeypatch.setattr(PlannedPolicy, "planned_answer", counted)
    return asked


SAME, OTHER = rows(0.1, 0.4, 0.9, 0.5, 0.2, 0.7), rows(0.1, 0.2, 0.9, 0.5, 0.2, 0.7)
FEWER = rows(0.1, 0.4, 0.9, 0.5, 0.2)  # the first op looks different


@pytest.mark.parametrize(
    "batches",
    [(SAME,) * 4, (SAME, SAME, OTHER, SAME, OTHER, OTHER), (SAME, FEWER, SAME, SAME, OTHER, FEWER)],
    ids=["all alike", "another number of rows in the middle", "all different from the first op on"],
)
def test_a_plan_says_the_same_whether_it_is_asked_or_its_answers_are_remembered(
    batches: tuple[torch.Tensor, ...], said: list[Said], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, remembering, asking = (Model(Mixture) for _ in range(3))
    gradients = []
    for model, forgets in ((plain, False), (remembering, False), (asking, True)):
        if model is not plain:
            applied(model, SAME, "recompute")
            said.clear()
        found = []
        for batch in batches:
            if forgets:
                region_function._known.clear()
            model.zero_grad()
            model(batch).backward()
            found.append([parameter.grad.clone() for parameter in model.parameters()])
        gradients.append(found)
        if model is remembering:
            remembered = list(said)
    assert remembered == said
    for plain_step, *others in zip(*gradients, strict=True):
        for other in others:
            assert all(map(torch.equal, plain_step, other))


def test_a_plan_is_not_asked_again_about_ops_that_look_as_before(questions: Counter[str]) -> None:
    model = Model(Mixture)
    applied(model, SAME)
    asked = []
    for batch in (SAME, SAME, SAME, OTHER):
        questions.clear()
        model(batch).backward()
        asked.append(sum(questions.values()))
    assert asked[0] > 0
    assert asked[1:3] == [0, 0]
    assert 0 < asked[3] < asked[0]


def test_another_plan_is_asked_about_ops_that_an_earlier_one_knew(said: list[Said]) -> None:
    model = Model(Mixture)
    first = applied(model, SAME)
    for _ in range(2):
        model(SAME).backward()
    first.remove()
    profile = ProfiledModel(model, SAME).profile()
    said.clear()
    nothing = [base_of(region, frozenset(), can_swap=False).decision for region in profile.regions]
    Applied(model, profile.regions, nothing, "error")
    for _ in range(3):
        model(SAME).backward()
    assert not any(policy.keeps for call in said for _, _, policy in call)


class Rounds(Model):
    """Runs its blocks twice in each step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return x.sum()


def forward_that_fails(model: Rounds) -> None:
    hook = model.blocks[1].register_forward_pre_hook(lambda *given: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(SAME)
    hook.remove()


@pytest.mark.parametrize(
    "disturb",
    [lambda model: None, forward_that_fails, lambda model: model.blocks[0](SAME), lambda model: copy.deepcopy(model)(SAME),
     lambda model: torch_checkpoint(model, SAME.clone().requires_grad_(), use_reentrant=False).backward()],
    ids=["nothing", "a forward that does not come to its end", "a block by itself", "a copy", "a region around the model"],
)  # fmt: skip
def test_blocks_that_run_more_than_once_begin_with_their_first_call_in_every_forward(
    disturb: Callable[[Rounds], object], said: list[Said]
) -> None:
    model = Rounds(Expert)
    profile = ProfiledModel(model, SAME).profile()
    assert [region.path for region in profile.regions] == ["blocks.0", "blocks.1"] * 2
    decision = []
    for number, region in enumerate(profile.regions):
        needed = [index for index, op in enumerate(region.ops) if op.is_needed]
        decision.append(base_of(region, frozenset(needed if number < 2 else []), can_swap=False).decision)
    plan = Applied(model, profile.regions, decision, "error")
    for _ in range(2):
        disturb(model)
        with torch.no_grad():
            model(SAME)
        said.clear()
        model(SAME).backward()
        assert [any(policy.keeps for _, _, policy in call) for call in said] == [True, True, False, False]
    plan.remove()
    assert not model._forward_pre_hooks


def test_a_module_that_is_called_twice_is_told_apart_in_every_call(questions: Counter[str], said: list[Said]) -> None:
    model = Model(Twice)
    applied(model, SAME)
    said.clear()
    for _ in range(3):
        questions.clear()
        model(SAME).backward()
        assert sum(questions.values()) > 0
    assert said[:2] == said[2:4] == said[4:6]
    assert {where.call for _, where, _ in said[0]} == {0, 1}


def test_ops_that_are_not_planned_are_counted_in_every_step() -> None:
    model = Model(Mixture)
    plan = applied(model, SAME, "recompute")
    model(SAME).backward()
    for block in model.blocks:
        block.also = True
    counts = []
    for _ in range(3):
        model(SAME).backward()
        counts.append(plan.mismatches.counts["ops that were not planned"])
    assert counts == [2, 4, 6]


def test_what_was_known_is_counted_when_the_first_op_differs() -> None:
    """Of a call that is not over, the next op is the next; of one that is over, the module was called once."""
    found = []

    class Inner(nn.Module):
        def forward(self, counts: bool) -> None:
            if not counts:
                calls.catch_up((name, each) for name, each in met if each.module == "inner" or name == "add")
            found.append(calls.innermost(1).count("mul"))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, counts: bool) -> None:
            if counts:
                met.append(("add", calls.innermost(1).count("add")))
            self.inner(counts)
            met.append(("mul", found[-1]))
            self.inner(True)
            found.append(calls.innermost(1).count("add"))

    outer, met = Outer(), []
    calls = ModuleCalls(ModulePaths(outer), CALL)
    outer(True)
    assert [(each.module, each.call, each.occurrence) for each in found] == [
        ("inner", 0, 0),
        ("inner", 1, 1),
        ("", 0, 1),
    ]
    found.clear()
    calls = ModuleCalls(ModulePaths(outer), CALL)
    outer(False)
    # The call in which it caught up had met one `mul` already, and the module around it one `add`.
    assert [(each.module, each.call, each.occurrence, each.occurrence_in_call) for each in found] == [
        ("inner", 0, 1, 1), ("inner", 1, 2, 0), ("", 0, 1, 1),
    ]  # fmt: skip


def test_planned_regions_leave_less_to_the_garbage_collector_than_pytorchs_selective_checkpoint() -> None:
    """What lives from forward to backward is looked at by every collection in between, and much of it brings on those of everything."""

    def num_objects(step: Any) -> int:
        for _ in range(3):
            step().backward()
        gc.collect()
        gc.disable()
        try:
            before = len(gc.get_objects())
            loss = step()
            after = len(gc.get_objects())
            loss.backward()
        finally:
            gc.enable()
        return after - before

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(8):
                x = x + torch.sigmoid(x) * self.down(torch.nn.functional.gelu(self.up(x)))
            return x

    addmm = torch.ops.aten.addmm.default
    plain, planned = Model(Block), Model(Block)
    batch = torch.randn(4, 8)

    def selective() -> torch.Tensor:
        x = batch
        for block in plain.blocks:
            contexts = lambda: create_selective_checkpoint_contexts([addmm])  # noqa: E731 - as everybody writes it
            x = torch_checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return x.sum()

    profile = ProfiledModel(planned, batch).profile()
    decision = [
        base_of(region, frozenset(i for i, op in enumerate(region.ops) if op.is_needed and "addmm" in op.name), can_swap=False).decision
        for region in profile.regions
    ]  # fmt: skip
    Applied(planned, profile.regions, decision, "error")
    theirs, ours = num_objects(selective), num_objects(lambda: planned(batch))
    assert 0 < ours < theirs


class Accumulates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for _ in range(6):
            out.add_(self.layer(x).sin())
        return out


def test_memory_that_is_written_in_place_is_there_once() -> None:
    model, batch = Model(Accumulates), torch.randn(256, 64)
    profiled = ProfiledModel(model, batch)
    profile = profiled.profile()
    ops = profile.regions[0].ops
    writes = [index for index, op in enumerate(ops) if "add_" in op.name]
    assert len(writes) == 6
    ends = [ops[index].makes[0].freed_after for index in writes]
    assert ends == [*(index - 1 for index in writes[1:]), None]
    # Every block recomputed, moment by moment and in truth.
    decision = tuple(map(recompute_all, profile.regions))
    drawn_bytes = timeline_under(profile, decision, candidates(profile)[0]).peak_bytes - profile.base_bytes
    plan = Applied(model, profile.regions, decision, "error")
    model(batch).backward()
    real_bytes = profiled.peak_bytes()
    plan.remove()
    assert abs(drawn_bytes - real_bytes) < batch.nbytes
