"""The lasting thread on which the backward side runs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue


class Job:
    """A function that a worker runs once. Whoever gives it looks after its errors: it must not raise."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run
        self.is_done = threading.Event()


class Worker:
    """One thread for as long as its owner lives: started for the first job, ended when the owner is collected.

    A thread for each step would have every framework set up its thread-local state anew. It is a daemon, so that a
    process that ends does not wait for it. A child process after a fork has no such thread: its first job starts one.
    """

    def __init__(self, owner: object, name: str) -> None:
        self._owner = weakref.ref(owner)
        self._name = name
        self._thread: threading.Thread | None = None
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()

    def begin(self, run: Callable[[], None]) -> Job:
        if self._thread is None or not self._thread.is_alive():
            self._start()
        job = Job(run)
        self._jobs.put(job)
        return job

    def _start(self) -> None:
        self._jobs = SimpleQueue()  # of its own: what a fork has left in the one before is not for this thread
        # The thread knows the queue only, so that the owner can be collected.
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name=self._name, daemon=True)
        self._thread.start()
        owner = self._owner()
        if owner is not None:
            weakref.finalize(owner, self._jobs.put, None)


def _work(jobs: SimpleQueue[Job | None]) -> None:
    while True:
        job = jobs.get()
        if job is None:
            return
        try:
            job.run()
        finally:
            job.is_done.set()
        del job  # what it holds is not kept until the next one comes
