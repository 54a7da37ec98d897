"""The memory of sharded units on a simulated device: what it holds, how many bytes, and what is wrong with the order.

`SimulatedUnitMemory` implements `UnitMemory` on the streams of `SimulatedDevice`: the first computes, the second
communicates. A missing wait is a `RaceError`, memory that is read after it went is poison, and each mistake in the order
of calls is an `AssertionError`. Gradients are exact: a *token* stands for one gradient of one parameter, and everything
on its way from backward to the shard is a sum of tokens with factors.

One rank is played. What comes from the others is a copy of its own: two ranks are two plays, whose lists of collectives
are compared.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from hyper_parallel._base.errors import StateError
from support.simulated_device import SimulatedBuffer, SimulatedDevice

Sums = dict[tuple[str, int], Fraction]  # (parameter, token) -> its factor


class Rank:
    """What the units of one simulated rank share.

    Attributes:
        collectives: all that were begun, in order.
        reducing: units whose gradients are on their way.
        given: what shards have as gradients.
        wrong: what kernels found in the memory that they read.
        before_gather: called before a gather begins and before it ends; tests raise here.
    """

    def __init__(self, seed: int, num_ranks: int, at_end_of_backward: Callable[[Callable[[], None]], None]) -> None:
        self.device = SimulatedDevice(seed)
        self.num_ranks = num_ranks
        self.at_end_of_backward = at_end_of_backward
        self.collectives: list[str] = []
        self.reducing: list[str] = []
        self.given: Sums = {}
        self.wrong: list[str] = []
        self.before_gather: Callable[[], None] = lambda: None
        self.compute, self.communication = self.device.compute_streams

    def wait_for_compute(self) -> None:
        self.communication.wait_event(self.compute.record_event())

    def allocate(self, num_bytes: int) -> SimulatedBuffer:
        return self.device.allocate(num_bytes, self.compute)

    def on_compute(self, reads: list[Any], writes: list[Any], fn: Callable[..., Any] | None = None) -> None:
        with self.device.computing_on(self.compute):
            self.device.kernel(reads, writes, fn)

    def communicate(self, what: str, source: SimulatedBuffer, target: SimulatedBuffer) -> Any:
        self.collectives.append(what)
        self.wait_for_compute()
        with self.device.computing_on(self.communication):
            self.device.kernel([source], [target], lambda value: value)
        return self.communication.record_event()


class SimulatedUnitMemory:
    """See `UnitMemory`. `parameters` are names; all have the same size."""

    def __init__(self, rank: Rank, name: str, parameters: tuple[str, ...], shard_bytes: int) -> None:
        self._rank = rank
        self.name = name
        self.parameters = parameters
        self.shard_bytes = shard_bytes
        self.whole_bytes = self.reduced_bytes = shard_bytes * rank.num_ranks
        self.is_trained = True
        self.is_shown = False
        self.is_written = False
        self.is_followed = False  # whether the unit wants to be told of each gradient
        self._version = 0
        self._is_replaced = False
        self._shards = rank.allocate(shard_bytes)
        rank.on_compute([], [self._shards], lambda: 0)
        self._received: SimulatedBuffer | None = None
        self._whole: SimulatedBuffer | None = None
        self._gathered: Any = None  # event
        self._reduced: Any = None
        self._left = _Sum()  # by backward
        self._aside = _Sum()
        self._message = _Sum()
        self._result: SimulatedBuffer | None = None
        self._sums = _Sum()
        self._shard_gradients: SimulatedBuffer | None = None

    # -- what programs do ----------------------------------------------------------------------------------------------

    @property
    def is_there(self) -> bool:
        """Whether there is memory for whole parameters, or on its way."""
        return self._whole is not None or self._received is not None

    def write_shards(self) -> None:
        """What an optimizer does."""
        self._version += 1
        version = self._version
        self._rank.on_compute([], [self._shards], lambda: version)

    def replace_shards(self) -> None:
        """Put other tensors in place of the shards. That is seen when they are gathered, and not before."""
        self._is_replaced = True

    def keep_shard_gradients(self) -> None:
        """Have memory for the gradients of the shards from the beginning, as after `zero_grad(set_to_none=False)`."""
        self._shard_gradients = self._rank.allocate(self.shard_bytes)

    def compute(self, version: int) -> None:
        """Read the whole parameters, which must have the values of this version of the shards."""
        assert self._whole is not None, f"{self.name} computes with memory that is not there"
        name, wrong = self.name, self._rank.wrong

        def check(value: Any) -> None:
            if value != version:
                wrong.append(f"{name} computed with {value!r}, and version {version} was right")

        self._rank.on_compute([self._whole], [], check)

    def leave(self, parameter: str, token: int) -> None:
        """Leave a gradient, as backward does."""
        if not self._left.values:
            self._left.buffer = self._rank.allocate(self.whole_bytes)
        assert self._whole is not None
        self._rank.on_compute([self._whole], [self._left.buffer])
        self._left.add({(parameter, token): Fraction(1)})

    # -- whole ---------------------------------------------------------------------------------------------------------

    def begin_gather(self) -> None:
        assert not self.is_there, f"{self.name} is gathered twice"
        self._rank.before_gather()
        if self._is_replaced:
            self._is_replaced = False
            self.write_shards()
        self._received = self._rank.allocate(self.whole_bytes)
        self._gathered = self._rank.communicate(f"gather {self.name}", self._shards, self._received)

    def end_gather(self) -> None:
        assert self._received is not None, f"{self.name}: a gather ends that was not begun"
        self._rank.before_gather()
        self._rank.compute.wait_event(self._gathered)
        self._whole = self._rank.allocate(self.whole_bytes)
        self._rank.on_compute([self._received], [self._whole], lambda value: value)
        self._received = None

    def forget_gather(self) -> None:
        assert self._received is not None, f"{self.name}: a gather is forgotten that was not begun"
        self._rank.compute.wait_event(self._gathered)
        self._received = None

    def free(self) -> None:
        assert self._whole is not None, f"{self.name} is freed and was not whole"
        assert not self.is_shown, f"{self.name} is freed while modules have it"
        self._whole = None
        if self.is_written:
            self.is_written = False
            raise StateError("A parameter was written to inside forward or backward.")

    def show_whole(self) -> None:
        assert self._whole is not None, f"{self.name} is shown and is not whole"
        self.is_shown = True

    def show_shards(self) -> None:
        self.is_shown = False

    def version(self) -> int:
        return self._version

    # -- gradients -----------------------------------------------------------------------------------------------------

    def hold_gradients(self, weight: float | None) -> None:
        if not self._left.values:
            return
        both = self._rank.allocate(self.whole_bytes)
        self._rank.on_compute([each.buffer for each in (self._left, self._aside) if each.values], [both])
        self._aside.add(self._left.times(weight))
        self._aside.buffer = both
        self._left = _Sum()

    @property
    def holds_gradients(self) -> bool:
        return bool(self._left.values or self._aside.values)

    @property
    def has_sums(self) -> bool:
        return self._sums.buffer is not None

    @property
    def has_new_gradients(self) -> bool:
        return bool(self._left.values)

    def begin_reduce(self, weight: float | None) -> None:
        assert self._result is None, f"{self.name} is reduced twice at a time"
        assert self.is_trained, f"{self.name} is frozen and is reduced"
        message = _Sum(self._rank.allocate(self.reduced_bytes))
        self._rank.on_compute([each.buffer for each in (self._left, self._aside) if each.values], [message.buffer])
        message.add(self._left.times(weight))
        message.add(self._aside.times(weight))  # all of the message counts what this microbatch counts
        self._left, self._aside, self._message = _Sum(), _Sum(), message
        self._result = self._rank.allocate(self.shard_bytes)
        self._reduced = self._rank.communicate(f"reduce {self.name}", message.buffer, self._result)
        self._rank.reducing.append(self.name)

    def end_reduce(self) -> None:
        assert self._result is not None, f"{self.name}: a reduction ends that was not begun"
        self._rank.compute.wait_event(self._reduced)
        self._rank.reducing.remove(self.name)
        if self._sums.buffer is None:
            self._sums.buffer = self._result
        else:
            self._rank.on_compute([self._sums.buffer, self._result], [self._sums.buffer])
        self._sums.add(self._message.values)
        self._message, self._result = _Sum(), None

    def give_gradients(self, divisor: Any) -> None:
        sums, self._sums = self._sums, _Sum()
        if sums.buffer is None:
            return
        if self._shard_gradients is None:
            self._shard_gradients = sums.buffer
        else:
            self._rank.on_compute([sums.buffer], [self._shard_gradients])
        given = self._rank.given
        for key, factor in sums.values.items():
            if factor or divisor:
                given[key] = given.get(key, Fraction(0)) + factor / Fraction(divisor)

    def drop_gradients(self) -> None:
        if self._result is not None:
            self._rank.compute.wait_event(self._reduced)
            self._rank.reducing.remove(self.name)
        self._left, self._aside, self._message, self._result, self._sums = _Sum(), _Sum(), _Sum(), None, _Sum()

    def total(self, weight: float) -> Fraction:
        self._rank.collectives.append("total")
        return Fraction(weight) * self._rank.num_ranks

    @property
    def num_ranks(self) -> int:
        return self._rank.num_ranks

    @property
    def reduces_among(self) -> object:
        return "all"

    def at_end_of_backward(self, function: Callable[[], None]) -> None:
        self._rank.at_end_of_backward(function)


class _Sum:
    """Gradients that lie in one buffer."""

    def __init__(self, buffer: SimulatedBuffer | None = None) -> None:
        self.buffer: Any = buffer
        self.values: defaultdict[tuple[str, int], Fraction] = defaultdict(Fraction)

    def add(self, other: Sums) -> None:
        for key, factor in other.items():
            self.values[key] += factor

    def times(self, weight: float | None) -> Sums:
        return {key: factor * (1 if weight is None else Fraction(weight)) for key, factor in self.values.items()}
