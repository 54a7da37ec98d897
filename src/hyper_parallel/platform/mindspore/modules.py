"""Modules: their tree, their parameters by name, hooks, state."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from mindspore import Parameter, ParameterTuple, Tensor, mint, nn

from hyper_parallel._base.errors import ArgumentTypeError, describe
from hyper_parallel.platform.arguments import check_hook, check_module, found_parameter
from hyper_parallel.platform.micro_batch import MicroBatch
from hyper_parallel.platform.mindspore.communication import Communication


class Modules:
    @staticmethod
    def get_cell_construct(cell: nn.Cell) -> Callable[..., Any]:
        return check_module(cell, nn.Cell, "get_cell_construct").construct

    @staticmethod
    def get_cells_and_names(cell: nn.Cell) -> list[tuple[str, nn.Cell]]:
        return list(check_module(cell, nn.Cell, "get_cells_and_names").cells_and_names())

    @staticmethod
    def parameters_dict(cell: nn.Cell) -> dict[str, Parameter]:
        # By path; the cell's own `parameters_dict` goes by `Parameter.name`, which users and wrappers change.
        return dict(check_module(cell, nn.Cell, "parameters_dict").parameters_and_names())

    @staticmethod
    def search_parameter_by_name(cell: nn.Cell, param_name: str) -> tuple[nn.Cell, str, Parameter] | None:
        check_module(cell, nn.Cell, "search_parameter_by_name")
        if not isinstance(param_name, str):
            raise ArgumentTypeError(
                "A parameter is found by its dotted path.",
                expected="for example 'layers.0.weight'",
                got=describe(param_name),
            )
        owner: Any = cell
        local_name = param_name
        # A local name may have dots: those of a ParameterTuple are kept under their own names.
        while owner._params.get(local_name) is None:
            step, dot, local_name = local_name.partition(".")
            owner = owner._cells.get(step) if dot else None
            if owner is None:
                return None
        return owner, local_name, owner._params[local_name]

    @staticmethod
    def update_parameter_by_name(cell: nn.Cell, result: tuple[Any, ...], new_param: Parameter) -> bool:
        """Replace the parameter that `search_parameter_by_name` found, or the one at a path: `(name, parameter)`.

        A parameter that `cell` holds in several places (tied weights, a `ParameterTuple`, a list of parameters) is
        replaced in all of them. One that was created without a name takes the name of the old one.
        """
        check_module(cell, nn.Cell, "update_parameter_by_name")
        found = found_parameter(result, lambda name: Modules.search_parameter_by_name(cell, name), new_param, Parameter)
        if found is None:
            return False
        owner, local_name, _ = found
        cells = [one for _, one in cell.cells_and_names()]
        if not any(owner is one for one in cells) or owner._params.get(local_name) is None:
            return False
        old = owner._params[local_name]
        if new_param.name.startswith(_GENERATED_NAME):
            new_param.name = old.name
        for one in cells:
            _replace_in(one, old, new_param)
        return True

    @staticmethod
    def is_linear_module(module: object) -> bool:
        return isinstance(module, (nn.Dense, mint.nn.Linear))

    @staticmethod
    def is_embedding_module(module: object) -> bool:
        return isinstance(module, (nn.Embedding, mint.nn.Embedding))

    @staticmethod
    def register_forward_pre_hook(
        module: nn.Cell, hook: Callable[..., Any], prepend: bool = False, with_kwargs: bool = False
    ) -> Any:
        check_hook(module, nn.Cell, hook, "register_forward_pre_hook", prepend=prepend, with_kwargs=with_kwargs)
        _FORWARD_PRE.prepare(module)
        return _HookHandle(
            module, _FORWARD_PRE, module.register_forward_pre_hook(hook, with_kwargs=with_kwargs), prepend
        )

    @staticmethod
    def register_full_backward_hook(module: nn.Cell, hook: Callable[..., Any], prepend: bool = False) -> Any:
        check_hook(module, nn.Cell, hook, "register_full_backward_hook", prepend=prepend)
        _BACKWARD.prepare(module)
        return _HookHandle(module, _BACKWARD, module.register_backward_hook(_forgets_when_it_raises(hook)), prepend)

    @staticmethod
    def register_full_backward_pre_hook(module: nn.Cell, hook: Callable[..., Any], prepend: bool = False) -> Any:
        check_hook(module, nn.Cell, hook, "register_full_backward_pre_hook", prepend=prepend)
        _BACKWARD_PRE.prepare(module)
        return _HookHandle(module, _BACKWARD_PRE, module.register_backward_pre_hook(hook), prepend)

    @staticmethod
    def micro_batch(
        micro_batch_num: int,
        args_batch_dim: Sequence[int | None] | None = None,
        kwargs_batch_dim: Mapping[str, int | None] | None = None,
    ) -> MicroBatch:
        return MicroBatch(micro_batch_num, args_batch_dim, kwargs_batch_dim, Tensor, mint.narrow)

    @staticmethod
    def get_model_state_dict(model: nn.Cell, *, options: object = None) -> dict[str, Tensor]:
        """Return parameters and buffers by name; `options` may have `full_state_dict`, `cpu_offload` and
        `rank0_only`.
        """
        state = dict(check_module(model, nn.Cell, "get_model_state_dict").state_dict())
        if getattr(options, "full_state_dict", False):  # every rank takes part, whoever keeps the result
            state = {name: _whole(value) for name, value in state.items()}
        if getattr(options, "rank0_only", False) and Communication.get_rank() != 0:
            return {}
        if getattr(options, "cpu_offload", False):
            return {name: value.to("CPU") if isinstance(value, Tensor) else value for name, value in state.items()}
        return state


def _whole(value: object) -> Any:
    gather = getattr(value, "full_tensor", None)  # of a DTensor
    return value if gather is None else gather()


_GENERATED_NAME = "Parameter#"  # how MindSpore names a parameter that was given no name


def _replace_in(cell: nn.Cell, old: Parameter, new: Parameter) -> None:
    """Put `new` wherever `cell` itself holds `old`."""
    for table in (cell._params, cell._params_list):
        for name, value in table.items():
            table[name] = _replaced(value, old, new)
    for name, value in vars(cell).items():
        # A ParameterTuple, or a list or tuple of parameters, is a plain attribute beside the tables.
        if isinstance(value, (list, tuple)) and any(item is old for item in value):
            vars(cell)[name] = _replaced(value, old, new)


def _replaced(value: object, old: Parameter, new: Parameter) -> Any:
    if value is old:
        return new
    if isinstance(value, list):
        value[:] = [new if item is old else item for item in value]
    elif isinstance(value, tuple) and any(item is old for item in value):
        items = (new if item is old else item for item in value)
        return ParameterTuple(items) if isinstance(value, ParameterTuple) else tuple(items)
    return value


class _HookTable(OrderedDict[int, Any]):
    """A cell's hooks by number, read through a copy.

    MindSpore runs over the table itself, so a hook that removes itself or another one would end the run with an error.
    """

    def items(self) -> Any:
        return list(super().items())

    def values(self) -> Any:
        return list(super().values())


class _HookPlace(NamedTuple):
    """Where a cell keeps one kind of hooks: their table, and the primitive that runs those of backward."""

    table: str
    runner: str | None

    def prepare(self, cell: nn.Cell) -> None:
        # A table in use stays: handles that the framework gave out point at it.
        if not getattr(cell, self.table):
            self._set(cell, _HookTable())

    def tidy(self, cell: nn.Cell) -> None:
        """Leave the cell as it was before the first hook, once the last one is gone.

        With a runner it cannot be copied.
        """
        if not getattr(cell, self.table):
            self._set(cell, None)

    def _set(self, cell: nn.Cell, table: _HookTable | None) -> None:
        object.__setattr__(cell, self.table, table)
        if self.runner is not None:
            # It points at the table that was there. A backward pass that still holds it finds no table, and no hooks.
            object.__setattr__(cell, self.runner, None)
            cell._primitives.pop(self.runner, None)


_FORWARD_PRE = _HookPlace("_lazy_forward_pre_hook", None)
_BACKWARD = _HookPlace("_lazy_backward_hook", "_cell_backward_hook")
_BACKWARD_PRE = _HookPlace("_lazy_backward_pre_hook", "_cell_backward_pre_hook")


class _HookHandle:
    """A hook that can be removed, more than once without harm; also a context that removes it."""

    def __init__(self, cell: nn.Cell, place: _HookPlace, handle: Any, prepend: bool) -> None:
        self._cell = weakref.ref(cell)
        self._place = place
        self._handle = handle
        if prepend:
            getattr(cell, place.table).move_to_end(handle.handle_id, last=False)

    def remove(self) -> None:
        self._handle.remove()
        cell = self._cell()
        if cell is not None:
            self._place.tidy(cell)

    def __enter__(self) -> _HookHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.remove()


def _forgets_when_it_raises(hook: Callable[..., Any]) -> Callable[..., Any]:
    if not callable(hook):  # MindSpore checks what it is handed, which is the function below
        raise ArgumentTypeError("A hook is a function.", expected="a callable", got=describe(hook))

    @functools.wraps(hook, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
    def run(cell: nn.Cell, grad_input: object, grad_output: object) -> Any:
        try:
            return hook(cell, grad_input, grad_output)
        except BaseException:
            # The runner keeps the outer gradients until all hooks have run; kept after an error, they would be taken
            # for those of the next backward pass.
            if cell._cell_backward_hook is not None:
                cell._cell_backward_hook.grad_output = None
            raise

    return run
