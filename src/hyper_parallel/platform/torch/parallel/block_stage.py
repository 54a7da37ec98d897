"""Stages of a model whose blocks are in a list, such as Hugging Face's: each runs the model's own forward.

Example: the second of two stages of a Llama with four blocks. Its forward makes masks and rotary embeddings as the
model does. Blocks 0 and 1 give what came from the first stage, whatever they are called with; blocks 2 and 3, the norm
and the head are the user's own; the loss is the model's. In the first stage the forward ends where block 2 would begin.

Masks and the like are made anew in each stage, so each needs the whole batch; from stage to stage go hidden states
alone. What was proved of the model before is in `block_probe.py`. What that run could not see, because it ends at the
last block, is seen in the first step: weights that a stage does not have are NaN in it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from hyper_parallel._base.errors import ArgumentError, StateError, describe
from hyper_parallel.platform import trees
from hyper_parallel.platform.torch.parallel.block_list import list_of_blocks
from hyper_parallel.platform.torch.parallel.block_probe import RunEndedError, example_of, options_of, probe
from hyper_parallel.platform.torch.parallel.labels import check_options, weight_of
from hyper_parallel.platform.torch.parallel.skeleton import Elsewhere, LeftOut, skeleton_of


class BlockList:
    """A model's blocks, and how stages of them are made. See `Blocks` in `core/parallel/backend.py`."""

    def __init__(self, model: nn.Module, by: object, batch: object) -> None:
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise ArgumentError(
                "An encoder with a decoder is two lists of blocks, and stages are cut of one.",
                got=type(model).__name__,
                do="Give modules of your own: PipelineStage(module, index, num_stages).",
            )
        check_options(model, {})
        self._model = model
        self._path = list_of_blocks(model, by)
        self._blocks = list(model.get_submodule(self._path))
        self._found = probe(model, self._path, _example(model, batch))
        self.names = [f"{self._path}.{number}" for number in range(len(self._blocks))]

    def stage(self, begin: int, end: int) -> nn.Module:
        """The blocks from `begin` to before `end`, with what comes before the first block or after the last one."""
        is_first, is_last = begin == 0, end == len(self._blocks)
        in_list: dict[str, nn.Module] = {}
        for number, block in enumerate(self._blocks):
            if number < begin:
                in_list[str(number)] = _Before(block, self._found.extra)
            else:
                in_list[str(number)] = block if number < end else _After(block, self._found.place)

        def is_here(path: str, name: str) -> bool:
            return is_first if (path, name) in self._found.before else is_last

        made = skeleton_of(self._model, self._path, in_list, is_here)
        return BlockStage(made.model, made.left_out, is_first=is_first, is_last=is_last)

    def num_weights(self) -> list[int]:
        return [num_weights(self.stage(number, number + 1)) for number in range(len(self._blocks))]


def num_weights(module: nn.Module) -> int:
    """How many weights are multiplied with: all but those of embeddings."""
    looked_up = {
        id(weight) for part in module.modules() if isinstance(part, nn.Embedding) for weight in part.parameters()
    }
    return sum(weight.numel() for weight in module.parameters() if id(weight) not in looked_up)


