"""The largest batch, or the longest sequence, that fits: found by prediction, proved with real steps."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, HyperParallelError, describe
from hyper_parallel.core.planner.model.profile import StepProfile
from hyper_parallel.core.planner.plan.backend import PlannerBackend, ProfiledModel, planner_of
from hyper_parallel.core.planner.plan.batch_words import check_loss_fn
from hyper_parallel.core.planner.plan.budget import budget_bytes as parse_budget
from hyper_parallel.core.planner.plan.budget import check_budget, is_percentage, reserve_bytes
from hyper_parallel.core.planner.plan.plan import MadeWith, Measured, MemoryPlan
from hyper_parallel.core.planner.plan.progress import Progress, progress_of
from hyper_parallel.core.planner.plan.proof import first_margin, planned, time_by_turns
from hyper_parallel.core.planner.plan.table import Table, html_of, plan_parts, text_of
from hyper_parallel.core.planner.search.choosing import smallest_budget
from hyper_parallel.core.planner.solve.solver import BudgetError
from hyper_parallel.core.swap.sizes import format_size
from hyper_parallel.platform.arguments import check_flag
from hyper_parallel.platform.opaque import Module

_FIRST = (1, 2, 4)  # are profiled in any case: what grows with n, and with its square
_FARTHEST = 8  # times the largest size that is known to fit: beyond, a prediction is not worth much


class Tried(NamedTuple):
    """A size that was looked at.

    `smallest_bytes`: the smallest peak that a plan can have there; None: a step did not fit in any way.
    """

    n: int
    smallest_bytes: int | None
    fits: bool


@dataclass(frozen=True)
class Largest:
    """What `largest` found. `print` shows it; `plan.apply(model)` makes the model train at this size.

    Attributes:
        n: the largest size that fits
        plan: for this size, proved with real steps
        next: the size after it, which does not fit; None: `at_most` ended the search
        tried: all sizes that were looked at, from small to large
    """

    n: int
    plan: MemoryPlan
    next: Tried | None
    tried: tuple[Tried, ...]

    @property
    def predicted_peak_bytes(self) -> int:
        return self.plan.predicted.peak_bytes

    @property
    def peak_bytes(self) -> int:
        """The peak of real steps at this size."""
        return self.predicted_peak_bytes if self.plan.measured is None else self.plan.measured.peak_bytes

    def __str__(self) -> str:
        return text_of(self._parts())

    def __repr__(self) -> str:
        return f"<Largest: n = {self.n}, {self.plan!r}>"

    def _repr_html_(self) -> str:
        return html_of(self._parts())

    def _parts(self) -> list[str | Table]:
        if self.next is None:
            end = "larger sizes were not asked for"
        elif self.next.smallest_bytes is None:
            end = f"a step with n = {self.next.n} runs out of memory whatever is recomputed or swapped"
        else:
            end = f"n = {self.next.n} would need at least {format_size(self.next.smallest_bytes)}"
        rows = [
            [
                str(tried.n),
                "-" if tried.smallest_bytes is None else format_size(tried.smallest_bytes),
                "yes" if tried.fits else "no",
            ]
            for tried in self.tried
        ]
        return [
            f"The largest n is {self.n}: a step needs {format_size(self.peak_bytes)} "
            f"(predicted: {format_size(self.predicted_peak_bytes)}) "
            f"of {format_size(self.plan.budget_bytes)}; {end}.",
            "",
            Table(["n", "smallest peak", "fits"], rows),
            "",
            *plan_parts(self.plan),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Give everything, for JSON."""
        return {
            "n": self.n,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "peak_bytes": self.peak_bytes,
            "next": None if self.next is None else self.next._asdict(),
            "tried": [tried._asdict() for tried in self.tried],
            "plan": self.plan.as_dict(),
        }


