"""Layouts for what is not written with DTensors in mind.

`shard_module` lays out the parameters, inputs and outputs of a module, by dotted name or pattern. `custom_shard` makes
a function of local tensors one of DTensors.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, describe
from hyper_parallel.core.dtensor.framework import framework_folder
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh, as_mesh
from hyper_parallel.core.dtensor.placements import Placement, Shard, as_placement
from hyper_parallel.core.shard._op_dispatch import _OP_DISPATCHER
from hyper_parallel.core.shard.local_parts import checked_spec
from hyper_parallel.core.shard.rule_answer import tied_axes
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.platform import platform_of
from hyper_parallel.platform.opaque import Module
from hyper_parallel.platform.patterns import matching

__all__ = ["ShardPlan", "custom_shard", "shard_module"]


@dataclass
class ShardPlan:
    """Says which layouts a module's parameters, inputs and outputs have.

    Keys are dotted names, or patterns in which `*` stands for anything, dots included
    (`"layers.*.attention.wq.weight"`, `"*.wq.weight"`), as in the `regions=` of a plan; of several that match, the last
    wins. A layout is a `Layout`, a list of placements, or axis names per dim such as `("tp", None)`.

    Attributes:
        parameters: by the parameter's name. Others are replicated.
        inputs: by the module's name (`""` is the module itself): one layout per positional argument, None to leave one
            as it is; or a dict by keyword.
        outputs: by the module's name: one layout, or one per output.
    """

    parameters: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)
    outputs: Mapping[str, Any] = field(default_factory=dict)


def shard_module(module: Module, mesh: DeviceMesh, plan: ShardPlan | Mapping[str, Mapping[str, Any]]) -> Any:
    """Make every parameter of a module a DTensor, and lay out what goes in and comes out.

    The module itself is changed and returned.

    Every rank has the same whole parameters when it calls this. What goes in where `inputs` names the module may be
    plain: it is taken to be the same on all ranks, and laid out. Elsewhere a module takes DTensors: plain tensors do
    not mix with its parameters.

    Raises:
        ValueError: a name or pattern that matches nothing, or a layout that does not fit.

    Example:
        shard_module(mlp, mesh, ShardPlan(parameters={"up.weight": ("tp", None), "down.weight": (None, "tp")},
        outputs={"": (None, None)}))
    """
    if not isinstance(plan, ShardPlan):
        wrong = [part for part in plan if part not in ("parameters", "inputs", "outputs")] if _is_table(plan) else plan
        if not _is_table(plan) or wrong:
            raise ArgumentError(
                "A plan has three parts.",
                expected="a ShardPlan, or a dict of parameters, inputs and outputs",
                got=describe(wrong),
            )
        plan = ShardPlan(**plan)
    for part in (plan.parameters, plan.inputs, plan.outputs):
        if not _is_table(part) or not all(isinstance(name, str) for name in part):
            raise ArgumentTypeError("A part of a plan is layouts by name.", expected="a dict", got=describe(part))
    platform = platform_of(module, call="shard_module")
    mesh = as_mesh(mesh, "A module is sharded over a mesh.")
    parameters = platform.parameters_dict(module)
    cells = dict(platform.get_cells_and_names(module))
    chosen = _matches(plan.parameters, list(parameters), "parameter")
    inputs = _matches(plan.inputs, list(cells), "module")
    outputs = _matches(plan.outputs, list(cells), "module")
    # A name, not the package: hooks hold it, and a module is copied with its hooks.
    folder = f"hyper_parallel.platform.{platform.platform_type.value}.dtensor"
    tensors = importlib.import_module(folder)
    shared: dict[int, Any] = {}  # a parameter that stands in two places stays one
    for name, parameter in parameters.items():
        if isinstance(parameter, tensors.DTensor):
            continue
        if id(parameter) not in shared:
            wanted = chosen.get(name)
            layout = as_layout(wanted, mesh, len(parameter.shape), f"parameter {name}") if wanted is not None else None
            whole = Layout(mesh, ((),) * len(parameter.shape))
            shared[id(parameter)] = platform.set_layout_into_parameter(parameter, layout or whole)
        platform.update_parameter_by_name(module, (name, parameter), shared[id(parameter)])
    for cell in cells.values():
        for name, buffer in cell._buffers.items():
            if buffer is not None and not isinstance(buffer, tensors.DTensor):
                cell._buffers[name] = tensors.distribute_tensor(buffer, mesh)  # plain tensors do not mix with DTensors
    for name, wanted in inputs.items():
        hook = functools.partial(_lay_out_inputs, folder, mesh, wanted, name or "the module")
        platform.register_forward_pre_hook(cells[name], hook, with_kwargs=True)
    for name, wanted in outputs.items():
        cells[name].register_forward_hook(
            functools.partial(_lay_out_outputs, folder, mesh, wanted, name or "the module")
        )
    return module


def _is_table(thing: object) -> bool:
    return isinstance(thing, Mapping)


def custom_shard(
    fn: Callable[..., Any],
    mesh: DeviceMesh,
    in_placements: Sequence[Any],
    out_placements: object,
) -> Callable[..., Any]:
    """Make a function of local tensors one of DTensors.

    Arguments are laid out as said and passed locally, results are wrapped as said.

    Args:
        fn: the function on this rank's parts.
        mesh: where the tensors lie.
        in_placements: one layout per positional argument, None for what is no tensor.
        out_placements: a layout, or a tuple with one per result; a list is one layout's placements.

    Gradients of an argument that is replicated on an axis on which results vary are summed over it, as for every
    operator.
    """

    mesh = as_mesh(mesh, "A function of shards runs over a mesh.")

    @functools.wraps(fn)
    def on_shards(*args: Any, **kwargs: Any) -> Any:
        tensors = importlib.import_module(framework_folder("custom_shard"))
        if len(args) != len(in_placements):
            raise ArgumentError(
                f"`{getattr(fn, '__name__', 'the function')}` was called with other arguments than it has layouts.",
                expected=f"{len(in_placements)} positional arguments",
                got=str(len(args)),
            )
        laid_out = [
            arg if wanted is None else _laid_out(tensors, arg, wanted, mesh, f"argument {index}")
            for index, (arg, wanted) in enumerate(zip(args, in_placements, strict=True))
        ]
        return _call_on_shards(tensors.DTensor, fn, laid_out, kwargs, mesh, out_placements)

    return on_shards


def _call_on_shards(
    dtensor: Any,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    mesh: DeviceMesh,
    out_placements: Any,
) -> Any:
    """Call `fn` on local tensors, and wrap its results."""
    backend = _OP_DISPATCHER.backend_of(dtensor)
    is_several = isinstance(out_placements, tuple)
    wanted = out_placements if is_several else (out_placements,)
    # The layouts alone say what varies, and ties must be made before the call: they are what it is called with.
    outputs = [None if layout is None else _spec_of_any_shape(layout, mesh) for layout in wanted]
    locals_ = [arg._tied(tied_axes(arg._spec.layout, outputs)) if isinstance(arg, dtensor) else arg for arg in args]
    result = fn(*locals_, **kwargs)

    def made(index: int, value: Any, wanted_layout: Any) -> Any:
        if wanted_layout is None or not backend.is_tensor(value):
            return value
        layout = as_layout(wanted_layout, mesh, len(value.shape), f"result {index}")
        return backend.wrap(value, checked_spec(value, layout, None, False))

    results = tuple(result) if is_several else (result,)
    outcome = [made(index, value, layout) for index, (value, layout) in enumerate(zip(results, wanted, strict=True))]
    return tuple(outcome) if is_several else outcome[0]


def _own_placements(wanted: Any) -> Any:
    """Replace PyTorch's placements in a list by ours; leave anything else as it is."""
    if type(wanted) not in (list, tuple):
        return wanted
    return type(wanted)(as_placement(placement) or placement for placement in wanted)


