"""Steps that planning runs take from no iterator, and leave slots as they were: each kind in each place, on both frameworks."""

from __future__ import annotations

import array
import collections
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hyper_parallel as hp
from hyper_parallel.platform import selection
from support.backends import Backend

pytest.importorskip("scipy", reason="the solver is in SciPy")

NUMBERS = [3.0, 4.0, 5.0]
TABLE = dict.fromkeys(NUMBERS, 1.0)


class Doubled(map):
    """A class of Python's whose place is in what it inherits."""


ITERATORS: dict[str, Callable[[], Iterator[Any]]] = {
    "list": lambda: iter(NUMBERS),
    "tuple": lambda: iter(tuple(NUMBERS)),
    "range": lambda: iter(range(9)),
    "text": lambda: iter("345"),
    "bytes": lambda: iter(b"345"),
    "dict": lambda: iter(TABLE),
    "items": lambda: iter(TABLE.items()),
    "set": lambda: iter(set(NUMBERS)),
    "deque": lambda: iter(collections.deque(NUMBERS)),
    "array": lambda: iter(array.array("d", NUMBERS)),
    "flat": lambda: np.asarray(NUMBERS).flat,
    "reversed": lambda: reversed(NUMBERS),
    "reversed dict": lambda: reversed(TABLE),
    "zip": lambda: zip(NUMBERS, NUMBERS, strict=True),
    "map": lambda: map(float, NUMBERS),
    "class of map": lambda: Doubled(float, NUMBERS),
    "filter": lambda: filter(None, NUMBERS),
    "enumerate": lambda: enumerate(NUMBERS),
    "called": lambda: iter(collections.deque(NUMBERS).popleft, None),
    "count": lambda: itertools.count(3),
    "cycle": lambda: itertools.cycle(NUMBERS),
    "chain": lambda: itertools.chain(NUMBERS, NUMBERS),
    "islice": lambda: itertools.islice(NUMBERS, 3),
    "accumulate": lambda: itertools.accumulate(NUMBERS),
    "generator": lambda: (each for each in NUMBERS),
}


class Plain:
    def __init__(self, held: Any) -> None:
        self.held = held


class Slotted:
    __slots__ = ("empty", "held")

    def __init__(self, held: Any) -> None:
        self.held = held


class Listing(list[Any]):
    """With attributes beside what is in it."""


def listing(held: Any) -> Listing:
    found = Listing()
    found.held = held  # type: ignore[attr-defined]
    return found


# How an iterator is held, how it is found there, and where the error finds it.
PLACES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], str]] = {
    "direct": (lambda it: it, lambda held: held, "has"),
    "list": (lambda it: [0, it], lambda held: held[1], "has[1]"),
    "dict": (lambda it: {"a": it}, lambda held: held["a"], "has['a']"),
    "tuple": (lambda it: (it,), lambda held: held[0], "has[0]"),
    "deque": (lambda it: collections.deque([it]), lambda held: held[0], "has[0]"),
    "plain object": (Plain, lambda held: held.held, "has.held"),
    "slots": (Slotted, lambda held: held.held, "has.held"),
    "attribute of a list": (listing, lambda held: held.held, "has.held"),
    "nested": (
        lambda it: {"a": [Plain((Slotted({"b": it}),))]},
        lambda held: held["a"][0].held[0].held["b"],
        "has['a'][0].held[0].held['b']",
    ),
    "three deep, and directly": (
        lambda it: [Plain(Plain(Plain(it))), Plain(it)],
        lambda held: held[1].held,
        "has[1].held",
    ),
    "partial": (lambda it: functools.partial(next, it), lambda held: held.args[0], "has.args[0]"),
    "bound": (lambda it: [it.__next__], lambda held: held[0].__self__, "has[0].__self__"),
    "factory": (
        lambda it: collections.defaultdict(it.__next__),
        lambda held: held.default_factory.__self__,
        "has.default_factory.__self__",
    ),
    "closure": (lambda it: lambda: next(it), lambda held: held.__closure__[0].cell_contents, "has.it"),
}


@pytest.fixture
def calls(backend: Backend) -> Iterator[list[int]]:
    if backend.name.endswith("cuda"):
        pytest.skip("what is met does not depend on the device")
    yield []
    selection._forget()