def largest(
    model: Module,
    make_batch: Callable[[int], Any],
    budget: int | str = "auto",
    *,
    at_most: int | None = None,
    loss_fn: Callable[[Any], Any] | None = None,
    regions: Sequence[Any] | None = None,
    optimizer: object = None,
    reserve: int | str = 0,
    keeps_output: bool = True,
    progress: bool | Progress = True,
) -> Largest:
    """Find the largest `n` for which a step with `make_batch(n)` fits into the budget, and the plan for it.

    A few sizes are profiled. From the smallest peak that a plan can have at each, the size that fits is predicted; it
    and the next one are profiled as well, and the plan for it is proved with real steps. Nothing is changed until
    `plan.apply(model)`.

    Args:
        model: the model, on its device and in the mode it trains in.
        make_batch: gives a batch of size n, be that its length or its number of samples: a tensor, a tuple of
            arguments, or a dict of keywords.
        budget: bytes or a size such as "24GiB", or "auto". As in `plan_memory`, but for percentages: these depend on n.
        at_most: where sizes end, for example with the positions that the model knows.
        loss_fn, regions, optimizer, reserve, keeps_output, progress: as in `plan_memory`.

    Raises:
        BudgetError (a ValueError): not even `make_batch(1)` fits; the smallest peak is named, and what it is made of.
        ValueError, TypeError: something in the arguments cannot be used; `make_batch` or the model failed at a size,
            which is named.

    Example:
        >>> import torch
        >>> blocks = (torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(4))
        >>> model = torch.nn.Sequential(torch.nn.Sequential(*blocks))
        >>> found = largest(
        ...     model, lambda n: torch.ones(n, 64), "512KiB", loss_fn=lambda y: y.sum(), progress=False, at_most=64
        ... )
        >>> found.peak_bytes <= 512 * 1024
        True
    """
    if not callable(make_batch):
        raise ArgumentTypeError(
            "`make_batch` gives a batch of a size.", expected="a function of n", got=describe(make_batch)
        )
    if is_percentage(budget):
        raise ArgumentError(
            "`budget` is a part of the activations, and these depend on n.",
            expected='bytes, a size such as "24GiB", or "auto"',
            got=describe(budget),
        )
    check_budget(budget)
    check_loss_fn(loss_fn)
    check_flag(keeps_output, "keeps_output")
    sizes = _Sizes(
        planner_of(model, "largest"),
        model,
        make_batch,
        budget,
        loss_fn,
        {
            "regions": regions,
            "optimizer": optimizer,
            "reserve_bytes": reserve_bytes(reserve),
            "keeps_output": keeps_output,
        },
    )
    with progress_of(progress, "the largest n", num_steps=60) as report_progress:
        sizes.report_progress = report_progress
        found = _SizeSearch(sizes, _checked(at_most)).run()
    found.plan.origin = MadeWith(loss_fn, optimizer, reserve_bytes(reserve))
    return found


def _checked(at_most: object) -> int | None:
    if at_most is None:
        return None
    if isinstance(at_most, bool) or not hasattr(at_most, "__index__"):
        raise ArgumentTypeError(
            "`at_most` is the last size that is asked for.", expected="a number", got=describe(at_most)
        )
    last = operator.index(at_most)
    if last < 1:
        raise ArgumentError("`at_most` leaves no size to try.", expected="1 or more", got=str(last))
    return last


