"""What ranks answer when a call has failed, and the words made of it. Pure: no store, no threads, no framework."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, CommunicationError, HyperParallelError

# Of gloo's texts: the line of its source, and what it guesses of other ranks, which are named beside it.
_WITHOUT_NEWS = re.compile(r"^\[[^\]]*\.cc:\d+\] |This is typically caused by .*")


class Answer(NamedTuple):
    """What one rank knows of its own calls in the group that is asked about.

    number: how many it has made.
    recent: the names of the last ones, oldest first.
    num_done: how many of them have finished.
    now: the call it is in at this moment, in any group, in words; "" for none.
    details: for each of `recent`, the dtype and sizes that must be the same on every rank; "" for none.
    """

    number: int
    recent: tuple[str, ...]
    num_done: int
    now: str
    details: tuple[str, ...] = ()

    def call(self, number: int) -> str | None:
        """Return the name of its number-th call; None where it has not made it, or it was too long ago."""
        back = self.number - number
        return self.recent[-1 - back] if 0 <= back < len(self.recent) else None

    def details_of(self, number: int) -> str:
        back = self.number - number
        return self.details[-1 - back] if 0 <= back < len(self.details) else ""

    def to_json(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, text: str | bytes) -> Answer:
        fields = json.loads(text)
        recent, details = tuple(fields["recent"]), tuple(fields["details"])
        return cls(int(fields["number"]), recent, int(fields["num_done"]), str(fields["now"]), details)


class Failure(NamedTuple):
    """The call that failed: the `number`-th of this rank in a group of `ranks`.

    `is_pair` is for send and receive, which are not counted the same on both sides; `details` are of what this rank
    gave.
    """

    call: str
    number: int
    rank: int
    ranks: tuple[int, ...]
    is_pair: bool = False
    details: str = ""


def explain(
    failure: Failure,
    answers: Mapping[int, Answer] | None,
    cause: str,
    silent_holder: int | None = None,
) -> CommunicationError:
    """Make the error of one rank.

    `answers` is None where nobody could be asked. `silent_holder` is the rank that holds the store, where the store
    does not answer.
    """
    blamed, reasons = _blame(failure, answers, silent_holder)
    if reasons:
        what = f"`{failure.call}` did not finish: {'; '.join(reasons)}."
    elif answers is None:
        gone = "" if silent_holder is None else f": rank {silent_holder}, which holds the store, does not answer"
        what = f"`{failure.call}` did not finish, and the other ranks could not be asked why{gone}."
    else:
        what = f"`{failure.call}` did not finish, though every rank called it."
    kind = "a pair" if failure.is_pair else f"call {failure.number} of the group"
    who = f"the output of {ranks_in_words(blamed)}" if blamed else "the output of the ranks"
    return CommunicationError(
        what,
        expected=f"{ranks_in_words(failure.ranks)} in {kind}",
        got=f"on rank {failure.rank}: {_first_line(cause)}",
        do=f"Look at {who}. This group is broken: destroy it and create it again, or end the program.",
    )


def could_not_begin(failure: Failure, error: Exception) -> HyperParallelError:
    """Make the error of a call that this rank's framework refused, before anything was sent.

    It is of the kind that the framework's error is.
    """
    kind: type[HyperParallelError] = CommunicationError
    if isinstance(error, (TypeError, ValueError)):
        kind = ArgumentTypeError if isinstance(error, TypeError) else ArgumentError
    return kind(
        f"`{failure.call}` could not begin.",
        got=f"from the framework: {_first_line(str(error))}",
        where=f"rank {failure.rank}, group of {ranks_in_words(failure.ranks)}",
        do="Give it what the framework takes. The group is as it was, and no other rank is the reason.",
    )


def broken(failure: Failure, since: str, *, is_all: bool = False) -> CommunicationError:
    """Make the error of a call in a group in which another one has failed.

    `is_all`: the process cannot communicate at all any more.
    """
    if is_all:
        where, do = "before", "End the program: this backend cannot tell messages of the failed call from new ones."
    else:
        where, do = (
            "in this group before",
            "Destroy the group on all of its ranks and create it again, or end the program.",
        )
    return CommunicationError(
        f"`{failure.call}` cannot run: {since} {where}.",
        where=f"rank {failure.rank}, group of {ranks_in_words(failure.ranks)}",
        do=do,
    )


def ranks_in_words(ranks: Sequence[int], limit: int = 16) -> str:
    shown = [str(rank) for rank in ranks[:limit]]
    if len(ranks) > limit:
        shown.append(f"… ({len(ranks)} in all)")
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(shown)


def _blame(
    failure: Failure, answers: Mapping[int, Answer] | None, silent_holder: int | None
) -> tuple[list[int], list[str]]:
    """Find the ranks that are the reason, and say what is to be said of them."""
    if silent_holder is not None and silent_holder in failure.ranks:
        return [silent_holder], [f"rank {silent_holder}, which holds the store, does not answer"]
    if answers is None:
        return [], []
    silent = [rank for rank in failure.ranks if rank != failure.rank and rank not in answers]
    blamed, reasons = list(silent), []
    if silent:
        verb = "does" if len(silent) == 1 else "do"
        reasons.append(f"{ranks_in_words(silent)} {verb} not answer (ended, or stopped)")
    for rank in failure.ranks:
        if rank == failure.rank or rank not in answers:
            continue
        reason = _pair_reason(answers[rank]) if failure.is_pair else _reason(failure, answers[rank])
        if reason:
            blamed.append(rank)
            reasons.append(f"rank {rank} {reason}")
    return blamed, reasons


def _reason(failure: Failure, answer: Answer) -> str:
    if answer.number < failure.number:
        last = (
            f"its last call in this group was `{answer.recent[-1]}`"
            if answer.recent
            else "it has called nothing in this group"
        )
        return f"did not call it ({last}; {_now(answer)})"
    theirs, details = answer.call(failure.number), answer.details_of(failure.number)
    if theirs not in (None, failure.call):
        return f"called `{theirs}` instead"
    if details and failure.details and details != failure.details:
        return f"called it with {details}, and this rank with {failure.details}"
    return ""


def _pair_reason(answer: Answer) -> str:
    return f"did not meet it ({_now(answer)})"


def _now(answer: Answer) -> str:
    return f"it is in {answer.now}" if answer.now else "it is in no call now"


def _first_line(text: str) -> str:
    lines = [_WITHOUT_NEWS.sub("", line).strip() for line in text.splitlines()]
    return next((line for line in lines if line), "no reason given").rstrip(".")
