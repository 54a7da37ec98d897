"""A cell around a cell that changes no name.

A wrapper decides how the inner cell is *called*; for everything else it *is* the inner cell. As on PyTorch it is split
along the state of `nn.Cell`:

- What a cell *holds* (`_FROM_INNER`: parameters, cells, buffers, `training`) the wrapper reads from the inner cell,
  live, and keeps nothing of its own. The inner cell is not among the wrapper's `_cells` (those are the inner cell's),
  it lies in the wrapper's `__dict__`.
- What a cell does with what it holds (`_STATE_METHODS`) is called on the inner cell. MindSpore walks a tree by calling
  methods of the children (`cells_and_names`, `state_dict`, `apply`, `add_flags_recursive`) or by going through
  `_cells`, so an ancestor meets the inner cell either way and never a name of ours.
- How a cell is called (`construct`, the hooks, what `Cell.__call__` remembers about a call) belongs to the wrapper.

Parameters also carry a name of their own, which an ancestor sets when a cell is assigned to it: see
`update_parameters_name`.
"""

from __future__ import annotations

import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from mindspore import Parameter, nn

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError
from hyper_parallel.core.activation_checkpoint.transparent import (
    Transparent,
    check_wrapped,
    is_special,
    one_of,
    wrappers_below,
)
from hyper_parallel.platform.arguments import check_module
from hyper_parallel.platform.mindspore.regions.graph_mode import refusal

_CKPT_WRAPPED_MODULE = "_ckpt_wrapped_module"

_FROM_INNER = (
    "_params", "_cells", "_buffers", "_params_list", "_primitives", "_lazy_user_parameters",
    "training", "_phase", "_auto_prefix", "_id", "_exist_objs", "_exist_names",
    "_lazy_non_persistent_buffers_set",
    "_lazy_state_dict_hooks", "_lazy_state_dict_pre_hooks",
    "_lazy_load_state_dict_pre_hooks", "_lazy_load_state_dict_post_hooks",
)  # fmt: skip

_STATE_METHODS = (
    # members
    "cells_and_names", "parameters_and_names", "get_parameters", "trainable_params", "untrainable_params",
    "parameters_dict", "parameters_broadcast_dict", "name_cells", "cells", "get_sub_cell", "get_parameter",
    "insert_param_to_cell", "insert_child_to_cell", "register_buffer", "get_buffer", "named_buffers", "buffers",
    "check_names",
    "check_names_and_refresh_name", "update_cell_prefix", "update_cell_type", "_children_scope_recursive",
    "generate_scope",
    # in place, on the whole subtree
    "add_flags", "add_flags_recursive", "get_flags", "set_train", "to_float", "to", "to_empty", "apply",
    "init_parameters_data", "set_comm_fusion", "set_param_ps", "set_data_parallel", "flatten_weights",
    "infer_param_pipeline_stage",
    # state dicts
    "state_dict", "_save_to_state_dict", "load_state_dict", "_load_from_state_dict", "_register_state_dict_hook",
    "register_state_dict_post_hook", "register_state_dict_pre_hook", "_register_load_state_dict_pre_hook",
    "register_load_state_dict_pre_hook", "register_load_state_dict_post_hook",
)  # fmt: skip


