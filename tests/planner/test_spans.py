"""From what was measured to the sizes and peaks of a profile."""

from __future__ import annotations

import dataclasses

import pytest

from hyper_parallel.core.planner.model.choices import plain, recompute_all
from hyper_parallel.core.planner.model.measured_span import MeasuredSpan
from hyper_parallel.core.planner.model.problem import Problem, evaluate
from hyper_parallel.core.planner.model.profile import Input, ProfiledOp, Region, StepProfile, StorageFacts, Turn, alike
from hyper_parallel.core.planner.model.spans import as_allocated, with_peaks

NUM, INPUT, MADE, WORK = 4, 1000, 4000, 500


def block(path: str) -> Region:
    op = ProfiledOp("", "op", 0, 0, 1.0, (StorageFacts(MADE, is_residual=True),), reads_inputs=(0,))
    inputs = (Input(StorageFacts(INPUT, is_residual=True)),)
    return Region(path, 0, (op,), inputs, 1.0, 2.0, 0, 0)


def spans(kept: int, *, rounded: int = 0, outside: int = 0) -> list[MeasuredSpan]:
    """Of a step whose blocks keep so much of what they make; of `rounded`, what each keeps is larger by so much than it should be."""
    found, level = [], outside + INPUT
    for index in range(NUM):
        found.append(MeasuredSpan(f"forward {index}", level, level + MADE + rounded + WORK))
        level += kept + (rounded if kept else 0) + INPUT
        found.append(MeasuredSpan(f"after {index}", level, level))
    found.append(MeasuredSpan("turn", level, level))
    for index in reversed(range(NUM)):
        begin = level
        level -= kept + (rounded if kept else 0) + INPUT
        found.append(MeasuredSpan(f"backward {index}", begin, level + MADE + rounded + WORK))
    return found


@pytest.fixture
def regions() -> list[Region]:
    return [block(f"blocks.{index}") for index in range(NUM)]


def test_what_an_allocator_rounds_up_belongs_to_what_is_kept_and_not_to_the_blocks_after_it(
    regions: list[Region],
) -> None:
    decision = [recompute_all(region) for region in regions]
    measured, again = spans(MADE, rounded=40), spans(0, rounded=40)

    def peaks(found: list[Region]) -> tuple[int, int]:
        found, turn_bytes = with_peaks(found, measured, again, decision)
        profile = StepProfile(tuple(found), 0, 0, 0.0, Turn(0.0, turn_bytes), None, {})
        problem = Problem(profile, 0, 0, 0)
        return tuple(
            evaluate(problem, tuple(each(region) for region in found)).peak_bytes for each in (plain, recompute_all)
        )

    real = tuple(max(span.peak_bytes for span in each) for each in (measured, again))
    as_asked = peaks(regions)
    assert as_asked[1] > real[1] + 2 * 40  # what three blocks before it rounded up counts for the last
    allocated = peaks(as_allocated(regions, measured, again, decision))
    assert allocated[0] == pytest.approx(real[0], abs=NUM)  # sizes are whole bytes
    assert real[1] <= allocated[1] <= real[1] + 40


def test_blocks_that_are_alike_stay_so(regions: list[Region]) -> None:
    decision = [recompute_all(region) for region in regions]
    found = as_allocated(regions, spans(MADE, rounded=40), spans(0, rounded=40), decision)
    assert [op.num_bytes for region in found for op in region.ops] == [4040] * NUM
    assert len(alike(found)) == 1


@pytest.mark.parametrize("rounded", [-40, 0, 400])
def test_what_is_no_rounding_changes_no_size(regions: list[Region], rounded: int) -> None:
    decision = [recompute_all(region) for region in regions]
    assert as_allocated(regions, spans(MADE, rounded=rounded), spans(0), decision) == regions


def test_what_is_kept_outside_of_all_blocks_is_no_rounding(regions: list[Region]) -> None:
    decision = [recompute_all(region) for region in regions]
    assert as_allocated(regions, spans(MADE, outside=100), spans(0, outside=100), decision) == regions


def test_states_of_generators_that_regions_note_are_no_negative_rounding(regions: list[Region]) -> None:
    noting = [dataclasses.replace(region, note_bytes=10) for region in regions]
    decision = [recompute_all(region) for region in noting]
    again = [span._replace(level_bytes=span.level_bytes + 10 * NUM) for span in spans(0)]
    assert as_allocated(noting, spans(MADE), again, decision) == noting
