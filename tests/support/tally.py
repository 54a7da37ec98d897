"""A count that a second run does not put back: how often a module was called in all."""

from __future__ import annotations

from typing import Any


class Tally:
    """Has slots and no attributes of its own, and so is left alone. A copy begins where this one is."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0


class TalliesCalls:
    """For modules: `num_calls` counts their forwards, those in backward as well, where each does `self.num_calls += 1`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tally = Tally()

    @property
    def num_calls(self) -> int:
        return self.tally.number

    @num_calls.setter
    def num_calls(self, number: int) -> None:
        self.tally.number = number