class FuncCell(nn.Cell):
    """A plain callable as a cell without parameters."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__(auto_prefix=False)
        object.__setattr__(self, "_fn", fn)  # as it is: a cell in here would be a child

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        return self._fn(*args, **kwargs)

    def extend_repr(self) -> str:
        return getattr(self._fn, "__qualname__", None) or repr(self._fn)


class ActivationWrapper(Transparent, nn.Cell, ABC):
    """The base of the wrappers: transparent in everything but the call. Abstract: a subclass writes `construct`.

    Attributes that a subclass defines, sets in its `__init__` or names in `OWN` are the wrapper's own; every other one
    is read from, written to and deleted from the inner cell, and so are all that are parameters or cells.

    Example:
        >>> class Counted(ActivationWrapper):
        ...     def __init__(self, module):
        ...         super().__init__(module)
        ...         self.num_calls = 0
        ...
        ...     def construct(self, *args, **kwargs):
        ...         self.num_calls += 1
        ...         return self._ckpt_wrapped_module(*args, **kwargs)
        >>> model = nn.SequentialCell(Counted(nn.Dense(2, 2)))
        >>> [name for name, _ in model.parameters_and_names()]
        ['0.weight', '0.bias']
    """

    INNER = _CKPT_WRAPPED_MODULE
    OWN: frozenset[str] = frozenset({_CKPT_WRAPPED_MODULE, "construct", "runs_in_python"})

    def __init__(
        self, module: nn.Cell | Callable[..., Any] | None = None, *, mod: nn.Cell | Callable[..., Any] | None = None
    ) -> None:
        if getattr(type(self).construct, "__isabstractmethod__", False):
            # Python does not look, since a cell is made by the framework.
            raise ArgumentTypeError(
                f"{type(self).__name__} is abstract: it does not say how the inner cell is called.",
                expected="a subclass with its own construct()",
                do="Use `checkpoint_wrapper`, `swap_wrapper` or `offload_wrapper`, "
                "or write construct() in the subclass.",
            )
        inner = _as_cell(one_of(module, mod, type(self).__name__), type(self).__name__)
        super().__init__()
        self.__dict__[_CKPT_WRAPPED_MODULE] = inner

    @abstractmethod
    def construct(self, *args: Any, **kwargs: Any) -> Any:
        """Call the inner cell: a subclass says how."""
        raise ArgumentError(
            f"{type(self).__name__} does not say how the inner cell is called.",
            expected="a subclass with its own construct()",
            do="Use `checkpoint_wrapper`, `swap_wrapper` or `offload_wrapper`, or write construct() in the subclass.",
        )

    @property
    def runs_in_python(self) -> bool:
        """Return True.

        What compiles a model to a graph reads this where `construct` does, while it compiles, and is refused there.
        """
        reader = sys._getframe(1).f_globals.get("__name__", "")
        if reader.startswith("mindspore.graph._parse"):
            raise refusal(f"A wrapped cell ({type(self).__name__})")
        return True

    @property
    def unwrap_cell(self) -> nn.Cell:
        """Return the innermost cell."""
        cell = self._ckpt_wrapped_module
        while isinstance(cell, ActivationWrapper):
            cell = cell._ckpt_wrapped_module
        return cell

    def update_parameters_name(self, prefix: str | None = "", recurse: bool = True) -> None:
        """Name the parameters when the wrapper is assigned into a parent; one that is named already keeps its name.

        An ancestor would name it by the path from here; if it has the longer name of a place in a whole model, that
        would be lost, and two layers would come to have the same names.
        """
        prefix = prefix or ""
        for name, parameter in self.parameters_and_names(expand=recurse):
            if not parameter.name.startswith(prefix) and f".{prefix}" not in parameter.name:
                parameter.is_init = False
                parameter.name = prefix + name

    # Attributes

    def __setattr__(self, name: str, value: object) -> None:
        inner = self._inner_that_has(name)
        if inner is None and isinstance(value, (Parameter, nn.Cell)) and name in self.DEFINED - self.OWN:
            inner = self.__dict__.get(_CKPT_WRAPPED_MODULE)  # else nobody would train it
        if inner is None:
            object.__setattr__(self, name, value)
        else:
            setattr(inner, name, value)

    def _inner_that_has(self, name: str) -> nn.Cell | None:
        """Return the cell that an attribute of this name belongs to; `None` means the wrapper.

        What `Cell.__init__` has put into the wrapper's `__dict__` is how it is called.
        """
        inner = self.__dict__.get(_CKPT_WRAPPED_MODULE)
        if inner is None or name in self.OWN or name in self.__dict__ or is_special(name):
            return None
        is_own = name in self.DEFINED and not any(
            name in held for held in (inner._params, inner._cells, inner._buffers)
        )
        return None if is_own else inner

    def __repr__(self) -> str:
        inner = repr(self._ckpt_wrapped_module)
        lines = [*filter(None, self.extend_repr().split("\n")), f"({_CKPT_WRAPPED_MODULE}): {inner}"]
        return f"{type(self).__name__}(\n  " + "\n".join(lines).replace("\n", "\n  ") + "\n)"


def list_wrappers(model: nn.Cell) -> list[tuple[str, ActivationWrapper]]:
    """List every wrapper in `model` once, under the name of its inner cell; an outer one before an inner one."""
    return list(wrappers_below(check_module(model, nn.Cell, "wrappers"), children_of))


def children_of(cell: nn.Cell) -> Iterator[tuple[str, nn.Cell]]:
    """Go through every place in `cell` that holds a cell, also one that is in two of them."""
    if isinstance(cell, ActivationWrapper):
        yield _CKPT_WRAPPED_MODULE, cell._ckpt_wrapped_module
        return
    for name, child in cell._cells.items():
        if child is not None:
            yield name, child


def _as_cell(module: Any, call: str) -> nn.Cell:
    if module is None:
        check_module(module, nn.Cell, call)
    if isinstance(module, nn.Cell):
        return module
    check_wrapped(module, nn.Cell, call)
    return FuncCell(module)


# The parts of ActivationWrapper that are the same for many names.


def _from_inner(name: str) -> property:
    def read(self: ActivationWrapper) -> Any:
        return getattr(self.__dict__[_CKPT_WRAPPED_MODULE], name)

    def write(self: ActivationWrapper, value: object) -> None:
        inner = self.__dict__.get(_CKPT_WRAPPED_MODULE)
        if inner is not None:  # else Cell.__init__ sets up a state that this wrapper does not have
            object.__setattr__(inner, name, value)

    return property(read, write)


def _on_inner(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(nn.Cell, name))
    def method(self: ActivationWrapper, *args: Any, **kwargs: Any) -> Any:
        inner = self._ckpt_wrapped_module
        result = getattr(inner, name)(*args, **kwargs)
        return self if result is inner else result  # `set_train`, `to` and the like return the cell they were called on

    return method


for _name in _FROM_INNER:
    setattr(ActivationWrapper, _name, _from_inner(_name))
for _name in _STATE_METHODS:
    if hasattr(nn.Cell, _name):
        setattr(ActivationWrapper, _name, _on_inner(_name))
