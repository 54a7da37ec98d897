"""What a unit asks of a framework: the memory of its parameters, and their way from shards to whole tensors and back.

One object for each unit, in `platform/<framework>/parallel/sharding/`. A unit calls it under one lock, and in an order
that `README.md` gives; it decides nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["UnitMemory"]


class UnitMemory(Protocol):
    """The parameters of one unit: shards that stay, and whole tensors that come and go."""

    whole_bytes: int
    reduced_bytes: int

    def begin_gather(self) -> None:
        """Begin to fetch all shards. What it sends is read now: the shards may change afterwards."""

    def end_gather(self) -> None:
        """Wait for what `begin_gather` began, and put the values into the whole parameters."""

    def forget_gather(self) -> None:
        """Wait for what `begin_gather` began, and let go of it."""

    def free(self) -> None:
        """Let go of the memory of the whole parameters; the tensors themselves stay, and are filled again later.

        Raises:
            StateError: one of them was written to; that would be lost.
        """

    def show_whole(self) -> None:
        """Put the whole parameters into the modules."""

    def show_shards(self) -> None:
        """Put the shards back into the modules."""

    def version(self) -> int:
        """A number that is another one once any shard was written to."""

    @property
    def is_trained(self) -> bool:
        """Whether any parameter needs a gradient now."""

    def hold_gradients(self, weight: float | None) -> None:
        """Put the gradients that backward has left aside, times `weight`, added to those that lie there."""

    @property
    def holds_gradients(self) -> bool:
        """Whether any gradient was left by a backward or lies aside, and waits for its reduction."""

    @property
    def has_new_gradients(self) -> bool:
        """Whether any gradient was left by a backward."""

    def begin_reduce(self, weight: float | None) -> None:
        """Begin to add up the gradients of all ranks: what lies aside, and what backward has left times `weight`."""

    def end_reduce(self) -> None:
        """Wait for what `begin_reduce` began, and add the result to this rank's sums."""

    def give_gradients(self, divisor: Any) -> None:
        """Add the sums over `divisor` to the gradients of the shards.

        A parameter that no rank had a gradient for gets none.
        """

    def drop_gradients(self) -> None:
        """Forget gradients that were not given yet."""

    def total(self, weight: float) -> Any:
        """Add up a number over all ranks that share the gradients; what comes is a divisor for `give_gradients`."""

    @property
    def has_sums(self) -> bool:
        """Whether there are sums that were not given yet."""

    @property
    def num_ranks(self) -> int:
        """Among how many ranks gradients are added up."""

    @property
    def reduces_among(self) -> object:
        """A key that is the same for units whose gradients are added up among the same ranks."""

    def at_end_of_backward(self, function: Callable[[], None]) -> None:
        """Run a function once the backward that runs now is done."""
