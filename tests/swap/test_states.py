"""The table of states: what is listed happens, everything else raises."""

from __future__ import annotations

import itertools

import pytest

from hyper_parallel.core.swap.states import TRANSITIONS, Change, SlotState, after

EVERY = list(itertools.product(SlotState, Change))


@pytest.mark.parametrize(("state", "change"), EVERY, ids=lambda value: value.name)
def test_a_change_is_listed_or_raises_with_label_state_and_what_was_expected(state: SlotState, change: Change) -> None:
    if (state, change) in TRANSITIONS:
        assert after(state, change, label="layer 3") is TRANSITIONS[state, change]
    else:
        with pytest.raises(RuntimeError) as caught:
            after(state, change, label="layer 3")
        text = str(caught.value)
        assert "layer 3" in text
        assert f"got state {state.value}" in text
        assert change.value in text
        assert all(s.value in text for s, c in TRANSITIONS if c is change)


def test_every_state_but_that_of_values_without_storage_can_be_reached_and_left() -> None:
    moving = set(SlotState) - {SlotState.NON_TENSOR}
    reached = {after(s, c, label="", on_disk=d) for s, c in TRANSITIONS for d in (False, True)}
    assert reached == moving
    assert {state for state, _ in TRANSITIONS} == moving


def test_a_block_of_a_file_makes_the_state_disk_in_place_of_host() -> None:
    for state, change in TRANSITIONS:
        plain, on_disk = after(state, change, label=""), after(state, change, label="", on_disk=True)
        assert on_disk is (SlotState.DISK if plain is SlotState.HOST else plain)


def test_the_values_are_those_of_the_specification() -> None:
    assert [state.value for state in SlotState] == ["device", "d2h", "host", "disk", "h2d", "non_tensor"]
