"""Every public function, method and operation of the platform, called with values that make no sense, ends in words of ours."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel.platform import selection
from hyper_parallel.platform.arguments import in_our_words
from support import wrong_values
from support.campaign import share


@pytest.fixture(autouse=True)
def in_a_process_that_has_chosen_nothing() -> Iterator[None]:
    selection._forget()
    yield
    selection._forget()


@pytest.mark.parametrize("framework", ["torch", "mindspore"])
def test_wrong_values_end_in_words_of_ours_wherever_they_are_given(framework: str) -> None:
    pytest.importorskip(framework)
    assert wrong_values.run(framework, share(8744, 240)) == []


def test_the_campaign_calls_everything_that_is_public() -> None:
    pytest.importorskip("torch")
    names = {call.name.partition(".")[0] for call in wrong_values.calls(wrong_values.Words("torch"))}
    assert names >= {
        "platform",
        "plan_memory",
        "full",
        "shard_module",
        "policies",
        "mesh",
        "layout",
        "plan",
        "describe",
    }


def test_what_a_framework_says_of_memory_is_not_said_of_the_arguments() -> None:
    with pytest.raises(RuntimeError, match="^not enough memory$"), in_our_words("zeros", size=[2]):
        raise RuntimeError("not enough memory")
    with (
        pytest.raises(ArgumentTypeError, match=r"`zeros`.*\n.*size=\[2\].*no such thing"),
        in_our_words("zeros", size=[2]),
    ):
        raise TypeError("no such thing\nin the depth")
    with pytest.raises(ArgumentError, match="no such thing"), in_our_words("zeros", size=[2]):
        raise RuntimeError("no such thing")


@pytest.mark.parametrize("limit", ["text", None, -3, 2.5])
def test_a_value_is_described_whatever_the_limit_is(limit: object) -> None:
    assert describe(wrong_values.NoRepr(), limit) == "<its repr raises OwnError> (NoRepr)"  # type: ignore[arg-type]
