"""Who is missing: what this process calls, kept in memory, and the exchange over the store when a call fails.

Rules and reasons are in the README ("Who is missing"). Two threads meet here:

- the *callers*, any threads of the program: they add to logs, and leave a request when a call of theirs fails;
- the *clerk*, one daemon thread: it alone uses the store. It answers alarms, raises those of requests, and collects
  answers.

What they share: a log's fields are written by callers and read by the clerk (each a single assignment; an answer that
is a call late is still true of a moment ago), `log.since` is written by either and never unset; `_requests` is a deque,
whose append and popleft are atomic.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from hyper_parallel._base import trace
from hyper_parallel._base.errors import CommunicationError
from hyper_parallel.platform.communication.answers import Answer, Failure, broken, explain, ranks_in_words

POLL_S = 0.5  # how often the clerk looks for alarms
GRACE_S = 3.0  # how long a failing rank waits for answers
CLOSE_S = 1.5  # how long the holder of the store waits for the others to let go of it, when it ends
_NUM_RECENT = 16  # names of calls in an answer
_NUM_RETIRED = 64  # logs of destroyed groups that are kept


class Store(Protocol):
    """What is needed of a framework's key-value store. `get` waits for the key."""

    def add(self, key: str, amount: int, /) -> int: ...
    def set(self, key: str, value: str, /) -> object: ...
    def get(self, key: str, /) -> str | bytes: ...


# The dtype and the sizes that are the same on every rank of a call; kept as they are, and made into words when somebody
# asks.
Like = tuple[object, Sequence[int]]


def in_words(like: Like | None) -> str:
    return "" if like is None else f"{str(like[0]).removeprefix('torch.')}{list(like[1])}"


class Log:
    """What this process has called in one group.

    It lives as long as the group; `RollCall` keeps the last ones of destroyed groups. Invariant: num_done <= number
    """

    __slots__ = ("is_pair", "name", "num_done", "number", "ranks", "recent", "since")

    def __init__(self, name: str, ranks: tuple[int, ...], is_pair: bool = False) -> None:
        self.name = name
        self.ranks = ranks
        self.is_pair = is_pair  # sends and receives: not the same on all ranks, so their count says nothing
        self.number = 0
        self.num_done = 0
        self.recent: deque[tuple[str, Like | None]] = deque(maxlen=_NUM_RECENT)
        self.since: str | None = None  # what broke the group

    def answer(self, now: str) -> Answer:
        recent = list(self.recent)
        calls, details = tuple(call for call, _ in recent), tuple(in_words(like) for _, like in recent)
        return Answer(self.number, calls, self.num_done, now, details)


class CallEntry:
    """One call: the `number`-th of its log.

    Its handle holds it until somebody has waited, and it holds its log. `ranks` are those who must take part, `like` is
    what all of them must give.
    """

    __slots__ = ("call", "like", "log", "number", "ranks")

    def __init__(self, log: Log, call: str, number: int, ranks: tuple[int, ...], like: Like | None = None) -> None:
        self.log = log
        self.call = call
        self.number = number
        self.ranks = ranks
        self.like = like


class _Request:
    def __init__(self, entry: CallEntry, incident: str) -> None:
        self.entry = entry
        self.incident = incident
        self.is_raised = False
        self.answers: dict[int, Answer] = {}
        self.done = threading.Event()
        self.deadline = time.monotonic() + GRACE_S


