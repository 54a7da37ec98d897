"""What belongs to a thread and decides what operations do there, carried over into another thread.

Each framework's part is in the `thread_state.py` of its folder. All frameworks that this process has imported are
asked, since a function that runs in another thread may use either, whatever the platform is.
"""

from __future__ import annotations

import contextvars
import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import ClassVar, TypeVar

from hyper_parallel.platform.host_streams import current_host_stream, host_stream_context
from hyper_parallel.platform.interface import PlatformType
from hyper_parallel.platform.selection import chosen_type

R = TypeVar("R")


class FrameworkState(ABC):
    """What one framework keeps per thread, as it was in the thread that made this object."""

    platform_type: ClassVar[PlatformType]
    one_thread_at_a_time: ClassVar[bool]  # whether the process may die when two threads work on this framework

    @abstractmethod
    def applied(self) -> AbstractContextManager[None]:
        """Give the calling thread this state while the block runs."""

    @abstractmethod
    def as_a_side(self, *, is_caller: bool) -> AbstractContextManager[None]:
        """Make the calling thread one of two that work at the same time, while the block runs.

        A backward that it starts runs in this very thread, and its random numbers are its own; those of the caller go
        on afterwards.
        """

    @abstractmethod
    def generators(self) -> Generators | None:
        """Note where random numbers have got to; None where there is nothing to bring back.

        Asked only where one thread works at a time.
        """


class Generators(ABC):
    """Where a framework's random numbers had got to."""

    @abstractmethod
    def restore(self) -> None: ...


class ThreadState:
    """The state of the thread that made this object: context variables, the CPU's stream, and each framework's own."""

    def __init__(self) -> None:
        self._context = contextvars.copy_context()
        self._host_stream = current_host_stream()
        self._frameworks: list[FrameworkState] = [
            importlib.import_module(f"hyper_parallel.platform.{platform_type.value}.parallel.thread_state").BACKEND()
            for platform_type in PlatformType
            if platform_type.value in sys.modules
        ]
        chosen = chosen_type()
        self.one_thread_at_a_time = any(
            framework.one_thread_at_a_time and chosen in (None, framework.platform_type)
            for framework in self._frameworks
        )

    def run(self, function: Callable[[], R]) -> R:
        """Call a function in this thread with that state; afterwards this thread is as it was."""
        return self._context.run(self._run, function)

    def _run(self, function: Callable[[], R]) -> R:
        with ExitStack() as stack:
            stack.enter_context(host_stream_context(self._host_stream))
            for framework in self._frameworks:
                stack.enter_context(framework.applied())
            stack.enter_context(self.as_a_side(is_caller=False))
            return function()

    @contextmanager
    def as_a_side(self, *, is_caller: bool) -> Iterator[None]:
        with ExitStack() as stack:
            for framework in self._frameworks:
                stack.enter_context(framework.as_a_side(is_caller=is_caller))
            yield

    def generators(self) -> list[Generators]:
        return [found for framework in self._frameworks if (found := framework.generators()) is not None]