class _Sizes:
    """What is known about the sizes of a model's batches, and how to learn more."""

    def __init__(
        self,
        planner: PlannerBackend,
        model: Any,
        make_batch: Callable[[int], Any],
        budget: int | str,
        loss_fn: Any,
        options: dict[str, Any],
    ) -> None:
        self.report_progress: Progress = lambda what: None
        self._planner = planner
        self._model = model
        self._make_batch = make_batch
        self._budget = budget
        self._loss_fn = loss_fn
        self._options = options
        self._device = planner.device_of(model)
        self._metas: dict[int, Any] = {}

    def profile(self, n: int) -> tuple[StepProfile, int] | None:
        """Profile a step of this size, and count the bytes that are allowed. None: it does not fit in any way."""
        with self._failures(n):
            profiled = self._profiled(n)
            if profiled is None:
                return None
            self._check_grows(n, profiled.batch)
            try:
                with profiled.preserved() as block, block:
                    profile: StepProfile = profiled.profile(lambda what: self.report_progress(f"n = {n}: {what}"))
            except BudgetError:
                return None
            return profile, self._allowed(profile)

    def smallest_bytes(self, profile: StepProfile) -> int:
        """Compute the smallest peak that a plan can have."""
        smallest = smallest_budget(profile, first_margin(profile))
        return min(smallest, profile.peak_bytes) if profile.is_plain_measured else smallest

    def may_fit(self, tried: Tried, profile: StepProfile, allowed_bytes: int) -> bool:
        """Say whether a size that does not fit by prediction is so close that only real steps can tell."""
        if tried.smallest_bytes is None:
            return False
        return tried.smallest_bytes - allowed_bytes <= first_margin(profile) + profile.activation_peak_bytes // 50

    def prove(self, n: int, profile: StepProfile, allowed_bytes: int, *, names_smallest: bool = True) -> MemoryPlan:
        """Run real steps under the plan for this size, and give that plan.

        Raises:
            BudgetError: no plan keeps the budget.
        """
        self.report_progress(f"n = {n}: solving and proving")
        with self._failures(n):
            profiled = self._profiled(n)
            if profiled is None:
                raise BudgetError("There is no room for the batch.", got=f"n = {n}")
            with profiled.preserved() as block, block:
                profiled.look_for_writes()
                plan = planned(profile, allowed_bytes, profiled, names_smallest=names_smallest)
                if plan.measured is None:  # the plain step, which needs no plan
                    plan.measured = Measured(profiled.peak_bytes() + profile.base_bytes)
                elif names_smallest:
                    time_by_turns(plan, profiled)
                return plan

    def _profiled(self, n: int) -> ProfiledModel | None:
        batch, said = self._planner.attempt(lambda: self._make_batch(n), self._device)
        if said is not None:
            return None
        return self._planner.profiled(self._model, batch, self._loss_fn, **self._options)

    def _allowed(self, profile: StepProfile) -> int:
        return parse_budget(self._budget, profile, self._planner.free_bytes(self._device))

    def _check_grows(self, n: int, batch: Any) -> None:
        self._metas[n] = self._planner.meta_of(batch)
        others = [other for other, meta in self._metas.items() if other != n and meta == self._metas[n]]
        if others:
            raise ArgumentError(
                "`make_batch` gives the same for different sizes.",
                expected="a batch that grows with n",
                got=f"{self._metas[n]} for n = {others[0]} and for n = {n}",
                do="Give at_most= if sizes end there.",
            )

    @contextlib.contextmanager
    def _failures(self, n: int) -> Iterator[None]:
        """Name the size where the user's code raises in this block."""
        try:
            yield
        except HyperParallelError:
            raise
        except Exception as error:
            raise ArgumentError(
                "`make_batch`, or a step of the model with what it gave, failed.",
                got=f"{type(error).__name__}: {error}",
                where=f"n = {n}",
                do=f"Give at_most={n - 1} if sizes end there."
                if n > 1
                else "Run the model once on make_batch(1) to see why.",
            ) from error


