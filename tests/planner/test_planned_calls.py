"""A planned model is called as its user likes: inside of another module, or in parts. The blocks are the same, and so is the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import hyper_parallel as hp  # noqa: E402
from hyper_parallel.core.planner.model.choices import save_all  # noqa: E402
from hyper_parallel.core.planner.plan.plan import Predicted  # noqa: E402
from hyper_parallel.core.planner.search.settings import candidates  # noqa: E402
from hyper_parallel.platform.torch.planner.profiling import ProfiledModel  # noqa: E402
from support import planned_models as models  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_disk")


class Block(nn.Module):
    """`scale` may be in several blocks; `outside` is called and is in none."""

    def __init__(self, scale: nn.Module, outside: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.scale = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(96, 32), scale
        self.others = (outside,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.others[0](self.scale(self.down(torch.nn.functional.gelu(self.up(self.norm(x))))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.act = nn.Tanh(), nn.GELU()
        self.first = nn.Linear(32, 32)
        self.blocks = nn.Sequential(*(Block(self.scale, self.act) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(self.first(x))


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module, *, is_hidden: bool = False) -> None:
        super().__init__()
        self.hidden = (model,) if is_hidden else ()
        if not is_hidden:
            self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return square(self.hidden[0](x) if self.hidden else self.model(x))


def square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def batch() -> torch.Tensor:
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(0))


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def saving_plan(model: nn.Module, inputs: Any, loss_fn: Any = None) -> hp.MemoryPlan:
    """All that backward needs is saved, op by op: each is to be met where it was profiled."""
    profile = ProfiledModel(model, inputs, loss_fn).profile()
    decision = tuple(map(save_all, profile.regions))
    assert all(each.is_managed for each in decision)
    predicted = Predicted(profile.peak_bytes, profile.step_ms)
    return hp.MemoryPlan(profile, decision, candidates(profile)[0], profile.peak_bytes, predicted)


def gradients(of: nn.Module, loss_of: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    """Of the third step: from then on nothing is asked that was answered before."""
    for _ in range(3):
        of.zero_grad()
        loss_of().backward()
    return [parameter.grad.clone() for parameter in of.parameters()]


def check(planned: nn.Module, called: nn.Module, loss_of: Callable[[], torch.Tensor]) -> None:
    plain = gradients(called, loss_of)
    plan = saving_plan(planned, batch(), None if isinstance(planned, WithLoss) else square)
    plan.apply(planned)
    try:
        assert all(map(torch.equal, gradients(called, loss_of), plain))
        assert plan.stats(planned) == {}
    finally:
        plan.remove(planned)


CALLS: dict[str, Callable[[Model], torch.Tensor]] = {
    "as it is": lambda called: square(called(batch())),
    "inside of a module with the loss": lambda called: WithLoss(called)(batch()),
    "inside of a module that does not register it": lambda called: WithLoss(called, is_hidden=True)(batch()),
    "in parts": lambda called: square(called.blocks(called.first(batch()))),
    "block by block": lambda called: square(one_by_one(called.blocks, called.first(batch()))),
}


def one_by_one(blocks: Any, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = block(x)
    return x


@pytest.mark.parametrize("call", CALLS)
def test_a_planned_model_can_be_called_in_any_way(call: str) -> None:
    called = model()
    check(called, called, lambda: CALLS[call](called))


@pytest.mark.parametrize("call", CALLS)
def test_a_model_that_was_planned_inside_of_another_can_be_called_in_any_way(call: str) -> None:
    called = model()
    check(WithLoss(called), called, lambda: CALLS[call](called))


def test_a_planned_model_can_be_called_in_different_ways_in_turn() -> None:
    called = model()
    inside = WithLoss(called)
    check(called, called, lambda: square(called(batch())) + inside(batch()))


def test_the_parts_of_a_language_model_can_be_called_by_hand() -> None:
    llama, ids = models.make("llama").eval(), models.batch("llama")["input_ids"]
    plan = saving_plan(llama, {"input_ids": ids}, lambda out: square(out.logits))
    plan.apply(llama)
    square(llama.lm_head(llama.model(ids).last_hidden_state)).backward()
    assert plan.stats(llama) == {}
    plan.remove(llama)


def test_an_error_about_a_planned_op_names_it_as_the_model_that_runs_does() -> None:
    called = model()
    plan = saving_plan(called, batch(), square)
    plan.apply(called)
    called.blocks[0].norm = nn.Identity()
    with pytest.raises(hp.HyperParallelError, match=r"blocks\.0\.norm"):
        square(called(batch())).backward()
    plan.remove(called)


# What is around the blocks


class Casting(Model):
    """Switches autocast on itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return super().forward(x)


@pytest.fixture
def compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def in_part(called: Model) -> Model:
    called.blocks = torch.compile(called.blocks, backend="eager")
    return called


def in_place(called: Model) -> Model:
    called.compile(backend="eager")
    return called


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("compiled", [lambda m: torch.compile(m, backend="eager"), in_part, in_place])
def test_a_model_that_is_compiled_as_a_whole_is_refused(compiled: Callable[[Model], Any]) -> None:
    called = compiled(model())
    with pytest.raises(ValueError, match="Compile the blocks"):
        hp.plan_memory(called, batch(), loss_fn=square, progress=False)


@pytest.mark.usefixtures("compiler")
def test_a_plan_is_not_put_on_a_model_that_was_compiled_since() -> None:
    called = model()
    plan = saving_plan(called, batch(), square)
    with pytest.raises(ValueError, match="Compile the blocks"):
        plan.apply(in_place(called))
    assert hp.wrappers(called) == []


@pytest.mark.usefixtures("compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler's own look at residuals
def test_compiling_a_planned_model_as_a_whole_says_to_compile_the_blocks() -> None:
    called = model()
    plan = saving_plan(called, batch(), square)
    plan.apply(called)
    with pytest.raises(RuntimeError, match="Compile the blocks"):
        torch.compile(called, backend="eager")(batch())
    plan.remove(called)


def test_another_autocast_than_the_planned_one_is_named() -> None:
    called = model()
    plan = saving_plan(called, batch(), square)
    plan.apply(called)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(RuntimeError, match="autocast off, got bfloat16"):
        called(batch())
    plan.remove(called)


def test_an_autocast_of_the_model_itself_is_no_other() -> None:
    called = Casting()
    plan = saving_plan(called, batch(), square)
    plan.apply(called)
    called.blocks[0].norm = nn.Identity()
    with pytest.raises(RuntimeError, match="a batch like this one"):
        called(batch())
    plan.remove(called)


class Bags(nn.Module):
    def __init__(self, mode: str) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(16, 32, mode=mode)
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        indices = (x.detach() * 10).long().abs() % 16
        return x + self.linear(torch.tanh(self.bags(indices)))


def test_an_op_that_is_called_with_and_without_its_defaults_is_the_same_op() -> None:
    """PyTorch names the optional weights of a bag of embeddings under one mode, and not under two."""
    model, x = nn.Sequential(Bags("sum"), Bags("mean"), Bags("max")), torch.randn(8, 32)
    profile = ProfiledModel(model, x, lambda y: y.sum()).profile()
    assert len(profile.regions) == 3
