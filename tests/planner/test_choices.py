"""A choice is its word: in files, tables and messages, and for whoever compares."""

from __future__ import annotations

import copy
import json
import pickle

import pytest

from hyper_parallel.core.planner.model.choices import Choice, RegionDecision, choices_of, words_of
from hyper_parallel.core.planner.model.profile import ProfiledOp, step_as_dict
from hyper_parallel.core.planner.plan.table import table
from support.made_plans import profile_of

WORDS = ["save", "swap", "recompute"]


def test_there_are_three_choices_in_the_order_of_a_file() -> None:
    assert [choice.value for choice in Choice] == WORDS
    assert ProfiledOp("", "op", 0, 0, 0.0, ()).choices == tuple(WORDS)


@pytest.mark.parametrize("choice", Choice)
def test_a_choice_is_shown_as_its_word(choice: Choice) -> None:
    assert [str(choice), f"{choice}", format(choice), f"{choice:>9}".strip(), "%s" % choice] == [choice.value] * 5  # noqa: UP031
    assert repr(choice) == repr(choice.value)
    assert f"{choice:>10}" == choice.value.rjust(10)
    assert json.dumps({choice: [choice]}, indent=1) == json.dumps({choice.value: [choice.value]}, indent=1)
    assert table(["block", "suits"], [["a", choice]]) == table(["block", "suits"], [["a", choice.value]])


@pytest.mark.parametrize("choice", Choice)
def test_a_choice_is_equal_to_its_word_and_stays_the_same_object_in_copies(choice: Choice) -> None:
    assert choice == choice.value
    assert hash(choice) == hash(choice.value)
    assert pickle.loads(pickle.dumps(choice)) is choice  # noqa: S301 - our own
    assert copy.deepcopy((choice,))[0] is choice


def test_words_of_a_file_become_choices_and_choices_words() -> None:
    found = choices_of([*WORDS, None])
    assert found == (*Choice, None)
    assert all(type(choice) is Choice for choice in found[:3])
    assert [type(word) for word in words_of(found)] == [str, str, str, type(None)]
    assert choices_of(["compress", 3, []]) == ("compress", 3, []), "whoever checks the file says where they stand"
    with pytest.raises(TypeError):
        choices_of(None)  # type: ignore[arg-type]


def test_a_decision_is_shown_with_words() -> None:
    assert repr(RegionDecision(False, (Choice.SAVE, None), (Choice.SWAP,))) == (
        "RegionDecision(is_plain=False, ops=('save', None), inputs=('swap',))"
    )


def test_a_profile_as_a_dict_has_plain_words() -> None:
    words = [word for region in step_as_dict(profile_of())["regions"] for op in region["ops"] for word in op["choices"]]
    assert {*words} == {*WORDS}
    assert {type(word) for word in words} == {str}
