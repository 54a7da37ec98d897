"""The one gradient reduction that may be in flight.

A reduction is launched while backward goes on; the next one drains it. Its result is used on a stream of its own, so that
backward is not held up, and `wait_grad_handle` lets the current stream wait for that stream once, at the end.

State (on `Platform`, one per process): idle, current_grad_handle is None  <->  pending, current_grad_handle is set.
A drain leaves the pending state before it runs anything that can raise: an exception never leaves a handle behind.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from hyper_parallel._base import trace
from hyper_parallel._base.errors import ArgumentTypeError, describe
from hyper_parallel.platform.interface import Platform


class GradReduction(Platform):
    """Gradient reduction in flight; a backend adds `_new_stream`, `_current_stream` and `_use_stream`."""

    _new_stream: Callable[[], Any]
    _current_stream: Callable[[], Any]
    _use_stream: Callable[[Any], AbstractContextManager[Any]]

    def set_grad_reduce_handle(self, handle: Any, post_process: Callable[[], object] | None = None) -> None:
        """Drain the pending reduction, then keep this one; `post_process()` runs once `handle` is done."""
        if not hasattr(handle, "wait"):
            raise ArgumentTypeError(
                "A gradient reduction is kept by its handle.", expected="an object with `wait()`", got=describe(handle)
            )
        if post_process is not None and not callable(post_process):
            raise ArgumentTypeError(
                "`post_process` runs after the reduction.", expected="a callable or None", got=describe(post_process)
            )
        self._process_current_handle()
        Platform.current_grad_handle = handle
        Platform.post_grad_handle_process = post_process

    def wait_grad_handle(self) -> None:
        if Platform.current_grad_handle is None:
            return
        self._process_current_handle()
        self._current_stream().wait_event(Platform.grad_sync_stream.record_event())

    @classmethod
    def _process_current_handle(cls) -> None:
        handle, post_process = Platform.current_grad_handle, Platform.post_grad_handle_process
        Platform.current_grad_handle = Platform.post_grad_handle_process = None
        if handle is None:
            return
        if Platform.grad_sync_stream is None:
            Platform.grad_sync_stream = cls._new_stream()
        with cls._use_stream(Platform.grad_sync_stream):
            handle.wait()
            if post_process is not None:
                post_process()
        trace.emit("platform.grad_reduction", post_process=post_process is not None)