class _SizeSearch:
    """Two sizes, one that fits and one that does not, which come closer until they are neighbours.

    Invariant: fits is 0 or fits; fails is None, or does not fit and fits < fails.
    """

    def __init__(self, sizes: _Sizes, at_most: int | None) -> None:
        self._sizes = sizes
        self._at_most = at_most
        self._tried: dict[int, Tried] = {}
        self._profiles: dict[int, tuple[StepProfile, int]] = {}
        self._num_far = 0  # guesses that did not halve what is left
        self.fits = 0
        self.fails: int | None = None

    def run(self) -> Largest:
        while True:
            self._come_close()
            profile, allowed = self._profiles[self.fits]
            try:
                plan = self._sizes.prove(self.fits, profile, allowed)
            except BudgetError as error:
                if self.fits == 1:
                    raise _nothing_fits(error) from None
                self._note(self._tried[self.fits]._replace(fits=False))
                continue
            if self._next_fits_after_all():
                continue
            tried = tuple(self._tried[n] for n in sorted(self._tried))
            return Largest(self.fits, plan, None if self.fails is None else self._tried[self.fails], tried)

    def _next_fits_after_all(self) -> bool:
        """Prove the next size, and say whether the prediction was too careful about it."""
        n = self.fails
        if n is None or n not in self._profiles or not self._sizes.may_fit(self._tried[n], *self._profiles[n]):
            return False
        try:
            self._sizes.prove(n, *self._profiles[n], names_smallest=False)
        except BudgetError:
            return False
        self._note(self._tried[n]._replace(fits=True))
        return True

    def _come_close(self) -> None:
        while not self._is_over():
            self._try(self._next())
            if self.fails == 1:
                known = self._profiles.get(1)
                if known is None:
                    raise _nothing_fits(None)
                try:
                    self._sizes.prove(1, *known)
                except BudgetError as error:
                    raise _nothing_fits(error) from None
                self._note(self._tried[1]._replace(fits=True))  # the prediction was too careful

    def _is_over(self) -> bool:
        return self.fits > 0 and (self.fits == self._at_most or self.fails == self.fits + 1)

    def _try(self, n: int) -> None:
        known = self._sizes.profile(n)
        if known is None:
            self._note(Tried(n, None, False))
            return
        profile, allowed = known
        smallest = self._sizes.smallest_bytes(profile)
        self._profiles[n] = known
        self._note(Tried(n, smallest, smallest <= allowed))

    def _note(self, tried: Tried) -> None:
        self._tried[tried.n] = tried
        fitting = [known.n for known in self._tried.values() if known.fits]
        failing = [known.n for known in self._tried.values() if not known.fits]
        self.fails = min(failing, default=None)
        # A size above one that fails does not count, whatever was said about it.
        self.fits = max((n for n in fitting if self.fails is None or n < self.fails), default=0)

    def _next(self) -> int:
        """Choose the size to look at next: by prediction, and where that gets nowhere, in the middle."""
        last = self._at_most if self.fails is None else self.fails - 1
        first = next((n for n in _FIRST if n not in self._tried and (last is None or n <= last)), None)
        if first is not None and self.fails is None:
            return first
        low = self.fits + 1
        high = _FARTHEST * max(self.fits, 1) if last is None else min(last, _FARTHEST * max(self.fits, 1))
        guess = min(max(self._predicted(), low), max(high, low))
        if self.fails is not None:
            left = self.fails - self.fits
            self._num_far = self._num_far + 1 if min(guess - self.fits, self.fails - guess) * 4 < left else 0
            if self._num_far > 2:  # it creeps
                self._num_far = 0
                return (self.fits + self.fails) // 2
        return guess

    def _predicted(self) -> int:
        """Predict the largest size whose smallest peak is within the budget, by what the nearest sizes took."""
        known = [tried for tried in self._tried.values() if tried.smallest_bytes is not None]
        known.sort(key=lambda tried: (abs(tried.n - self.fits), tried.n))
        points = [(float(tried.n), float(tried.smallest_bytes or 0)) for tried in known[:3]]
        allowed = self._profiles[max(self.fits, 1)][1]
        fits, fails = self.fits, _FARTHEST * max(self.fits, 1) + 1
        while fails - fits > 1:
            middle = (fits + fails) // 2
            if _extrapolated(points, middle) <= allowed:
                fits = middle
            else:
                fails = middle
        return fits


def _extrapolated(points: Sequence[tuple[float, float]], x: float) -> float:
    """Evaluate the curve through all points: constant, line or parabola."""
    total = 0.0
    for index, (own, value) in enumerate(points):
        weight = 1.0
        for other, (there, _) in enumerate(points):
            if other != index:
                weight *= (x - there) / (own - there)
        total += weight * value
    return total


def _nothing_fits(error: BudgetError | None) -> BudgetError:
    if error is None:
        return BudgetError(
            "Not even make_batch(1) fits: a step runs out of memory whatever is recomputed or swapped.",
            do="Use a smaller model, or name smaller blocks: regions=[...].",
        )
    return BudgetError(
        "Not even make_batch(1) fits into the budget.",
        smallest_bytes=error.smallest_bytes,
        expected=error.expected,
        got=error.got,
        where=error.where,
        do=error.do,
    )