def _spec_of_any_shape(wanted: Any, mesh: DeviceMesh) -> Spec:
    wanted = _own_placements(wanted)
    if isinstance(wanted, Layout):
        ndim = wanted.ndim
    elif any(isinstance(placement, Placement) for placement in wanted):
        # At least as many dims as any placement names. Where a negative dim ends up is not known yet, but for the ties
        # it only counts that it is split.
        ndim = 1 + max([0, *(abs(placement.dim) for placement in wanted if isinstance(placement, Shard))])
    else:
        ndim = len(wanted)
    return Spec(as_layout(wanted, mesh, ndim, "a result"), (1,) * ndim)


def as_layout(wanted: Any, mesh: DeviceMesh, ndim: int, what: str) -> Layout:
    """Make a layout of what users write: a `Layout`, placements (PyTorch's, too), or axis names per dim.

    Raises:
        ValueError: it does not fit the mesh or the tensor.
    """
    wanted = _own_placements(wanted)
    if isinstance(wanted, Layout):
        layout = wanted
    elif isinstance(wanted, (list, tuple)):
        # Placements and axis names are not mixed: an empty list is the layout of a tensor without dims.
        if any(isinstance(placement, Placement) for placement in wanted):
            layout = Layout.from_placements(mesh, list(wanted), ndim)
        else:
            layout = Layout(mesh, tuple(wanted))
    else:
        raise ArgumentTypeError(
            f"This is no layout for {what}.",
            expected='a Layout, placements such as [Shard(0)], or axis names per dim such as ("tp", None)',
            got=describe(wanted),
        )
    if layout.ndim != ndim:
        raise ArgumentError(
            f"The layout for {what} has other dims than the tensor.", expected=f"{ndim} dims", got=repr(layout)
        )
    return layout


