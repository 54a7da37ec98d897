"""Saving: `hp.save`, rule by rule as in the README."""

from __future__ import annotations

import os
import time
from typing import Any, Literal, overload

from hyper_parallel._base import trace
from hyper_parallel._base.log import get_logger
from hyper_parallel.core.parallel.saving.background import Saving, finish_running, keep_running
from hyper_parallel.core.parallel.saving.contents import backend_of
from hyper_parallel.core.parallel.saving.job import Job, Opened
from hyper_parallel.core.parallel.saving.meetings import new_meeting
from hyper_parallel.core.parallel.saving.staging import staged
from hyper_parallel.platform.arguments import check_flag

__all__ = ["save"]

_logger = get_logger("saving")


@overload
def save(
    path: str | os.PathLike[str],
    *,
    model: Any,
    optimizer: Any = ...,
    extra: Any = ...,
    background: Literal[False] = ...,
    keep: int | None = ...,
    timeout: float = ...,
) -> None: ...


@overload
def save(
    path: str | os.PathLike[str],
    *,
    model: Any,
    optimizer: Any = ...,
    extra: Any = ...,
    background: Literal[True],
    keep: int | None = ...,
    timeout: float = ...,
) -> Saving: ...


def save(
    path: str | os.PathLike[str],
    *,
    model: Any,
    optimizer: Any = None,
    extra: Any = None,
    background: bool = False,
    keep: int | None = None,
    timeout: float = 600.0,
) -> Saving | None:
    """Save a model, and an optimizer with it, as one folder. All ranks make the call.

    After any exception, kill or power cut the folder at `path` is the old one or the new one, never a mix.

    Args:
        path: the folder. It may be there if it is an earlier checkpoint of this format.
        model: a module or cell, its parameters plain or distributed; a list of `hp.PipelineStage`; an `hp.Pipeline`.
            Plain tensors of one name on several ranks count as copies.
        optimizer: its state is saved by the names of the model's parameters.
        extra: plain values, the same on every rank, which `load` returns.
        background: return as soon as the values are copied, and write while training goes on.
        keep: how many checkpoints to leave in the parent folder; older ones are removed after the commit.
        timeout: after how many seconds without progress a rank is given up and named.

    Returns: with `background` a `Saving`, else None.

    Raises:
        OSError: the disk is full or read-only, or a folder may not be written. An earlier checkpoint is unchanged.
        CommunicationError: another rank could not save, or does not answer; it is named.
        ValueError, TypeError: an argument that cannot be used, or a tensor that cannot be saved.

    Example:
        >>> import torch, hyper_parallel as hp
        >>> model = torch.nn.Linear(4, 2)
        >>> hp.save("ckpt/step-100", model=model, extra={"step": 100})
        >>> hp.load("ckpt/step-100", model=model)
        {'step': 100}
    """
    finish_running()
    backend, no_model = backend_of(model, "save")
    job = Job(new_meeting("save", backend, path, timeout), backend)
    begun = time.perf_counter()
    try:
        if no_model is not None:
            raise no_model  # noqa: TRY301 - the other ranks are told by the same way
        check_flag(background, "background")
        job.prepare(path, model, optimizer, extra, keep)
        error: BaseException | None = None
    except BaseException as raised:
        error = raised
    opened = job.open(error)
    try:
        sources = job.sources(opened)
        if background:
            sources = staged(sources, backend)
    except BaseException as raised:
        job.fail(opened, raised)
        raise
    if not background:
        job.run(opened, sources)
        _report(job, opened, begun)
        return None
    saving = Saving(os.fspath(path), opened.num_bytes)

    def write() -> None:
        job.run(opened, sources, saving.note)
        _report(job, opened, begun)

    saving.start(write)
    keep_running(saving)
    return saving


def _report(job: Job, opened: Opened, begun: float) -> None:
    seconds = time.perf_counter() - begun
    rate = opened.num_bytes / seconds / 2**30
    _logger.info("saved %s: %d bytes of this rank in %.2f s, %.2f GiB/s", job.target, opened.num_bytes, seconds, rate)
    trace.emit("saving.save", path=job.target, bytes=opened.num_bytes, seconds=seconds)