class RollCall:
    """The logs of this process, and its clerk; there is one for as long as the world is the same.

    `store` is None where nobody can be asked.
    """

    def __init__(
        self,
        rank: int,
        store: Store | None,
        is_up: Callable[[], bool] = lambda: True,
        store_holder: int | None = None,
        breaks_all: bool = False,
    ) -> None:
        self.rank = rank
        self.since: str | None = None  # what broke every group of this process
        self._breaks_all = breaks_all  # one failure makes all groups unusable, not only its own
        self.logs: dict[str, Log] = {}
        self._store = store
        self._is_up = is_up
        self._store_holder = store_holder
        self._retired: deque[Log] = deque(maxlen=_NUM_RETIRED)
        self._requests: deque[_Request] = deque()
        self._wake = threading.Event()
        self._is_stopping = False
        self._is_store_lost = False  # it raised: its holder has ended without a word
        self._is_store_closed = False  # its holder said that it ends
        self._num_heard = 0
        self._num_pairs_failed = 0
        self._clerk: threading.Thread | None = None

    # What callers use

    def log(self, name: str, ranks: tuple[int, ...], *, is_pair: bool = False) -> Log:
        """Return the log of a group, new on its first call. The clerk starts with the first group of several ranks."""
        found = self.logs.get(name)
        if found is None:
            found = self.logs[name] = Log(name, ranks, is_pair)
            if self._clerk is None and self._store is not None and len(ranks) > 1:
                self._start()
        return found

    def enter(self, log: Log, call: str, ranks: tuple[int, ...] | None = None, like: Like | None = None) -> CallEntry:
        """Note that a call begins.

        Raises:
            CommunicationError: the group is broken.
        """
        if log.since is not None or self.since is not None:
            failure = Failure(call, log.number + 1, self.rank, ranks or log.ranks)
            raise broken(failure, self.since or log.since or "", is_all=self.since is not None)
        log.number = number = log.number + 1
        log.recent.append((call, like))
        trace.emit("communication.launch", call=call, number=number)
        return CallEntry(log, call, number, log.ranks if ranks is None else ranks, like)

    def refuse(self, entry: CallEntry) -> None:
        """Note that a call could not begin here.

        It counts: ranks that make the same mistake still agree on the number of the next one.
        """
        log = entry.log
        if log.number == entry.number:
            log.recent[-1] = (f"{entry.call} (it could not begin)", entry.like)
        log.num_done = max(log.num_done, entry.number)

    def is_alarmed(self, entry: CallEntry) -> bool:
        """Say whether a wait for this call is in vain: another rank has reported the group as broken. Has no effect."""
        return entry.log.since is not None or (self._is_store_lost and self._store_holder in entry.ranks)

    def explain(self, entry: CallEntry, error: BaseException) -> CommunicationError:
        """Break the group, ask the others, and return the error to raise for a call that failed.

        That takes at most `GRACE_S`, and half a second more where the store hangs.
        """
        failure = Failure(entry.call, entry.number, self.rank, entry.ranks, entry.log.is_pair, in_words(entry.like))
        self._break(entry.log, f"`{entry.call}` failed on rank {self.rank}", entry.log.is_pair)
        clerk = self._clerk
        if clerk is None or not clerk.is_alive():
            is_gone = self._is_store_lost or self._is_store_closed
            return explain(failure, None, str(error), self._store_holder if is_gone else None)
        incident = entry.log.name
        if entry.log.is_pair:
            self._num_pairs_failed += 1
            incident = f"{incident}/{self.rank}/{self._num_pairs_failed}"
        request = _Request(entry, incident)
        self._requests.append(request)
        self._wake.set()
        # A store that hangs leaves the clerk waiting in it: the deadline is this thread's own.
        in_time = request.done.wait(GRACE_S + POLL_S)
        lost = self._is_store_lost or not (in_time or request.is_raised)
        return explain(
            failure,
            None if lost else dict(request.answers),
            str(error),
            self._store_holder if lost else None,
        )

    def forget(self, name: str) -> None:
        """Put the logs of a group that was destroyed aside.

        Its name does not come again, and what was called in it can still be asked.
        """
        for known in [known for known in self.logs if known == name or known.startswith(name + "/")]:
            self._retired.append(self.logs.pop(known))

    def stop(self) -> None:
        """End the clerk, if it answers."""
        self._is_stopping = True
        self._wake.set()
        clerk, self._clerk = self._clerk, None
        if clerk is not None and clerk is not threading.current_thread():
            clerk.join(2 * CLOSE_S)
        atexit.unregister(self.stop)

    # What the clerk does

    def _start(self) -> None:
        self._clerk = threading.Thread(target=self._serve, name="hyper_parallel roll call", daemon=True)
        self._clerk.start()
        # A thread that the end of the interpreter meets inside the framework's store ends the process with an error.
        atexit.register(self.stop)

    def _serve(self) -> None:
        store = self._store
        if store is None:
            return
        try:
            store.add(_CLERKS, 1)
            self._num_heard = _num_old(store)
            while not (self._is_stopping or self._is_store_closed):
                self._wake.wait(0.05 if self._requests else POLL_S)
                self._wake.clear()
                if self._is_stopping or not self._is_up():
                    break
                self._raise_alarms(store)
                self._answer_alarms(store)
                self._collect(store)
            self._leave(store)
        except Exception:  # whatever the framework's store raises when its other end has gone
            self._is_store_lost = not self._is_stopping
        finally:
            for request in list(self._requests):
                request.done.set()

    def _leave(self, store: Store) -> None:
        """Let go of the store; the rank that holds it waits until the others have.

        The store ends with its holder, and the frameworks print a page about a connection that breaks. So the holder
        tells the others that it ends, and goes when they have let go.
        """
        num_left = int(store.add(_CLERKS, -1))
        if self.rank == self._store_holder and num_left > 0:
            store.add(_ALARMS, _CLOSING)
            deadline = time.monotonic() + CLOSE_S
            while int(store.add(_CLERKS, 0)) > 0 and time.monotonic() < deadline:
                time.sleep(0.02)

    def _raise_alarms(self, store: Store) -> None:
        for request in list(self._requests):
            if request.is_raised:
                continue
            entry = request.entry
            if store.add(f"{_PREFIX}incident/{request.incident}", 1) == 1:  # else another rank has told everyone
                alarm = {
                    "incident": request.incident, "group": entry.log.name, "ranks": entry.ranks,
                    "call": entry.call, "rank": self.rank, "is_pair": entry.log.is_pair,
                }  # fmt: skip
                number = int(store.add(_ALARMS, 1)) % _CLOSING
                store.add(f"{_RAISED}/{number}", int(time.time()))
                store.set(f"{_PREFIX}alarm/{number}", json.dumps(alarm))
            request.is_raised = True

    def _answer_alarms(self, store: Store) -> None:
        is_closing, count = divmod(int(store.add(_ALARMS, 0)), _CLOSING)
        self._is_store_closed = bool(is_closing)
        while self._num_heard < count:
            self._num_heard += 1
            alarm = json.loads(store.get(f"{_PREFIX}alarm/{self._num_heard}"))
            if self.rank not in alarm["ranks"]:
                continue
            log = self.logs.get(alarm["group"]) or self._retired_log(alarm["group"])
            if log is None:  # its first call in this group is still to come, and must fail
                fresh = Log(alarm["group"], tuple(alarm["ranks"]), alarm["is_pair"])
                log = self.logs.setdefault(alarm["group"], fresh)
            store.set(f"{_PREFIX}answer/{alarm['incident']}/{self.rank}", log.answer(self._now()).to_json())
            store.add(f"{_PREFIX}answered/{alarm['incident']}/{self.rank}", 1)
            self._break(log, f"`{alarm['call']}` failed on rank {alarm['rank']}", alarm["is_pair"])

    def _collect(self, store: Store) -> None:
        for request in list(self._requests):
            for rank in request.entry.ranks:
                if rank not in request.answers and store.add(f"{_PREFIX}answered/{request.incident}/{rank}", 0):
                    text = store.get(f"{_PREFIX}answer/{request.incident}/{rank}")
                    request.answers[rank] = Answer.from_json(text)
            is_complete = all(rank in request.answers for rank in request.entry.ranks)
            if is_complete or time.monotonic() > request.deadline:
                with contextlib.suppress(ValueError):
                    self._requests.remove(request)
                request.done.set()

    def _break(self, log: Log, since: str, is_pair: bool) -> None:
        if self._breaks_all and self.since is None:
            self.since = since
        if log.since is None and not is_pair:
            log.since = since

    def _retired_log(self, name: str) -> Log | None:
        return next((log for log in reversed(list(self._retired)) if log.name == name), None)

    def _now(self) -> str:
        for log in reversed(list(self.logs.values())):
            if log.number > log.num_done and log.recent and log.since is None:
                return f"`{log.recent[-1][0]}` of {ranks_in_words(log.ranks)}"
        return ""


def _num_old(store: Store) -> int:
    """Count the alarms that are over.

    A rank that makes its first call later than the others may still have to answer the last one.
    """
    number = int(store.add(_ALARMS, 0)) % _CLOSING
    while number > 0 and time.time() - int(store.add(f"{_RAISED}/{number}", 0)) < GRACE_S:
        number -= 1
    return number


_PREFIX = "hyper_parallel/"
_ALARMS = _PREFIX + "alarms"  # how many there were; plus _CLOSING once the holder of the store ends
_RAISED = _PREFIX + "raised"  # when, in seconds of the clock
_CLERKS = _PREFIX + "clerks"
_CLOSING = 1 << 30
