"""What ranks say to each other while they save or load: short texts over the store at which they met.

No collective is used: a save in the background runs beside the collectives of training. Each rank gives rank 0 a text,
rank 0 makes one answer of all of them, and everyone gets it. So a round is either right on all ranks, or wrong on all:
what one rank could not do is in the answer.

Deadlines: a rank shows that it is alive by a counter that grows while it gets on (`beat`). One whose counter does not
grow for `timeout_s` is named, by rank 0 to all others; and rank 0 by each of the others.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any, Protocol

from hyper_parallel._base.errors import CommunicationError, HyperParallelError, describe
from hyper_parallel.platform.communication.answers import ranks_in_words

__all__ = ["Meeting", "Store", "prefix_of"]

_BEAT_S = 0.5
_LEAVE_S = 5.0  # how long rank 0 stays for the others to hear the last answer
_POLL_S = (0.0005, 0.05)  # the first and the longest pause between two looks

Decide = Callable[[list[Any]], Any]


class Store(Protocol):
    """A framework's key-value store. `get` is called for keys that are there."""

    def add(self, key: str, amount: int, /) -> int: ...
    def set(self, key: str, value: str, /) -> object: ...
    def get(self, key: str, /) -> str | bytes: ...


def prefix_of(number: int) -> str:
    """What the keys of a meeting begin with."""
    return f"hyper_parallel/saving/{number}/"


