"""`DTensor` on MindSpore: a tensor without memory of its own that has a local part, a layout and a global shape.

What this guarantees:

- Every call with a DTensor comes to `__fallback__` and from there to the dispatcher. MindSpore asks no hook in some
  places (an index, tensors in a list that is given to an older primitive, reading values): what is a method is replaced
  here, and what is not finds a tensor on the *meta* device, with which MindSpore refuses to compute.
- Autograd is the framework's, on local tensors. A DTensor shares the autograd data of its local tensor, though not its
  memory: `value_and_grad` and the tape find the one through the other, and gradients are plain local tensors, laid out
  as `gradient_layout` says.
- `_local` is the local tensor for uses whose gradient is whole. The result of a redistribution also keeps the values
  and the tensor they came from, for uses whose gradient is partial (rule T2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mindspore import Parameter, Tensor, mint, ops
from mindspore.graph.api import _no_grad

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, StateError, describe
from hyper_parallel.core.dtensor.gradients import gradient_layout
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.placements import Placement
from hyper_parallel.core.shard._op_dispatch import _OP_DISPATCHER, NoRuleError
from hyper_parallel.core.shard.local_parts import as_layout, checked_spec, mesh_coordinate
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.platform.mindspore.communication import Communication
from hyper_parallel.platform.mindspore.dtensor.global_meta import GlobalMeta
from hyper_parallel.platform.mindspore.dtensor.movement import (
    detached,
    extremes_reduced,
    is_grad_enabled,
    move_values,
    tied_to,
)
from hyper_parallel.platform.mindspore.dtensor.operators import Operator, operator_of
from hyper_parallel.platform.mindspore.parameters import new_parameter

__all__ = ["DTensor", "moved", "wrapped"]

_dispatch = _OP_DISPATCHER.dispatch
_make = Tensor._make_subclass


def _taken(x: Tensor, index: object) -> Tensor:
    return x[index]


_GETITEM = Operator("__getitem__", _taken)


class DTensor(GlobalMeta, Tensor):
    """A tensor over the ranks of a mesh. Made by `from_local`, `distribute_tensor` and the factories.

    Example:
        >>> import mindspore
        >>> import hyper_parallel as hp
        >>> mesh = hp.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        >>> x = hp.DTensor.from_local(mindspore.ops.ones((2, 3)), mesh, [hp.Shard(0)])
        >>> (x * 2).sum().item()
        12.0
    """

    _spec: Spec
    _local: Tensor
    _values: Tensor  # local values of the result of a redistribution
    _origin: tuple[Tensor, Layout]  # what that result was made from, with its layout
    _ties: dict[tuple[str, ...], Tensor]
    _backend: Any = None  # a `MindSporeDispatchBackend`, set by `backend.py`

    def __new__(cls, local: Tensor, spec: Spec | None = None) -> DTensor:
        if isinstance(local, DTensor) and spec is None:  # as `Parameter(dtensor)` does, with a class of both
            return wrapped(local._local, local._spec, cls)
        # Regions take tensors apart and put them together again: by this call, from the local tensor and the spec.
        if isinstance(spec, Spec):
            return wrapped(local, spec, cls)
        raise ArgumentTypeError(
            "A DTensor is not made by its class.",
            do="Use `DTensor.from_local(local, mesh, placements)` or `hp.distribute_tensor(tensor, mesh, placements)`.",
        )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # `Tensor.__init__` would give it memory.
        pass

    def __init_subclass__(cls, **options: Any) -> None:
        # `Parameter(dtensor)` is of a class that MindSpore makes of both; the dispatcher looks for exact classes.
        super().__init_subclass__(**options)
        _OP_DISPATCHER.add_dtensor(cls, DTensor._backend)

    def __fallback__(self, func: object, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        operator, given = operator_of(func, args)
        if operator.name == "typeof":  # a question, which composed operators ask
            return operator(*(value._local if isinstance(value, DTensor) else value for value in given))
        return _dispatch(operator, given, kwargs or {})

    # -- made from, and turned into, other things ---------------------------------------------------------------------

    @classmethod
    def from_local(
        cls,
        local: Tensor,
        mesh: DeviceMesh | Layout,
        placements: Sequence[Placement] | Layout | None = None,
        *,
        run_check: bool = False,
        shape: Sequence[int] | None = None,
    ) -> DTensor:
        """Make the DTensor whose part on this rank is `local`; gradients flow to it.

        Args:
            local: this rank's part.
            mesh: the mesh, or a layout instead of both.
            placements: one per mesh axis, or a layout.
            run_check: compare shapes and dtypes over all ranks, which communicates.
            shape: the global shape; needed where the parts are uneven.

        Raises:
            ValueError: the part does not have the shape that layout and global shape give it; with `run_check` also on
                the other ranks.
        """
        if isinstance(local, DTensor):
            raise ArgumentTypeError("This is a DTensor already.", got=describe(local), do="Use `redistribute`.")
        if not isinstance(local, Tensor):
            raise ArgumentTypeError("A part is a tensor.", expected="a mindspore.Tensor", got=describe(local))
        return wrapped(local, checked_spec(local, as_layout(mesh, placements, local.ndim), shape, run_check))

    def to_local(self) -> Tensor:
        """Return this rank's part, with its graph: its gradient is laid out as that of the DTensor.

        Of a parameter it is a parameter.
        """
        return self._local

    def full_tensor(self) -> Tensor:
        """Return the whole tensor, on every rank."""
        layout = self._spec.layout
        return self.redistribute(Layout(layout.mesh, ((),) * layout.ndim))._local

    def redistribute(
        self,
        mesh: DeviceMesh | Layout | Sequence[Placement] | None = None,
        placements: Sequence[Placement] | Layout | None = None,
    ) -> DTensor:
        """Return the same tensor in another layout of its mesh.

        Raises:
            ValueError: another mesh, or a layout of other dims.
        """
        layout = self._spec.layout
        if isinstance(mesh, (list, tuple)) and placements is None:
            mesh, placements = None, mesh
        target = as_layout(layout.mesh if mesh is None else mesh, placements, layout.ndim)
        if target.mesh is not layout.mesh:
            raise ArgumentError(
                "A tensor cannot be redistributed to another mesh.", expected=repr(layout.mesh), got=repr(target.mesh)
            )
        if target.ndim != layout.ndim:
            raise ArgumentError(
                "The layout has other dims than the tensor.", expected=f"{layout.ndim} dims", got=repr(target)
            )
        return moved(self, target)

    def reduce_partial(self) -> DTensor:
        """Return the same tensor with nothing partial."""
        return moved(self, self._spec.layout.without_partial())

    def detach(self) -> DTensor:
        """Return the same values outside of any graph."""
        return wrapped(detached(self._local), self._spec)

    @property
    def data(self) -> DTensor:
        """Return itself, as a `Parameter` does; of any other tensor the same values outside of any graph."""
        return self if isinstance(self, Parameter) else self.detach()

    @data.setter
    def data(self, value: DTensor) -> None:
        self.set_data(value)

    def set_data(self, data: DTensor, slice_shape: bool = False) -> DTensor:
        """Take over the values of another DTensor of the same shape, in whatever layout."""
        if not isinstance(data, DTensor) or data._spec.shape != self._spec.shape:
            raise ArgumentTypeError(
                "The data of a DTensor are replaced by those of another.",
                expected=f"a DTensor of shape {self._spec.shape}",
                got=describe(data),
            )
        with _no_grad():
            self._local._update_data(detached(moved(data, self._spec.layout)._local))
        return self._changed_in_place()

    def clone(self, init: object = "same") -> Any:
        """Return a copy; of a parameter another parameter."""
        if not isinstance(self, Parameter):
            return super().clone()
        if init == "same":
            return self.__deepcopy__({})
        # MindSpore's optimizers ask for other values, to make their states.
        raise StateError(
            "MindSpore's optimizers compile their step, and cannot compile distributed tensors.",
            expected="the local parameters",
            got=f"a DTensor, {self.name}",
            do="Give them those: `nn.Adam([p.to_local() for p in module.trainable_params()])`. Gradients are local "
            "already.",
        )

    # -- where MindSpore asks no hook ---------------------------------------------------------------------------------

    def contiguous(self) -> DTensor:
        return self if self._local.is_contiguous() else wrapped(self._local.contiguous(), self._spec)

    def __getitem__(self, index: Any) -> Any:
        return _dispatch(_GETITEM, (self, index), {})

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __setitem__(self, index: object, value: object) -> None:
        raise NoRuleError(
            "A distributed tensor cannot be written by index.",
            got=repr(self._spec),
            do="Use `ops.where`, or write into `x.to_local()`.",
        )

    def __contains__(self, value: Any) -> bool:
        return bool((self == value).any())

    # A plain tensor on the left asks its own hook, and has none. Python asks a subclass first, so these are asked.

    def __radd__(self, other: object) -> Any:
        return ops.add(other, self) if isinstance(other, Tensor) else super().__radd__(other)

    def __rsub__(self, other: object) -> Any:
        return ops.sub(other, self) if isinstance(other, Tensor) else super().__rsub__(other)

    def __rmul__(self, other: object) -> Any:
        return ops.mul(other, self) if isinstance(other, Tensor) else super().__rmul__(other)

    def __rtruediv__(self, other: object) -> Any:
        return ops.div(other, self) if isinstance(other, Tensor) else super().__rtruediv__(other)

    def __rpow__(self, other: object) -> Any:
        return ops.pow(other, self) if isinstance(other, Tensor) else super().__rpow__(other)

    def __rfloordiv__(self, other: object) -> Any:
        return ops.floor_div(other, self) if isinstance(other, Tensor) else super().__rfloordiv__(other)

    def __rmatmul__(self, other: object) -> Any:
        return ops.matmul(other, self)

    # -- gradients: those of the local tensor -------------------------------------------------------------------------

    @property
    def grad(self) -> DTensor | None:
        """Return what the tape has left, as a DTensor."""
        grad = self._local._grad
        return None if grad is None else wrapped(grad, Spec(gradient_layout(self._spec.layout), self._spec.shape))

    @grad.setter
    def grad(self, value: DTensor | None) -> None:
        self._local._grad = None if value is None else _laid_out(value, self)

    def requires_grad_(self, requires_grad: bool = True) -> DTensor:
        self._local.requires_grad_(requires_grad)
        return self

    def register_hook(self, hook: Callable[[DTensor], Any]) -> Any:
        """Have `hook` called with the gradient as a DTensor; it may answer another."""
        spec = Spec(gradient_layout(self._spec.layout), self._spec.shape)

        def on_local(grad: Tensor) -> Any:
            answer = hook(wrapped(grad, spec))
            return answer if answer is None else _laid_out(answer, self)

        return self._local.register_hook(on_local)

    # -- for the dispatcher -------------------------------------------------------------------------------------------

    def _tied(self, axes: tuple[str, ...]) -> Tensor:
        """Return the local tensor for uses whose gradient is partial on `axes`. See rules T1 and T2."""
        local, spec = self._local, self._spec
        if not is_grad_enabled() or not local._requires_grad:
            return local
        source, values, layout = local, None, spec.layout
        if "_view_of" in self.__dict__:
            ties = self.__dict__.setdefault("_ties", {})
            if axes not in ties:
                ties[axes] = self._view_of.tied(axes)
            return ties[axes]
        if "_origin" in self.__dict__:
            values, (source, layout) = self._values, self._origin
        elif local._is_leaf:
            # Not kept: its graph would outlive the step, and an optimizer changes the leaf in place.
            return tied_to(source, None, layout, spec.layout, axes, spec.shape)
        ties = self.__dict__.setdefault("_ties", {})
        if axes not in ties:
            ties[axes] = tied_to(source, values, layout, spec.layout, axes, spec.shape)
        return ties[axes]

    def _changed_in_place(self) -> DTensor:
        self.__dict__.pop("_ties", None)
        self.__dict__.pop("_view_of", None)
        return self

    # -- copies -------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if id(self) in memo:
            found: DTensor = memo[id(self)]
            return found
        # Copied by hand: what `copy.deepcopy` makes of a MindSpore tensor shares its memory.
        made = wrapped(Communication.transport.copy(detached(self._local)), self._spec)
        if isinstance(self, Parameter):
            made = as_parameter(made, self.name, self.requires_grad)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: object) -> Any:
        options = (self.name, self.requires_grad) if isinstance(self, Parameter) else None
        return _rebuilt, (Tensor(detached(self._local)), self._spec, options)


def _refused(name: str) -> Any:
    def refuse(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        raise StateError(
            f"A distributed tensor has no memory of its own for `{name}`.",
            do="Use `x.to_local()` for this rank's part, or `x.full_tensor()` for the whole.",
        )

    return refuse


# These read or write memory, or make a plain tensor of it; there is none.
_REFUSED = """
asnumpy numpy __array__ data_ptr untyped_storage storage storage_offset pin_memory assign_value assign_value_cpp set_
resize_ cauchy fill isreal log_normal
"""
for _name in _REFUSED.split():
    if hasattr(Tensor, _name):
        setattr(DTensor, _name, _refused(_name))


_placeholders: dict[tuple[Spec, Any], Tensor] = {}
_MOST_PLACEHOLDERS = 4096


def _placeholder(spec: Spec, dtype: object) -> Tensor:
    """Return a tensor without memory, of the shape that a local tensor of this spec has here."""
    found = _placeholders.get((spec, dtype))
    if found is None:
        if len(_placeholders) >= _MOST_PLACEHOLDERS:
            _placeholders.clear()
        shape = spec.local_shape_at(mesh_coordinate(spec.layout.mesh))
        found = _placeholders[spec, dtype] = mint.empty(shape, dtype=dtype, device="meta")
    return found


def wrapped(local: Tensor, spec: Spec, kind: type = DTensor) -> DTensor:
    """Make a DTensor of a local tensor.

    Raises:
        RuntimeError: it does not have the shape that the spec gives it here: a rule has answered a wrong one.
    """
    placeholder = _placeholder(spec, local.dtype)
    if local.shape != placeholder.shape:
        raise StateError(
            "A local tensor does not have the shape that its layout gives it.",
            expected=f"{list(placeholder.shape)}, for {spec}",
            got=str(list(local.shape)),
            do="Report the operator, which has a wrong rule.",
        )
    made: DTensor = _make(kind, local)
    made._update_data(placeholder)  # the autograd data stay those of `local`
    made._local = local
    made._spec = spec
    return made


def moved(tensor: DTensor, target: Layout) -> DTensor:
    """Move a tensor to another layout.

    Values are moved now, and tied to their source for each kind of use (rule T2).
    """
    spec = tensor._spec
    if target is spec.layout:
        return tensor
    source, layout = tensor._local, spec.layout
    is_recorded = is_grad_enabled() and source._requires_grad
    if any(op in ("max", "min", "prod") for _, op in layout.partial):
        source, layout = extremes_reduced(source, layout)
        if layout is target:
            return wrapped(source, Spec(target, spec.shape))
    values = move_values(detached(source), layout, target, spec.shape)
    if not is_recorded:
        return wrapped(values, Spec(target, spec.shape))
    # Tied at once (rule H5): what a function returns to `value_and_grad` is used by nobody.
    made = wrapped(tied_to(source, values, layout, target, (), spec.shape), Spec(target, spec.shape))
    made._values = values
    made._origin = source, layout
    return made


def as_parameter(tensor: DTensor, name: str | None, requires_grad: bool) -> Any:
    """Make a `Parameter` that is a DTensor. Its local tensor is a parameter, too: optimizers step on that one."""
    local = new_parameter(detached(tensor._local), name=name, requires_grad=True)
    # Set before it is wrapped: a parameter of a local tensor that needs no gradient would get none, without a word.
    local.requires_grad_()
    made = new_parameter(wrapped(local, tensor._spec), name=name, requires_grad=True)
    if not requires_grad:
        local.requires_grad = False
        made.requires_grad = False
    return made


def _laid_out(value: object, like: DTensor) -> Tensor:
    """Return the local part of a gradient, in the layout of the gradients of `like`."""
    if not isinstance(value, DTensor) or value._spec.shape != like._spec.shape:
        raise ArgumentTypeError(
            "This is not a gradient of the tensor.",
            expected=f"a DTensor of shape {like._spec.shape}",
            got=describe(value),
        )
    return moved(value, gradient_layout(like._spec.layout))._local


def _rebuilt(local: Tensor, spec: Spec, parameter: tuple[str, bool] | None) -> DTensor:
    made = wrapped(local, spec)
    return made if parameter is None else as_parameter(made, *parameter)
