"""Who may go on and who waits when two sides meet: rules 1 to 6 of the README, without threads and clocks."""

from __future__ import annotations

from hyper_parallel.platform.communication.sync_hook import COMM, COMPUTE


class Side:
    """One of the two, for the length of a meeting of them.

    Invariants:
        wants is None or role is None             # who waits has left what it did
        not is_held or role == COMPUTE            # only who computes waits for what the other communicates
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.role: str | None = None  # None: before the first role, and between two
        self.wants: str | None = None  # the role that it waits to enter
        self.is_held = False  # it has met the other, and waits until that one's communication is enqueued
        self.is_fresh = True  # has entered no role yet
        self.has_ended = False

    @property
    def waits(self) -> bool:
        return self.wants is not None or self.is_held


class Meeting:
    """Two sides that meet again and again, until one ends.

    `goes_first` is the side whose communication comes first where both would begin with one: backward, while forward
    still computes. With None, the side that asks first goes first.
    """

    def __init__(self, names: tuple[str, str], goes_first: int | None = None) -> None:
        self.sides = (Side(names[0]), Side(names[1]))
        self._first = None if goes_first is None else self.sides[goes_first]
        self._turn = self._first  # who goes where both want to communicate

    def other(self, side: Side) -> Side:
        return self.sides[1] if side is self.sides[0] else self.sides[0]

    def leave(self, side: Side, role: str) -> None:
        """Note that what `side` did in this role is enqueued. A role that it is not in says nothing (rule 5)."""
        if side.role == role:
            side.role = None
            self.other(side).is_held = False

    def ask(self, side: Side, role: str) -> None:
        """Note that `side` wants to enter a role; afterwards `side.waits` says whether it has to wait."""
        if side.role == role:  # rule 5
            return
        side.role = None
        self.other(side).is_held = False
        side.wants = role
        if self._turn is None:
            self._turn = side
        self._settle()

    def withdraw(self, side: Side) -> None:
        """Note that `side` does not wait any longer, because its wait has failed."""
        side.wants = None
        side.is_held = False

    def end(self, side: Side) -> None:
        """Note that `side` does nothing more (rule 4)."""
        self.withdraw(side)
        side.role = None
        side.has_ended = True
        self.other(side).is_held = False
        self._settle()

    def _settle(self) -> None:
        for side in self.sides:
            self._let_go(side, self.other(side))

    def _let_go(self, side: Side, other: Side) -> None:
        """Let `side` go on if it may, and `other` as well where the two have met."""
        if side.wants is None:
            return
        if other.has_ended:
            _enter(side)
        elif other.wants is None:
            if side is self._first and side.is_fresh and side.wants == COMM and other.is_fresh:  # rule 3
                self._turn = other
                _enter(side)
        elif side.wants == COMPUTE:
            is_behind = other.wants == COMM
            _enter(other)
            _enter(side)
            side.is_held = is_behind  # rule 2
        elif other.wants == COMM and side is self._turn:  # rule 3: the other one still waits
            self._turn = other
            _enter(side)


def _enter(side: Side) -> None:
    side.role, side.wants, side.is_fresh = side.wants, None, False
