"""The one gradient reduction that may be in flight.

A reduction is launched while backward goes on; the next one drains it. Its result is used on a stream of its own, so
that backward is not held up, and `wait_grad_handle` lets the current stream wait for that stream once, at the end.

State (`current_grad_handle` and its two neighbours, attributes of `Platform`, one per process):
idle, current_grad_handle is None  <->  pending, current_grad_handle is set.
A drain leaves the pending state before it runs anything that can raise: an exception never leaves a handle behind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hyper_parallel._base import trace
from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, NotProvidedError, describe

if TYPE_CHECKING:
    from hyper_parallel.platform.interface import Platform

__all__ = ["check_handle", "drain", "order_after"]


def check_handle(handle: object, post_process: Callable[[], object] | None) -> None:
    if handle is not None and not hasattr(handle, "wait"):
        raise ArgumentTypeError(
            "A gradient reduction is kept by its handle.",
            expected="an object with `wait()`, or None for no reduction",
            got=describe(handle),
        )
    if post_process is not None and not callable(post_process):
        raise ArgumentTypeError(
            "`post_process` runs after the reduction.", expected="a callable or None", got=describe(post_process)
        )
    if handle is None and post_process is not None:
        raise ArgumentError("`post_process` runs after a reduction.", expected="a handle with it", got="handle None")


def drain(state: type[Platform], platform: Platform) -> None:
    """Finish the pending reduction on the gradient stream, which is made by the platform's own `new_stream`."""
    handle, post_process = state.current_grad_handle, state.post_grad_handle_process
    state.current_grad_handle = state.post_grad_handle_process = None
    if handle is None:
        return
    if state.grad_sync_stream is None:
        state.grad_sync_stream = platform.new_stream()
    with platform.get_stream_context()(state.grad_sync_stream):
        handle.wait()
        if post_process is not None:
            post_process()
    trace.emit("platform.grad_reduction", post_process=post_process is not None)


def order_after(stream: Any, platform: Platform) -> None:
    """Let what comes on the current stream come after what the gradient stream has been given."""
    try:
        current = platform.get_current_stream()
    except NotProvidedError:  # a user's platform that knows of no current stream: the host waits instead
        synchronize = getattr(stream, "synchronize", None)
        if synchronize is not None:
            synchronize()
        return
    current.wait_event(stream.record_event())
