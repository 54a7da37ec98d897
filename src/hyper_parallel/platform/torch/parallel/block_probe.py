"""What a model's forward does around its blocks, seen in one run without weights.

Example, Hugging Face's Llama: `embed_tokens`, then for each block `hidden_states = block(hidden_states, attention_mask=
..., position_embeddings=...)`, then `norm` and `lm_head`. The run takes two tokens, NaN for weights, and stands-in for
blocks. It ends at the last block. What is found:

* **before**: the weights that lead to what the first block is given, and those of modules that are called before it.
  They are the first stage's; all others outside of the blocks are the last stage's.
* **place**: where a block is given the hidden states; here the first argument.
* **extra**: how many values a block returns after them, None where it returns the hidden states alone.

Rules, else the model is refused: a block is given the hidden states that the one before it has returned, as they are;
nothing else that it is given depends on a weight, or on what a block has returned, or is empty and could be filled.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.platform import trees
from hyper_parallel.platform.torch.parallel.skeleton import Elsewhere, skeleton_of

_FORMS: Sequence[int | None] = (None, 0, 1, 2, 3)  # values that a block may return after the hidden states


class Found(NamedTuple):
    """See above."""

    before: frozenset[tuple[str, str]]  # path of the module, name of the parameter
    place: int | str
    extra: int | None


class RunEndedError(BaseException):
    """Ends a forward at a block from which on it is another stage's. No Exception: the model may catch those."""


def probe(model: nn.Module, path: str, example: Mapping[str, Any]) -> Found:
    """Run a model's forward around the blocks of the list at `path`."""
    reasons = []
    for extra in _FORMS:
        run = _Run(model, path, extra)
        try:
            return run.found(example)
        except _OtherFormError as error:
            reasons.append(str(error))
        except ArgumentError:
            raise
        except Exception as error:  # of the model's: it does not take blocks that return so
            reasons.append(f"{type(error).__name__}: {error}".splitlines()[0])
        finally:
            # The skeleton's stands-in refer to the run. A cycle would keep the user's model until Python collects it.
            del run.skeleton
    raise _refusal(model, "Its forward could not be followed around the blocks", got="; ".join(dict.fromkeys(reasons)))


def example_of(model: nn.Module) -> dict[str, Any]:
    """The smallest batch of a model of text."""
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        raise _refusal(model, "It takes no token ids", got=str(getattr(model, "main_input_name", None)))
    return {"input_ids": torch.ones(1, 2, dtype=torch.long, device="cpu")}


def options_of(model: nn.Module) -> dict[str, Any]:
    """What a forward is told beside the batch: without a cache, which blocks would write to."""
    takes = inspect.signature(model.forward).parameters
    is_asked = hasattr(getattr(model, "config", None), "use_cache")
    is_taken = "use_cache" in takes or any(argument.kind is argument.VAR_KEYWORD for argument in takes.values())
    return {"use_cache": False} if is_asked and is_taken else {}


def _refusal(model: nn.Module, what: str, got: str) -> ArgumentError:
    return ArgumentError(
        f"{type(model).__name__} cannot be cut by itself: {what[0].lower()}{what[1:]}.",
        got=got,
        do="Give an example, split_stages(..., batch={...}), if it takes other inputs; or modules of your own: "
        "PipelineStage(module, index, num_stages).",
    )


class _OtherFormError(Exception):
    """The model does not take blocks that return so many values."""


class _Stand(Elsewhere):
    def __init__(self, block: nn.Module, number: int, run: _Run) -> None:
        super().__init__(block)
        self.__dict__["number"], self.__dict__["run"] = number, run

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run.call(self.number, args, kwargs)


