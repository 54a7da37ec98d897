"""A step that leaves no trace.

The model and the random generators that can be set back are afterwards as they were (`model_state`).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from mindspore import ParameterTuple, Tensor, nn, value_and_grad
from mindspore.graph.api import _pynative_executor

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, ComesLaterError, describe
from hyper_parallel.core.planner.plan.batch_words import telling_of_the_batch
from hyper_parallel.platform.mindspore.planner.model_state import ModelState
from hyper_parallel.platform.trees import leaves

LossFn = Callable[[Any], Any]


_states: weakref.WeakKeyDictionary[nn.Cell, ModelState] = weakref.WeakKeyDictionary()  # of models that are preserved


@contextlib.contextmanager
def preserved(model: nn.Cell, batch: object = None, loss_fn: LossFn | None = None) -> Iterator[ModelState]:
    """Open a block for steps after which all is as before, also after Ctrl-C.

    A block inside of another one puts everything back as well, so that all steps begin alike.

    Raises:
        ArgumentError (a ValueError): something cannot be put back.
        StateError: something was not put back.
    """
    if (outer := _states.get(model)) is not None:
        try:
            yield outer
        finally:
            outer.put_back()
        return
    with contextlib.ExitStack() as stack:
        state = ModelState(model, loss_fn, batch=batch)
        stack.callback(state.end)
        _states[model] = state
        stack.callback(_states.pop, model)
        yield state


def device_of(model: nn.Cell) -> str:
    """Find the one device of a model.

    Raises:
        ValueError: its parameters are on several, or on the meta device.
    """
    devices = {str(parameter.device) for parameter in model.get_parameters()}
    if len(devices) != 1 or "meta" in devices:
        raise ArgumentError(
            "A plan is made for the device that a model is on.",
            expected="all parameters on one device with memory",
            got=", ".join(sorted(devices)) or "no parameters",
            where=type(model).__name__,
        )
    return next(iter(devices))


def call(model: nn.Cell, batch: Any) -> Any:
    """Call the model with a batch: a tensor, a tuple of arguments, or a dict of keywords."""
    with telling_of_the_batch(batch, type(model).construct, "mindspore.Tensor(array)"):
        if isinstance(batch, dict):
            return model(**batch)
        if isinstance(batch, (tuple, list)):
            return model(*batch)
        return model(batch)


def loss_of(output: object, loss_fn: LossFn | None) -> Tensor:
    """Find the scalar that backward starts from.

    Raises:
        ValueError, TypeError: there is none; the message says what `loss_fn` should give.
    """
    if loss_fn is not None:
        loss = loss_fn(output)
    elif isinstance(output, dict):
        loss = output.get("loss", output)
    else:
        loss = getattr(output, "loss", output)
    if not isinstance(loss, Tensor):
        raise ArgumentTypeError(
            "No loss was found in what the model gives.",
            expected="a scalar tensor",
            got=describe(loss),
            do="Give loss_fn, for example loss_fn=lambda logits: logits.mean().",
        )
    if loss.size != 1:
        raise ArgumentError(
            "The loss cannot be differentiated.",
            expected="one number that depends on a parameter",
            got=describe(loss),
            do="Give a loss_fn that returns a scalar.",
        )
    return loss


def run_step(model: nn.Cell, batch: object, loss_fn: LossFn | None, at_turn: Callable[[], None] | None = None) -> float:
    """Run one forward and backward, as `value_and_grad` does, and give the loss.

    `at_turn` is called between the two.
    """
    weights = model.trainable_params()
    if not weights:
        raise ArgumentError("No parameter of the model is trained.", where=type(model).__name__)

    def forward() -> Tensor:
        loss = loss_of(call(model, batch), loss_fn)
        if at_turn is not None:
            at_turn()
        return loss

    flag = _pynative_executor.grad_flag()
    try:
        loss, gradients = value_and_grad(forward, None, ParameterTuple(weights))()
        del gradients
    except BaseException:
        _pynative_executor.clear_res()  # MindSpore goes on with the graph of the step that failed otherwise
        raise
    finally:
        _pynative_executor.set_grad_flag(flag)  # which `value_and_grad` leaves switched off
    return float(loss.asnumpy())


def tensors_of(batch: object) -> list[Tensor]:
    return [leaf for leaf in leaves(batch) if isinstance(leaf, Tensor)]


def attempt(function: Callable[[], Any], device: str) -> tuple[Any, str | None]:
    """Call a function and give what it gives, and None; or None, and what the framework says of memory that ran out."""
    try:
        return function(), None
    except MemoryError as error:
        return None, str(error)


def check_alone(what: str) -> None:
    raise ComesLaterError(
        f"{what} comes later on MindSpore.", do="Plan for the largest batch, and apply without `on_oom`."
    )