def _matches(wanted: Mapping[str, Any], names: Sequence[str], what: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pattern, value in wanted.items():
        fitting = matching(pattern, names)
        if not fitting:
            near = ", ".join(list(names)[:8]) + (", …" if len(names) > 8 else "")
            raise ArgumentError(
                f"No {what} has a name that fits {pattern!r}.",
                expected=f"one of {near}",
                got="none",
                do="Check the plan.",
            )
        found.update(dict.fromkeys(fitting, value))
    return found


def _laid_out(tensors: Any, value: Any, wanted: Any, mesh: DeviceMesh, what: str) -> Any:
    shape = getattr(value, "shape", None)
    if shape is None:
        raise ArgumentTypeError(f"{what} has a layout and is no tensor.", expected="a tensor", got=describe(value))
    layout = as_layout(wanted, mesh, len(shape), what)
    if isinstance(value, tensors.DTensor):
        return value.redistribute(layout)
    return tensors.distribute_tensor(value, layout)


def _lay_out_inputs(folder: str, mesh: DeviceMesh, wanted: Any, name: str, module: Any, args: Any, kwargs: Any) -> Any:
    tensors = importlib.import_module(folder)
    by_name = wanted if isinstance(wanted, Mapping) else {}
    by_place = [] if isinstance(wanted, Mapping) else _per_value(wanted, len(args))
    laid_out = list(args)
    for index, layout in enumerate(by_place):
        if layout is not None:
            laid_out[index] = _laid_out(tensors, args[index], layout, mesh, f"input {index} of {name}")
    named = {
        key: _laid_out(tensors, value, by_name[key], mesh, f"input {key!r} of {name}") if key in by_name else value
        for key, value in kwargs.items()
    }
    return tuple(laid_out), named


def _lay_out_outputs(
    folder: str, mesh: DeviceMesh, wanted: object, name: str, module: Module, args: object, output: object
) -> Any:
    tensors = importlib.import_module(folder)
    if not isinstance(output, (tuple, list)):
        return _laid_out(tensors, output, wanted, mesh, f"the output of {name}")
    layouts = _per_value(wanted, len(output))
    return type(output)(
        value if layout is None else _laid_out(tensors, value, layout, mesh, f"output {index} of {name}")
        for index, (value, layout) in enumerate(zip(output, layouts, strict=True))
    )


def _per_value(wanted: Any, count: int) -> list[Any]:
    """Return one layout per value, from a list of layouts, or from one, which is for the first."""
    wanted = _own_placements(wanted)
    is_one = isinstance(wanted, Layout) or (
        isinstance(wanted, (list, tuple)) and all(item is None or isinstance(item, (str, Placement)) for item in wanted)
    )
    listed = [wanted] if is_one else list(wanted)
    if len(listed) > count:
        raise ArgumentError("There are more layouts than values.", expected=f"at most {count}", got=str(len(listed)))
    return listed + [None] * (count - len(listed))
