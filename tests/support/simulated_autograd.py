"""A framework that records a graph and runs it backward, as far as sharded units can see one.

The engine runs what was recorded last first. A hook of a value runs when its gradient is there, before the node that made
it. Passes may nest: a node may run a backward of its own. A pass that raises never runs what waits for its end, and drops
it, as PyTorch does.
"""

from __future__ import annotations

import _thread
import heapq
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


class Node:
    """A value and what made it. `backward` leaves gradients; a leaf has none."""

    __slots__ = ("__weakref__", "backward", "hooks", "inputs", "number")

    def __init__(self, number: int, inputs: Sequence[Node], backward: Callable[[], None] | None) -> None:
        self.number = number
        self.inputs = tuple(inputs)
        self.backward = backward
        self.hooks: list[Callable[[], None]] = []

    @property
    def is_leaf(self) -> bool:
        return self.backward is None


class _Task:
    def __init__(self, number: int) -> None:
        self.number = number
        self.at_end: list[Callable[[], None]] = []


class _InThread(threading.local):
    def __init__(self) -> None:
        self.tasks: list[_Task] = []
        self.records = True


class Autograd:
    """All threads record into one sequence.

    Args:
        before_node: called before each node of a backward; tests raise here.
        has_own_thread: backward runs in a thread of the framework, which Python does not know, as on an accelerator.
    """

    def __init__(self, before_node: Callable[[], None], *, has_own_thread: bool = False) -> None:
        self.before_node = before_node
        self._has_own_thread = has_own_thread
        self._numbers = itertools.count()
        self._task_numbers = itertools.count()
        self._here = _InThread()
        self.num_running = 0  # passes, in all threads

    # -- recording -----------------------------------------------------------------------------------------------------

    @property
    def records(self) -> bool:
        return self._here.records

    @contextmanager
    def recording(self, records: bool) -> Iterator[None]:
        before, self._here.records = self._here.records, records
        try:
            yield
        finally:
            self._here.records = before

    def node(self, inputs: Sequence[Node | None], backward: Callable[[], None]) -> Node:
        return Node(next(self._numbers), [each for each in inputs if each is not None], backward)

    def leaf(self) -> Node:
        return Node(next(self._numbers), (), None)

    # -- backward ------------------------------------------------------------------------------------------------------

    @property
    def pass_id(self) -> int | None:
        return self._here.tasks[-1].number if self._here.tasks else None

    def at_end_of_backward(self, function: Callable[[], None]) -> None:
        self._here.tasks[-1].at_end.append(function)

    def backward(self, *roots: Node) -> None:
        if self._has_own_thread and not self._here.tasks:
            _in_unknown_thread(lambda: self._run(roots))
        else:
            self._run(roots)

    def _run(self, roots: Sequence[Node]) -> None:
        task = _Task(next(self._task_numbers))
        self._here.tasks.append(task)
        self.num_running += 1
        try:
            with self.recording(False):
                self._run_nodes(roots)
            for function in task.at_end:
                function()
        finally:
            self.num_running -= 1
            self._here.tasks.pop()
            task.at_end.clear()  # whoever keeps the error keeps this frame

    def _run_nodes(self, roots: Sequence[Node]) -> None:
        waits_for = _uses(roots)
        ready = [(-root.number, root) for root in roots if not waits_for[root]]
        heapq.heapify(ready)
        while ready:
            _, node = heapq.heappop(ready)
            for hook in tuple(node.hooks):
                hook()
            if node.backward is not None:
                self.before_node()
                node.backward()
            for other in node.inputs:
                waits_for[other] -= 1
                if not waits_for[other]:
                    heapq.heappush(ready, (-other.number, other))


def _uses(roots: Sequence[Node]) -> Counter[Node]:
    """How often each node of a graph is an input of another one."""
    uses: Counter[Node] = Counter()
    seen, todo = set(roots), list(roots)
    while todo:
        for other in todo.pop().inputs:
            uses[other] += 1
            if other not in seen:
                seen.add(other)
                todo.append(other)
    return uses


def _in_unknown_thread(function: Callable[[], None]) -> None:
    """Run a function in a thread that `threading` has not started, and wait for it."""
    _waited_for(function, lambda run: _thread.start_new_thread(run, ()))


def in_other_thread(function: Callable[[], None]) -> None:
    """Run a function in another thread of Python and wait for it: two threads, and yet one order."""
    _waited_for(function, lambda run: threading.Thread(target=run, daemon=True).start())


def _waited_for(function: Callable[[], None], start: Callable[[Callable[[], None]], object]) -> None:
    done, raised = threading.Lock(), []
    done.acquire()

    def run() -> None:
        try:
            function()
        except BaseException as error:
            raised.append(error)
        finally:
            done.release()

    start(run)
    done.acquire()
    if raised:
        raise raised.pop()