def model_of(backend: Backend, calls: list[int], take: Callable[[Any], object]) -> Any:
    class Taking(backend.platform.Module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.blocks = backend.sequence(*(backend.sequence(backend.linear(8, 8)) for _ in range(2)))

        def forward(self, x: Any) -> Any:
            calls.append(1)
            take(self)
            return self.blocks(x)

        construct = forward

    return Taking()


def plan(backend: Backend, model: Any, loss_fn: Any = None) -> None:
    x = backend.tensor(np.ones((4, 8)))
    hp.plan_memory(model, x, loss_fn=loss_fn or (lambda y: y.sum()), budget="100%", progress=False)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", ITERATORS)
def test_an_iterator_is_named_with_its_place_before_a_step_runs(
    backend: Backend, calls: list[int], kind: str, place: str
) -> None:
    hold, find, where = PLACES[place]
    model = model_of(backend, calls, lambda model: next(find(model.blocks[1].has)))
    model.blocks[1].has = hold(ITERATORS[kind]())
    with pytest.raises(ValueError, match="what a module takes from an iterator there cannot be put back") as caught:
        plan(backend, model)
    assert f"blocks.1.{where}" in str(caught.value)
    assert calls == []
    assert next(find(model.blocks[1].has)) == next(ITERATORS[kind]())


class Called(Plain):
    def __call__(self, y: Any) -> Any:
        return y.sum() * next(self.held)


HOLDERS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "loss": lambda backend, model, it: lambda y: y.sum() * next(it),
    "object": lambda backend, model, it: Called(it),
    "hook": lambda backend, model, it: model.register_forward_hook(lambda *_: next(it) and None) and None,
    "module in a list": lambda backend, model, it: setattr(model, "aside", [holding(backend, it)]),
}


def holding(backend: Backend, held: Any) -> Any:
    module = backend.linear(2, 2)
    module.held = held
    return module


@pytest.mark.parametrize("holder", HOLDERS)
def test_an_iterator_that_something_beside_the_model_has_is_named(
    backend: Backend, calls: list[int], holder: str
) -> None:
    model, it = model_of(backend, calls, lambda model: None), iter(NUMBERS)
    loss_fn = HOLDERS[holder](backend, model, it)
    with pytest.raises(ValueError, match="what a module takes from an iterator there cannot be put back"):
        plan(backend, model, loss_fn)
    assert (calls, list(it)) == ([], NUMBERS)


def test_an_iterator_among_the_arguments_is_named_and_what_steps_change_in_others_is_as_it_was(
    backend: Backend, calls: list[int]
) -> None:
    class Given(backend.platform.Module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model_of(backend, calls, lambda model: None)

        def forward(self, x: Any, given: Any) -> Any:
            given["seen"].append(next(given["it"]))
            given["object"].count += 1
            return self.model(x)

        construct = forward

    x, given = backend.tensor(np.ones((4, 8))), {"it": iter(NUMBERS), "seen": [], "object": OnlySlots()}
    options = {"loss_fn": lambda y: y.sum(), "budget": "100%", "progress": False}
    with pytest.raises(ValueError, match=r"iterator there cannot be put back(?s:.*)batch\[1\]\['it'\]"):
        hp.plan_memory(Given(), (x, given), **options)
    assert (calls, list(given["it"])) == ([], NUMBERS)
    given["it"] = Counting()
    hp.plan_memory(Given(), (x, given), **options)
    assert calls
    assert (given["it"].place, given["seen"], given["object"].count) == (0, [], 0)


# -- what is put back, or is not to be ----------------------------------------------------------------------------------------


class Counting:
    """An iterator whose place is in its attributes."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Counting:
        return self

    def __next__(self) -> float:
        self.place += 1
        return float(self.place)


class SlottedCounting(Counting):
    __slots__ = ("__last", "passed", "seen")

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.passed = 0

    def __next__(self) -> float:
        self.__last = super().__next__()
        self.seen.append(self.__last)
        self.passed += 1
        return self.__last

    def state(self) -> Any:
        return self.place, self.seen, self.passed, hasattr(self, "_SlottedCounting__last")


class OnlySlots:
    __slots__ = ("count", "gone", "made", "tensor")

    def __init__(self) -> None:
        self.count = 0
        self.gone = "there"

    def __next__(self) -> None:
        self.count += 1
        self.made = [self.count]
        self.tensor = None
        if hasattr(self, "gone"):
            del self.gone


@pytest.mark.parametrize(
    "place", [place for place in PLACES if place not in ("partial", "bound", "factory", "closure")]
)
def test_iterators_and_slots_of_the_users_classes_are_as_they_were(
    backend: Backend, calls: list[int], place: str
) -> None:
    hold, find, _ = PLACES[place]
    model = model_of(backend, calls, lambda model: [next(find(each)) for each in model.has])
    first, second = SlottedCounting(), OnlySlots()
    next(first)
    model.has = [hold(first), hold(second)]
    plan(backend, model)
    assert calls
    assert [find(each) for each in model.has] == [first, second]
    assert first.state() == (1, [1.0], 1, True)
    assert (second.count, second.gone) == (0, "there")
    assert not hasattr(second, "made")
    assert not hasattr(second, "tensor")
    assert next(first) == 2.0


class Lines:
    """What a program holds beside its model, and no step moves."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("w+")  # an iterator of its lines
        self.log = print
        self.number = np.asarray(NUMBERS)
        self.table = TABLE.items()
        self.constant = itertools.repeat(1.0)
        self.other = weakref.proxy(self.file)
        self.kinds = [map, zip, itertools.count, Counting]


def test_files_views_and_classes_are_no_iterators(backend: Backend, calls: list[int], tmp_path: Path) -> None:
    model = model_of(backend, calls, lambda model: model.has.file.write("step\n"))
    model.has = Lines(tmp_path / "log")
    plan(backend, model)
    model.has.file.close()
    assert calls