class Meeting:
    """One save or load of all ranks, round by round. A rank alone needs no store.

    `number` counts the meetings of this process; ranks whose counts differ are told apart by it.
    """

    def __init__(
        self,
        call: str,
        store: Store | None,
        rank: int,
        num_ranks: int,
        number: int,
        timeout_s: float,
        where: str,
        held: object = None,
    ) -> None:
        self.rank, self.num_ranks = rank, num_ranks
        self._call, self._where, self._timeout_s = call, where, timeout_s
        self._store = store
        self._held = held  # the store ends when nobody holds it: the world may end before a save in the background
        self._prefix = prefix_of(number)
        self._round = 0
        self._last_beat = 0.0

    def beat(self) -> None:
        """Show that this rank gets on. Cheap enough to call often."""
        if self._store is not None and (now := time.monotonic()) - self._last_beat > _BEAT_S:
            self._last_beat = now
            self._store.add(f"{self._prefix}beat/{self.rank}", 1)

    def round(self, mine: object, decide: Decide, error: BaseException | None = None) -> Any:
        """Give `mine`, or the error that this rank has; return what `decide` made of all on rank 0.

        `decide` gets what each rank gave, by rank, and is called if no rank had an error. What it raises, all ranks
        raise.

        Raises:
            BaseException: this rank's own error.
            CommunicationError: another rank had an error, or does not answer.
        """
        self._round += 1
        if self.num_ranks == 1:
            if error is not None:
                raise error
            return decide([mine])
        text = json.dumps({"call": self._call, "error": _words(error), "value": mine if error is None else None})
        own: BaseException | None = error
        try:
            if self.rank == 0:
                answer, failure = self._answer(text, decide)
                own = own or failure
                self._set("answer", json.dumps(answer))
            else:
                self._set(f"from/{self.rank}", text)
                self._add("there", 1)
                answer = self._wait_for_answer()
        except (HyperParallelError, OSError, KeyboardInterrupt):
            self._give_up()
            raise
        except Exception as lost:  # whatever a framework's store raises when its other end has gone
            raise CommunicationError(
                f"`{self._call}` lost the other ranks.",
                got=f"{type(lost).__name__}: {lost}".splitlines()[0][:200],
                where=self._where,
                do="Look at rank 0, which has the store at which ranks meet.",
            ) from (own or lost)
        if own is not None:
            raise own
        if answer["failed"]:
            raise CommunicationError(
                answer["what"], got=answer["got"], where=self._where, do=answer["do"],
            )  # fmt: skip
        return answer["value"]

    def _give_up(self) -> None:
        with contextlib.suppress(Exception):  # the store may have gone
            if self._store is not None:
                self._store.add(f"{self._prefix}over", 1)

    def leave(self) -> None:
        """End the meeting after its last round: rank 0 stays until the others have heard the answer."""
        if self._store is None or self.num_ranks == 1:
            return
        try:
            self._add("left", 1)
            deadline = time.monotonic() + _LEAVE_S
            pause = _POLL_S[0]
            while self.rank == 0 and self._add("left", 0) < self.num_ranks and time.monotonic() < deadline:
                time.sleep(pause)
                pause = min(2 * pause, _POLL_S[1])
            if self.rank == 0 and self._add("left", 0) == self.num_ranks:
                for number in range(
                    1, self._round + 1
                ):  # a run saves a thousand times, and the store keeps what it has
                    self._store.set(f"{self._prefix}{number}/answer", "")
        except Exception:  # noqa: S110 - the store has gone with a rank that needs nothing more
            pass

    # Rank 0

    def _answer(self, text: str, decide: Decide) -> tuple[dict[str, Any], BaseException | None]:
        missing = self._wait_for_all()
        if missing:
            self._give_up()
            timeout = f"{self._timeout_s:g} s"
            what = f"`{self._call}` cannot go on: {ranks_in_words(missing)} did not get on for {timeout}."
            error = CommunicationError(
                what, expected="all ranks to make the call", got=f"nothing from {ranks_in_words(missing)}",
                where=self._where, do=_LOOK,
            )  # fmt: skip
            return {"failed": missing, "what": what, "got": error.got, "do": _LOOK}, error
        given = [json.loads(text)]
        for rank in range(1, self.num_ranks):
            key = f"{self._prefix}{self._round}/from/{rank}"
            given.append(json.loads(self._store.get(key)))  # type: ignore[union-attr]
            self._store.set(key, "")  # type: ignore[union-attr]
        calls = {entry["call"] for entry in given}
        if len(calls) > 1:
            named = "; ".join(f"rank {rank}: {entry['call']}" for rank, entry in enumerate(given))
            error = CommunicationError("Ranks save and load at the same time.", got=named, do=_LOOK)
            return {"failed": [0], "what": error.what, "got": named, "do": _LOOK}, error
        failed = [rank for rank, entry in enumerate(given) if entry["error"] is not None]
        if failed:
            what = f"`{self._call}` failed on {ranks_in_words(failed)}: {given[failed[0]]['error']}"
            failure = None
            if 0 not in failed:
                failure = CommunicationError(what, where=self._where, do=_LOOK)
            return {"failed": failed, "what": what, "got": None, "do": _LOOK}, failure
        try:
            return {"failed": [], "value": decide([entry["value"] for entry in given])}, None
        except Exception as error:
            what = f"`{self._call}` failed on rank 0: {_words(error)}"
            return {"failed": [0], "what": what, "got": None, "do": _LOOK}, error

    def _wait_for_all(self) -> list[int]:
        """Wait for what the others give; return the ranks that have not come when the deadline is over."""
        pause, looked = _POLL_S[0], 0.0
        beats: dict[int, int] = {}
        changed: dict[int, float] = {}
        while self._add("there", 0) < self.num_ranks - 1:
            self.beat()
            now = time.monotonic()
            if now - looked > min(1.0, self._timeout_s / 5):
                looked = now
                for rank in range(1, self.num_ranks):
                    beat = int(self._store.add(f"{self._prefix}beat/{rank}", 0))  # type: ignore[union-attr]
                    if beats.get(rank) != beat:
                        beats[rank], changed[rank] = beat, now
                late = [rank for rank, since in changed.items() if now - since > self._timeout_s]
                late = [rank for rank in late if not self._is_there(rank)]
                if late:
                    return late
            time.sleep(pause)
            pause = min(1.5 * pause, _POLL_S[1])
        return []

    def _is_there(self, rank: int) -> bool:
        return int(self._store.add(f"{self._prefix}{self._round}/is/{rank}", 0)) > 0  # type: ignore[union-attr]

    # The others

    def _wait_for_answer(self) -> dict[str, Any]:
        self._add(f"is/{self.rank}", 1)
        pause, looked, beat, changed = _POLL_S[0], 0.0, -1, time.monotonic()
        while not self._add("answered", 0):
            now = time.monotonic()
            if now - looked > min(1.0, self._timeout_s / 5):
                looked = now
                new = int(self._store.add(f"{self._prefix}beat/0", 0))  # type: ignore[union-attr]
                if new != beat:
                    beat, changed = new, now
                # Rank 0 waits as long for the others: it is to name the one that is missing before it is named itself.
                if now - changed > 1.5 * self._timeout_s + 0.5:
                    raise CommunicationError(
                        f"`{self._call}` cannot go on: rank 0 did not get on for {now - changed:.0f} s.",
                        expected="its answer", got="nothing", where=self._where, do=_LOOK,
                    )  # fmt: skip
            time.sleep(pause)
            pause = min(1.5 * pause, _POLL_S[1])
        text = self._store.get(f"{self._prefix}{self._round}/answer")  # type: ignore[union-attr]
        answer: dict[str, Any] = json.loads(text)
        return answer

    def _set(self, name: str, text: str) -> None:
        if self._store is not None:
            self._store.set(f"{self._prefix}{self._round}/{name}", text)
            if name == "answer":
                self._add("answered", 1)

    def _add(self, name: str, amount: int) -> int:
        return 0 if self._store is None else int(self._store.add(f"{self._prefix}{self._round}/{name}", amount))


_LOOK = "Look at the rank that is named: its own error, or where it is (`py-spy dump`)."


def _words(error: BaseException | None) -> str | None:
    if error is None:
        return None
    text = str(error) or describe(error)
    return f"{type(error).__name__}: {text}"