class _Run:
    """One forward, for one number of values that a block returns."""

    def __init__(self, model: nn.Module, path: str, extra: int | None) -> None:
        self.model = model
        self.extra = extra
        self.blocks = list(model.get_submodule(path))
        stands = {str(number): _Stand(block, number, self) for number, block in enumerate(self.blocks)}
        self.skeleton = skeleton_of(model, path, stands, lambda *_: False)
        self.weights: dict[torch.Tensor, tuple[str, str]] = {}
        for left in self.skeleton.left_out:
            filled = left.fill(torch.device("cpu"), float("nan"))
            if filled.dtype.is_floating_point:
                self.weights[filled.requires_grad_()] = left.path, left.name
        for module in self.skeleton.model.modules():
            module.training = False  # with layers dropped at random, not all blocks would be seen
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type != "cpu":
                    module._buffers[name] = torch.zeros((), dtype=buffer.dtype).expand(buffer.shape)
        self.before: set[tuple[str, str]] = set()
        around = {id(self.skeleton.model.get_submodule(path[:at])) for at in _parts(path)}
        for owner in {id(left.owner): left.owner for left in self.skeleton.left_out}.values():
            if id(owner) not in around:
                owner.register_forward_pre_hook(self.note_call)
        self.place: int | str | None = None
        self.given: torch.Tensor | None = None
        self.extras: tuple[torch.Tensor, ...] = ()
        self.num_seen = 0

    def found(self, example: Mapping[str, Any]) -> Found:
        batch = trees.map_leaves(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, dict(example))
        try:
            with torch.enable_grad(), torch.device("cpu"):  # whatever is the default around a call
                self.skeleton.model(**{**options_of(self.model), **batch})
        except RunEndedError:
            if self.place is not None:
                return Found(frozenset(self.before), self.place, self.extra)
        raise _OtherFormError(f"its forward calls {self.num_seen} of {len(self.blocks)} blocks")

    def note_call(self, module: nn.Module, _: object) -> None:
        if self.num_seen == 0:
            self.before.update((left.path, left.name) for left in self.skeleton.left_out if left.owner is module)

    def call(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if number != self.num_seen:
            raise _refusal(
                self.model, "Its blocks are not called in order, once each", got=f"block {number} comes too early"
            )
        self.num_seen += 1
        places = _places(args, kwargs)
        if number == 0:
            place = "hidden_states" if "hidden_states" in places else next(iter(places), None)
            if place is None or not isinstance(places[place], torch.Tensor):
                raise _refusal(
                    self.model, "Its first block is given no tensor", got=", ".join(map(str, places)) or "nothing"
                )
            hidden = places[place]
            self.before.update(self.weights[leaf] for leaf in _leaves_of(hidden) if leaf in self.weights)
            self.given = torch.zeros(hidden.shape, dtype=hidden.dtype, requires_grad=True)
            self.extras = tuple(torch.zeros(hidden.shape, requires_grad=True) for _ in range(self.extra or 0))
            self.place = place if len(self.blocks) == 1 else None
        else:
            found = next((where for where, value in places.items() if value is self.given), None)
            if found is None or self.place not in (None, found):
                raise _OtherFormError(f"block {number} is not given what the one before it has returned, as it is")
            self.place = place = found
        for where, value in places.items():
            if where != place:
                self._check_side(number, where, value)
        if self.num_seen == len(self.blocks):
            raise RunEndedError
        return self.given if self.extra is None else (self.given, *self.extras)

    def _check_side(self, number: int, where: int | str, value: object) -> None:
        """Check what a block is given beside the hidden states: each stage makes it for itself."""
        wrong = self._wrong_with(value)
        if wrong:
            name = f"argument {where}" if isinstance(where, int) else f"`{where}`"
            raise _refusal(self.model, wrong[0], got=f"{name} of block {number}{wrong[1]}")

    def _wrong_with(self, value: object) -> tuple[str, str] | None:
        if isinstance(value, (dict, list, set)) and not value:
            return "Its blocks share something that they can fill", ""
        for leaf in trees.leaves(value):
            if isinstance(leaf, torch.Tensor):
                source = next(_leaves_of(leaf), None)
                if source is not None or (leaf.is_floating_point() and leaf.isnan().any()):
                    name = "" if source is None else ".".join(self.weights.get(source, ["what a block has returned"]))
                    what = "A block is given more than the hidden states that depends on weights"
                    return what, name and f", which depends on {name}"
            elif not isinstance(leaf, _PLAIN) and not callable(leaf):
                return "Its blocks share an object that may keep what they write", f", a {type(leaf).__name__}"
        return None


_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def _parts(path: str) -> list[int]:
    """Where the paths of the modules around a path end."""
    return [0, *(at for at, letter in enumerate(path) if letter == "."), len(path)]


def _places(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int | str, Any]:
    places: dict[int | str, Any] = dict(enumerate(args))
    places.update(kwargs)
    return places


def _leaves_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The leaves that a tensor was made of, as autograd knows them."""
    if tensor.grad_fn is None:
        if tensor.requires_grad:
            yield tensor
        return
    seen, waiting = {tensor.grad_fn}, [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            yield node.variable
        for child, _ in node.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                waiting.append(child)
