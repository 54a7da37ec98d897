"""What is said when a model cannot be called with the batch that it is planned for.

Such a batch is a loader, an array of NumPy, a dict or a tuple that the model does not take.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, HyperParallelError, describe

_WHAT = "The model cannot be called with this batch."
_NO_TENSORS = (type(None), bool, int, float, complex, str, bytes)


@contextmanager
def telling_of_the_batch(batch: object, forward: Callable[..., Any], to_tensor: str) -> Iterator[None]:
    """Say what is wrong with the batch where the call of a model in this block fails.

    Only then is the batch looked at: hooks may change what a model is given.

    Args:
        batch: as the user gave it.
        forward: the model's own, whose first argument is the model.
        to_tensor: how an array becomes a tensor of the framework.
    """
    try:
        yield
    except HyperParallelError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        told = _told(batch, forward, to_tensor)
        if told is None:
            raise
        raise told from error


def _told(batch: Any, forward: Callable[..., Any], to_tensor: str) -> HyperParallelError | None:
    leaves = list(_leaves(batch))
    if leaves and all(isinstance(leaf, _NO_TENSORS) for leaf in leaves):
        return ArgumentTypeError(_WHAT, expected="a batch with tensors in it", got=describe(batch))
    array = next((leaf for leaf in leaves if type(leaf).__module__ == "numpy"), None)
    if array is not None:
        return ArgumentTypeError(
            _WHAT, expected="tensors of the framework", got=describe(array), do=f"Convert it: {to_tensor}."
        )
    is_table = isinstance(batch, Mapping) or hasattr(type(batch), "keys")
    if not is_table and not isinstance(batch, (tuple, list, str, bytes)) and _gives_batches(batch):
        return ArgumentTypeError(
            _WHAT, expected="one batch", got=describe(batch), do="Take one of it: batch = next(iter(loader))."
        )
    if is_table and not _takes(forward, (), batch):
        return ArgumentError(
            _WHAT,
            expected="a dict of the model's keywords",
            got=f"the keywords {describe(list(batch.keys()))}",
            do="For one argument that is a dict give `(batch,)`.",
        )
    if isinstance(batch, (tuple, list)) and not _takes(forward, tuple(batch), {}):
        return ArgumentError(
            _WHAT,
            expected="a tuple of the model's arguments",
            got=f"{len(batch)} arguments",
            do="Give the inputs only. The loss is given the output only; the target comes from around it: "
            "loss_fn=lambda output: criterion(output, target).",
        )
    return None


def takes_the_output_alone(loss_fn: Callable[..., Any]) -> bool:
    """Say whether the loss function can be called with one argument, as far as can be seen.

    `nn.MSELoss()` cannot.
    """
    own = next((name for name in ("forward", "construct") if hasattr(type(loss_fn), name)), None)
    return _takes(loss_fn if own is None else getattr(loss_fn, own), (), {})


def _takes(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[Any, Any]) -> bool:
    """Say whether a function takes these arguments after one more: the module itself, or the output."""
    try:
        signature = inspect.signature(function)
    except Exception:  # of a builtin, of the user's own making
        return True
    try:
        signature.bind(None, *args, **kwargs)
    except TypeError:
        return False
    return True


def _gives_batches(thing: object) -> bool:
    """Say whether this is a loader, a data set or a generator: it can be gone through, and is no tensor."""
    kind = type(thing)
    return (hasattr(kind, "__iter__") or hasattr(kind, "__getitem__")) and not hasattr(kind, "shape")


def _leaves(tree: object) -> Iterator[Any]:
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, (tuple, list)):
        for subtree in tree:
            yield from _leaves(subtree)
    else:
        yield tree


def check_loss_fn(loss_fn: object) -> None:
    """Raise TypeError where the loss function cannot be called: before anything is measured."""
    if loss_fn is not None and not callable(loss_fn):
        raise ArgumentTypeError(
            "`loss_fn` gives the loss in what the model gives.",
            expected="a function of the model's output, or None",
            got=describe(loss_fn),
        )
    if loss_fn is not None and not takes_the_output_alone(loss_fn):
        raise ArgumentTypeError(
            "`loss_fn` is given what the model gives, and nothing else.",
            expected="a function of one argument",
            got=describe(loss_fn),
            do="Let it take the target from around it: loss_fn=lambda output: criterion(output, target).",
        )