def as_keywords(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Put what a step was given into keywords: a batch comes as a dict or as arguments of the model."""
    if len(args) == 1 and isinstance(args[0], Mapping):
        return {**args[0], **kwargs}
    names = list(inspect.signature(model.forward).parameters)
    if len(args) > len(names):
        raise ArgumentError("The model takes fewer arguments.", expected=", ".join(names), got=str(len(args)))
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _example(model: nn.Module, batch: object) -> dict[str, Any]:
    if batch is None:
        return example_of(model)
    return as_keywords(model, batch if isinstance(batch, tuple) else (batch,), {})


class _Call:
    """One forward of a stage."""

    def __init__(self, received: torch.Tensor | None) -> None:
        self.received = received
        self.given: set[int] = set()  # blocks of stages before that have been called
        self.result: torch.Tensor | None = None


_call: ContextVar[_Call] = ContextVar("_call")


class _Before(Elsewhere):
    """A block of a stage before: it gives what came from there."""

    def __init__(self, block: nn.Module, extra: int | None) -> None:
        super().__init__(block)
        self.__dict__["extra"] = extra

    def forward(self, *_: object, **__: object) -> object:
        call = _call.get()
        if id(self) in call.given:
            raise StateError(
                "A block is called twice in one forward, so that the model cannot be cut by itself.",
                do="Give modules of your own: PipelineStage(module, index, num_stages).",
            )
        call.given.add(id(self))
        return call.received if self.extra is None else (call.received, *[None] * self.extra)


class _After(Elsewhere):
    """A block of a stage after: here this stage's forward ends."""

    def __init__(self, block: nn.Module, place: int | str) -> None:
        super().__init__(block)
        self.__dict__["place"] = place

    def forward(self, *args: Any, **kwargs: Any) -> object:
        _call.get().result = args[self.place] if isinstance(self.place, int) else kwargs[self.place]
        raise RunEndedError


class BlockStage(nn.Module):
    """One stage. Its parameters are the user's, with the names that they have in the whole model."""

    def __init__(self, skeleton: nn.Module, left_out: Sequence[LeftOut], *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        own = self.__dict__
        own["skeleton"] = skeleton  # no submodule: names would have a prefix
        for table in ("_modules", "_parameters", "_buffers"):
            own[table] = skeleton.__dict__[table]
        self.training = skeleton.training
        self.is_first, self.is_last = is_first, is_last
        self._left_out = left_out
        self._is_proved = False

    @property
    def config(self) -> Any:
        return self.skeleton.config

    @property
    def _init_weights(self) -> Any:
        """What fills a module as the model does, for `init_parameters`; None where the model does not."""
        return getattr(self.skeleton, "_init_weights", None)

    def as_keywords(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return as_keywords(self.skeleton, args, kwargs)

    def weight_of(self, batch: Mapping[str, Any]) -> float | None:
        """What the model's loss of a microbatch counts; None where it makes no loss."""
        return weight_of(self.skeleton, batch)

    def forward(self, *args: Any, received: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """Run this stage. `received`: what the stage before has given; the first stage has none."""
        batch = self.as_keywords(args, kwargs)
        if self.is_first != (received is None):
            raise ArgumentError(
                "Each stage but the first takes what the one before it gives.",
                expected="no `received`" if self.is_first else "the keyword `received`",
                got=describe(received),
            )
        self._check_batch(batch)
        batch = {**options_of(self.skeleton), **batch}
        device = (_tensors(batch)[0] if received is None else received).device
        for left in self._left_out:
            left.fill(device, float("nan"))
        self.skeleton.training = self.training
        call = _Call(received)
        token = _call.set(call)
        try:
            result = self.skeleton(**batch)
        except RunEndedError:
            result = call.result
        finally:
            _call.reset(token)
        if (not self.is_first and not call.given) or (not self.is_last and call.result is None):
            raise StateError(
                "The model's forward did not come to its blocks.", expected="blocks called in order", got="none"
            )
        self._check_whole(received, result)
        return result

    def _check_batch(self, batch: Mapping[str, Any]) -> None:
        check_options(self.skeleton, batch)
        if not _tensors(batch):
            raise ArgumentError(
                "Each stage of such a model takes the whole batch, for masks and positions.",
                expected="the batch on every rank",
                got=", ".join(batch) or "nothing",
                do="Call pipeline.step(batch) or pipeline.step(input_ids, labels=labels) alike on all ranks.",
            )

    def _check_whole(self, received: torch.Tensor | None, result: object) -> None:
        """Look once whether the result depends on a weight that this stage does not have."""
        if self._is_proved or not torch.is_grad_enabled() or (received is not None and received.isnan().any()):
            return
        made = [value for value in _tensors(result) if value.is_floating_point()]
        many = [value for value in made if value.dim()]  # a loss alone may be a mean over no label
        if received is not None and any(value.isnan().any() for value in many or made):
            raise StateError(
                "A result of this stage is not a number, though what it was given is.",
                expected="numbers that depend on this stage's weights and on what it was given",
                got=describe(result),
                where="weights that other stages have: " + ", ".join(_names(self._left_out)),
                do="If the whole model gives numbers here, it uses one of these after its blocks, too: "
                "give modules of your own, PipelineStage(module, index, num_stages).",
            )
        self._is_proved = True


def _names(left_out: Sequence[LeftOut]) -> list[str]:
    return [f"{left.path}.{left.name}".lstrip(".") for left in left_out]


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in trees.leaves(tree) if isinstance(leaf, torch.Tensor)]
