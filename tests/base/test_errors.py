"""Errors say what failed, what was expected and got, where, and one thing to do."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from hyper_parallel._base import errors
from hyper_parallel._base.errors import HyperParallelError, describe

CLASSES = [
    value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, HyperParallelError)
]


def test_the_parts_make_three_lines() -> None:
    error = HyperParallelError("It broke.", expected="3", got="4", where="layers.3", do="Mend it.")
    assert str(error) == "It broke.\nExpected 3, got 4; layers.3.\nMend it."


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ({}, "It broke."),
        ({"got": "4"}, "It broke.\nGot 4."),
        ({"where": "layers.3"}, "It broke.\nIn layers.3."),
        ({"do": "Mend it."}, "It broke.\nMend it."),
        ({"expected": "3", "where": "rank 2"}, "It broke.\nExpected 3; rank 2."),
    ],
)
def test_absent_parts_leave_no_gaps(parts: dict[str, str], text: str) -> None:
    assert str(HyperParallelError("It broke.", **parts)) == text


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_survives_the_way_to_another_process(cls: type[HyperParallelError]) -> None:
    error = cls("It broke.", expected="3", got="4", where="here", do="Mend it.")
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert type(copy) is cls
    assert str(copy) == str(error)
    assert (copy.what, copy.expected, copy.got, copy.where, copy.do) == ("It broke.", "3", "4", "here", "Mend it.")


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if cls is not HyperParallelError], ids=lambda cls: cls.__name__)
def test_every_error_is_also_the_built_in_a_user_would_catch(cls: type[HyperParallelError]) -> None:
    built_in = {ValueError, TypeError, RuntimeError, ImportError, NotImplementedError, MemoryError}
    assert built_in & set(cls.__mro__)


def test_values_are_described_shortly_and_arrays_by_shape() -> None:
    assert describe(None) == "None"
    assert describe("a") == "'a' (str)"
    assert describe(np.zeros((2, 3), np.float32)) == "ndarray float32[2, 3]"
    assert len(describe("x" * 10_000)) < 120
    assert describe(np.int64(3)) == "3 (int64)"
    assert describe([1, (np.zeros(2),), {"a": None}]) == "[1, (ndarray float64[2],), {'a': None}] (list)"


class Hostile:
    shape = property(lambda self: 1 / 0)

    def __repr__(self) -> str:
        raise KeyError("no")


class NoText:
    dtype = shape = 3

    def __repr__(self) -> str:
        return 3  # type: ignore[return-value]


def test_describing_a_value_never_fails() -> None:
    cyclic: list[object] = []
    cyclic.append(cyclic)
    assert describe(Hostile()) == "<its repr raises KeyError> (Hostile)"
    for value in (NoText(), cyclic, [Hostile()], 10**9999, np.ndarray, range(10**9), dict.fromkeys(range(10**5))):
        assert len(describe(value)) < 120
