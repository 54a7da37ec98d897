"""The largest size that fits: proved at that size, and seen not to fit at the next."""

from __future__ import annotations

import gc
import types
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import hyper_parallel as hp  # noqa: E402
from hyper_parallel.core.planner.plan import largest as search  # noqa: E402
from hyper_parallel.core.planner.solve.solver import BudgetError  # noqa: E402
from hyper_parallel.platform.torch.planner import link  # noqa: E402
from hyper_parallel.platform.torch.planner.profiling import ProfiledModel  # noqa: E402
from support import planned_models as models  # noqa: E402
from support.limited_memory import LimitedMemory  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_disk")
MIB = 1024**2


class Attention(torch.nn.Module):
    """Keeps scores of all pairs of positions: bytes grow with the square of the length."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            torch.nn.LayerNorm(dim),
            torch.nn.Linear(dim, 3 * dim),
            torch.nn.Linear(dim, dim),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out((q @ k.transpose(-1, -2)).softmax(-1) @ v)


class Reader(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.positions = torch.nn.Embedding(512, 32)
        self.blocks = torch.nn.ModuleList(Attention(32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def rows(n: int) -> torch.Tensor:
    return torch.randn(8 * n, 32, generator=torch.Generator().manual_seed(n))


def sequence(n: int) -> torch.Tensor:
    return torch.randn(1, n, 32, generator=torch.Generator().manual_seed(n))


def check(model: Any, make_batch: Any, budget: int, found: hp.Largest) -> None:
    """It fits and the next one does not, by other means than the search itself."""
    assert found.plan.measured is not None
    assert found.peak_bytes <= budget
    profiled = ProfiledModel(model, make_batch(found.n))
    found.plan.apply(model)
    try:
        assert profiled.peak_bytes() + profiled.base_bytes() <= budget
    finally:
        found.plan.remove(model)
    assert found.next is not None
    assert found.next.n == found.n + 1
    with pytest.raises(BudgetError):
        hp.plan_memory(model, make_batch(found.n + 1), budget=budget, progress=False)


@pytest.mark.parametrize("budget", [3 * MIB, 4 * MIB])
def test_the_largest_batch_fits_and_the_next_does_not(budget: int) -> None:
    model = models.make("mlp")
    found = hp.largest(model, rows, budget, progress=False)
    check(model, rows, budget, found)
    assert found.n > 4
    plain = [n for n in range(1, found.n + 1) if fits_plainly(model, n, budget)]
    assert found.n > len(plain), "a plan makes room"
    assert len(found.tried) <= 9, found


def fits_plainly(model: Any, n: int, budget: int) -> bool:
    profiled = ProfiledModel(model, rows(n))
    return profiled.peak_bytes() + profiled.base_bytes() <= budget


def test_the_longest_sequence_is_found_though_bytes_grow_with_its_square() -> None:
    torch.manual_seed(0)
    model = Reader()
    found = hp.largest(model, sequence, 3 * MIB, progress=False)
    check(model, sequence, 3 * MIB, found)
    assert found.n > 50
    assert len(found.tried) <= 10, found


def test_a_hugging_face_model_with_a_dict_as_batch() -> None:
    model = models.make("llama")
    budget = 3 * MIB
    found = hp.largest(model, lambda n: models.batch("llama", size=n), budget, progress=False)
    check(model, lambda n: models.batch("llama", size=n), budget, found)


def test_what_is_found_is_printed_and_goes_to_json() -> None:
    found = hp.largest(models.make("mlp"), rows, 3 * MIB, progress=False)
    text = str(found)
    assert f"The largest n is {found.n}" in text
    assert f"n = {found.n + 1} would need at least" in text
    data = found.as_dict()
    assert data["n"] == found.n
    assert data["peak_bytes"] <= data["plan"]["budget_bytes"] == 3 * MIB
    assert [each["n"] for each in data["tried"]] == sorted({each.n for each in found.tried})
    assert found.predicted_peak_bytes <= 3 * MIB


def test_at_most_ends_the_search_and_the_plain_step_is_measured() -> None:
    found = hp.largest(models.make("mlp"), rows, "1GiB", at_most=6, progress=False)
    assert found.n == 6
    assert found.next is None
    assert found.plan.is_empty
    assert found.plan.measured is not None
    assert "larger sizes were not asked for" in str(found)


def test_sizes_that_the_device_has_no_room_for_are_not_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "_CPU_BYTES", 64 * 1024)
    model = models.make("mlp")
    with_room = hp.largest(model, rows, 6 * MIB, at_most=30, progress=False)
    model.zero_grad()
    with LimitedMemory(model, 3 * MIB) as room:
        found = hp.largest(model, rows, 6 * MIB, at_most=30, progress=False)
        failures = room.num_failures
        assert failures
        found.plan.apply(model)
        model(rows(found.n)).backward()
        assert room.num_failures == failures
        found.plan.remove(model)
    assert found.n < with_room.n
    assert found.next is not None


def test_when_nothing_fits_the_smallest_peak_and_what_dominates_it_are_named() -> None:
    model = models.make("mlp")
    with pytest.raises(BudgetError, match=r"make_batch\(1\)") as caught:
        hp.largest(model, rows, "1MiB", progress=False)
    assert caught.value.smallest_bytes > MIB
    assert "alive when forward begins" in str(caught.value)
    hp.plan_memory(model, rows(1), budget=caught.value.smallest_bytes, progress=False)


def test_a_failure_of_make_batch_or_the_model_names_the_size() -> None:
    def ends(n: int) -> torch.Tensor:
        if n > 2:
            raise IndexError("no more samples")
        return rows(n)

    with pytest.raises(ValueError, match="no more samples") as caught:
        hp.largest(models.make("mlp"), ends, "1GiB", progress=False)
    assert "n = 4" in str(caught.value)
    assert "at_most=3" in str(caught.value)
    assert isinstance(caught.value.__cause__, IndexError)
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="index out of range") as caught:
        hp.largest(Reader(), lambda n: sequence(300 * n), "1GiB", progress=False)
    assert "n = 2" in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"make_batch": 3}, TypeError, "make_batch"),
        ({"budget": "40%"}, ValueError, "depend on n"),
        ({"budget": "many"}, ValueError, "budget"),
        ({"at_most": 0}, ValueError, "at_most"),
        ({"at_most": 2.5}, TypeError, "at_most"),
        ({"make_batch": lambda n: rows(1)}, ValueError, "the same for different sizes"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(wrong: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments: dict[str, Any] = {"make_batch": rows, "budget": "4MiB", "progress": False, **wrong}
    with pytest.raises(error, match=text):
        hp.largest(models.make("mlp"), **arguments)


def test_the_model_is_as_it_was_afterwards() -> None:
    model = models.make("convolution")
    models.loss_of(model, models.batch("convolution")).backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random_state = torch.get_rng_state()
    hp.largest(model, lambda n: models.batch("convolution", size=n), MIB, progress=False)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    for before, parameter in zip(gradients, model.parameters(), strict=True):
        assert torch.equal(before, parameter.grad)
    assert torch.equal(random_state, torch.get_rng_state())
    assert not hp.wrappers(model)


class Simulated:
    """Sizes whose smallest peak is a formula: how many of them does the search look at?"""

    def __init__(
        self, allowed: int, square: float, line: float, constant: float, noise: int = 0, too_careful: int = 0
    ) -> None:
        self.allowed = allowed
        self.too_careful = too_careful  # what a real step takes less than predicted
        self._terms = (square, line, constant)
        self._noise = noise
        self.report_progress = lambda what: None

    def profile(self, n: int) -> Any:
        return n, self.allowed

    def smallest_bytes(self, n: int) -> int:
        square, line, constant = self._terms
        return int(square * n * n + line * n + constant) + (n * 7919) % (self._noise + 1)

    def may_fit(self, tried: Any, n: int, allowed: int) -> bool:
        return bool(tried.smallest_bytes - allowed <= 2 * self.too_careful)

    def prove(self, n: int, profile: Any, allowed: int, *, names_smallest: bool = True) -> Any:
        if self.smallest_bytes(n) - self.too_careful > allowed:
            raise BudgetError("It does not fit.")


@pytest.mark.parametrize("too_careful", [1, 999, 1001, 4500])
def test_where_the_prediction_is_too_careful_real_steps_tell(too_careful: int) -> None:
    sizes = Simulated(100_000, 0.0, 1000.0, 0.0, too_careful=too_careful)
    found = search._SizeSearch(sizes, None).run()  # type: ignore[arg-type]
    assert found.n == (100_000 + too_careful) // 1000
    assert found.next is not None
    assert (found.next.n, found.next.fits) == (found.n + 1, False)


@pytest.mark.parametrize("square", [0.0, 0.01, 30.0])
@pytest.mark.parametrize("noise", [0, 500])
@pytest.mark.parametrize("allowed", [10_000, 1_000_000, 10**9])
def test_few_sizes_are_looked_at(square: float, noise: int, allowed: int) -> None:
    sizes = Simulated(allowed, square, 1000.0, 5000.0, noise)
    found = search._SizeSearch(sizes, None).run()  # type: ignore[arg-type]
    assert sizes.smallest_bytes(found.n) <= allowed < sizes.smallest_bytes(found.n + 1)
    assert len(found.tried) <= 16, found.tried


def test_no_batch_is_left_behind_for_the_collector() -> None:
    """Garbage on a device is memory that the next step does not have."""
    batches: list[weakref.ref[torch.Tensor]] = []

    def make_batch(n: int) -> torch.Tensor:
        batch = rows(n)
        batches.append(weakref.ref(batch))
        return batch

    model = models.make("mlp")
    gc.collect()
    gc.disable()
    try:
        found = hp.largest(model, make_batch, 3 * MIB, progress=False)
        assert found.next is not None, "nothing was refused"
        assert [each for each in batches if each() is not None] == []
        with pytest.raises(BudgetError):
            hp.plan_memory(model, make_batch(found.n * 4), budget=3 * MIB, progress=False)
        assert batches[-1]() is None
    finally:
        gc.enable()


def test_where_no_terminal_is_long_work_says_now_and_then_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from hyper_parallel.core.planner.plan import progress

    now = [0.0]
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    for wanted, lines in ((True, ["the largest n: 3", "the largest n: 6"]), (False, [])):
        now[0] = 0.0
        with progress.progress_of(wanted, "the largest n", num_steps=8) as say:
            for number in range(8):
                say(str(number))
                now[0] += 10.0
        assert capsys.readouterr().err.splitlines() == lines
