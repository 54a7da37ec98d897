"""Putting wrappers in the place of cells: `apply_activation_checkpointing`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import Parameter, nn

from hyper_parallel.core.activation_checkpoint.replacement import Tree, replace_submodules
from hyper_parallel.platform.arguments import check_module
from hyper_parallel.platform.mindspore.wrappers.activation_wrapper import (
    _CKPT_WRAPPED_MODULE,
    ActivationWrapper,
    children_of,
)
from hyper_parallel.platform.mindspore.wrappers.checkpoint_wrapper import checkpoint_wrapper


def apply_activation_checkpointing(
    model: nn.Cell,
    checkpoint_wrapper_fn: Callable[..., Any] = checkpoint_wrapper,
    check_fn: Callable[[nn.Cell], Any] = lambda _: True,
    auto_wrap_policy: object = None,
) -> None:
    """Replace cells of `model` by wrapped ones, in place; the model itself stays as it is.

    Args:
        model: the model whose cells are wrapped.
        checkpoint_wrapper_fn: makes the wrapper of a cell: `checkpoint_wrapper`, `swap_wrapper`, `offload_wrapper`, or
            one with options bound by `functools.partial`.
        check_fn: whether a cell is wrapped. Where a cell and one inside it are chosen, both are wrapped.
        auto_wrap_policy: takes the place of `check_fn`: a function `(module, recurse, nonwrapped_numel) -> bool`.

    Raises:
        ValueError: `auto_wrap_policy` is no function.
        TypeError: `check_fn` or `checkpoint_wrapper_fn` cannot be called, or the latter returned no cell.

    Example:
        >>> model = nn.SequentialCell(nn.Dense(2, 2), nn.ReLU())
        >>> apply_activation_checkpointing(model, check_fn=lambda cell: isinstance(cell, nn.Dense))
        >>> [type(child).__name__ for child in model]
        ['CheckpointWrapper', 'ReLU']
    """
    check_module(model, nn.Cell, "apply_activation_checkpointing")
    replace_submodules(TREE, model, checkpoint_wrapper_fn, check_fn, auto_wrap_policy)


def _put(parent: nn.Cell, name: str, child: nn.Cell) -> None:
    if isinstance(parent, ActivationWrapper):
        parent.__dict__[_CKPT_WRAPPED_MODULE] = child
        return
    # Not by assignment, which would name the parameters by the path from here; they are named already. A sequence has a
    # list beside the table.
    old = parent._cells[name]
    parent._cells[name] = child
    for attribute, value in vars(parent).items():
        if type(value) in (list, tuple) and any(element is old for element in value):
            vars(parent)[attribute] = type(value)(child if element is old else element for element in value)


def _numel(parameter: Parameter) -> int:
    return int(parameter.size)


TREE = Tree(nn.Cell, children_of, nn.Cell.get_parameters, _numel, _put)
