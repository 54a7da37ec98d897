"""Running out of memory: how it is recognised, and how what a failed attempt held is let go of."""

from __future__ import annotations

import contextlib
import gc
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from hyper_parallel._base.errors import HyperParallelError

# What accelerators raise where their allocator does not: a library that finds no room for its workspace.
_WORDS = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an attempt failed for want of device memory alone."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if isinstance(error, HyperParallelError):  # it says what else to do
        return False
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _WORDS)


def attempt(function: Callable[[], Any], device: torch.device) -> tuple[Any, str | None]:
    """Call the function and give what it gives and None; or None and what was said when memory ran out.

    Other errors pass.
    """
    try:
        return function(), None
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        said = str(error)
        let_go(error)
    release(device)
    return None, said


def let_go(error: BaseException) -> None:
    """Clear the frames of a failed attempt: they hold its tensors as long as somebody has the error."""
    pending: list[BaseException | None] = [error]
    while pending:
        failure = pending.pop()
        if failure is not None and failure.__traceback__ is not None:
            with contextlib.suppress(RuntimeError):  # a frame that still runs is passed over
                traceback.clear_frames(failure.__traceback__)
            failure.__traceback__ = None
            pending += [failure.__cause__, failure.__context__]


def release(device: torch.device) -> None:
    """Give memory back that nothing of use holds any more.

    It is in cycles, in the rest of a failed attempt's backward, and in what the allocator kept in other sizes.
    """
    _drop_failed_backward()
    gc.collect()
    if device.type != "cpu":
        handle = getattr(torch, device.type)
        handle.synchronize(device)
        handle.empty_cache()


def _drop_failed_backward() -> None:
    """Run a backward of nothing, so that the rest of a failed one is dropped.

    On a CPU backward runs in the calling thread, and what a failed one had still to do stays in that thread's queue,
    with the graph and all its tensors, until the next one begins. The caller may be in any mode, and where this fails
    only memory is lost.
    """
    with (
        contextlib.suppress(Exception),
        _disable_current_modes(),  # these ops are no one's
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        torch.ones((), device="cpu", requires_grad=True).mul(2).backward()


_lock = threading.Lock()
_words: list[str] = []
_original: Callable[..., None] = torch.autograd.backward


@contextlib.contextmanager
def said_in_backward(words: str) -> Iterator[None]:
    """Let a backward that runs out of memory in this block say these words, too.

    Hooks are told where a backward begins and where it ends, and nobody is told that it failed. So
    `torch.autograd.backward`, which `Tensor.backward` calls, is another function meanwhile; it is put back unless
    somebody else has replaced it since.
    """
    global _original
    with _lock:
        if torch.autograd.backward is not _backward and not _words:
            _original = torch.autograd.backward
            torch.autograd.backward = _backward
        _words.append(words)
    try:
        yield
    finally:
        with _lock:
            _words.remove(words)
            if not _words and torch.autograd.backward is _backward:
                torch.autograd.backward = _original


def _backward(*args: Any, **kwargs: Any) -> None:
    try:
        _original(*args, **kwargs)
    except Exception as error:
        if _words and is_out_of_memory(error) and _words[-1] not in str(error):
            error.args = (f"{error}\n{_words[-1]}", *error.args[1:])
        raise
