"""How long forward and backward of each block of a model take on the device at hand.

Each block is a stage of its own for that: it is given what the one before it has made of an example batch. A copy of it
runs, so that gradients, buffers and random numbers of the user's are as before. What comes before the first block is
timed with it, and the loss with the last one.
"""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any

from hyper_parallel._base.errors import ArgumentError, HyperParallelError, StateError
from hyper_parallel.core.parallel.backend import Blocks, ParallelBackend
from hyper_parallel.core.parallel.pipeline.messages import form_of, rebuilt
from hyper_parallel.platform.interface import Platform

__all__ = ["measured_alike"]

_NUM_TIMED = 3  # of which the median counts; one more before them, in which libraries choose their ways


def measured_alike(platform: Platform, backend: ParallelBackend, blocks: Blocks, batch: object) -> list[float]:
    """Rank 0's times of the blocks in seconds, on all ranks: each cuts its model alike."""
    mine: list[float] | HyperParallelError | None = None
    if platform.get_world_size() == 1:
        return _measured(backend, blocks, batch)
    if platform.get_rank() == 0:
        try:
            mine = _measured(backend, blocks, batch)
        except Exception as error:  # told to all: they wait for the figures
            mine = error if isinstance(error, HyperParallelError) else StateError(_words(error))
    found: list[Any] = [None] * platform.get_world_size()
    platform.all_gather_object(found, mine)
    if isinstance(found[0], HyperParallelError):
        raise found[0]
    figures: list[float] = found[0]
    return figures


def _words(error: Exception) -> str:
    return f"Rank 0 could not measure the blocks: {type(error).__name__}: {error}"


def _measured(backend: ParallelBackend, blocks: Blocks, batch: object) -> list[float]:
    whole: tuple[Any, ...] = batch if isinstance(batch, tuple) else (batch,)
    given = whole
    times = []
    with backend.undisturbed():
        for number in range(len(blocks.names)):
            module = copy.deepcopy(blocks.stage(number, number + 1))
            runs = backend.stage(module)
            if str(runs.device) == "meta":
                raise ArgumentError(
                    "A block without data cannot be measured.",
                    expected="weights with data",
                    got="the meta device",
                    where=blocks.names[number],
                    do='Leave `batch` out: by="cost" counts weights then. Or give costs=.',
                )
            args, kwargs = runs.as_taken(whole, {})  # keywords of the batch go to every stage, as in a pipeline
            args = given if number else args
            trials = [_timed(backend, runs, module, args, kwargs) for _ in range(1 + _NUM_TIMED)]
            times.append(statistics.median(seconds for seconds, _ in trials[1:]))
            output = trials[-1][1]
            given = output if isinstance(output, tuple) else (output,)
    return times


def _timed(backend: ParallelBackend, runs: Any, module: Any, args: Any, kwargs: Any) -> tuple[float, Any]:
    """Seconds of one forward and backward, and the output without its graph."""
    form, tensors = form_of(backend, tuple(args))
    metas = [meta for meta in form.metas if meta is not None]
    leaves = [
        backend.as_input(tensor, requires_grad=backend.is_differentiable(meta))
        for tensor, meta in zip(tensors, metas, strict=True)
    ]
    backend.join(runs.device)
    begin = time.perf_counter()
    output = runs.forward(module, rebuilt(form, leaves), kwargs)
    loss = getattr(output, "loss", None)
    made, outputs = form_of(backend, output if loss is None else loss)
    ends = [tensor for tensor in outputs if backend.meta(tensor).requires_grad]
    if ends:
        inputs = [leaf for leaf in leaves if backend.meta(leaf).requires_grad]
        runs.backward(ends, [backend.as_sent(tensor) for tensor in ends], inputs)
    backend.join(runs.device)
    seconds = time.perf_counter() - begin
    return seconds, rebuilt(made, [backend.as_sent(tensor) for tensor in outputs])
