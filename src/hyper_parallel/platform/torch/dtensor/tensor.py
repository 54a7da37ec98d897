"""`DTensor` on PyTorch: a tensor without memory of its own that has a local part, a layout and a global shape.

What this guarantees:

- Every call with a DTensor comes to `__torch_function__` and from there to the dispatcher. One that gets past it
  reaches `__torch_dispatch__`, which raises: there is nothing that could be computed with.
- Autograd is the framework's, on local tensors. The DTensor itself is never part of a graph; what asks it about
  gradients (`requires_grad`, `grad`, `grad_fn`, `backward`, hooks) is answered by the local tensor.
- `_local` is the local tensor whose gradient is laid out as `gradient_layout` says. The result of a redistribution has
  it only once it is used so (rule T2); until then there are `_values` and the tensor they came from.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, StateError, describe
from hyper_parallel.core.dtensor.boxes import box_of
from hyper_parallel.core.dtensor.gradients import gradient_divisor, gradient_layout
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.mesh import _rebuild as rebuilt_mesh
from hyper_parallel.core.dtensor.placements import Placement
from hyper_parallel.core.shard._op_dispatch import _OP_DISPATCHER, NoRuleError
from hyper_parallel.core.shard.local_parts import as_layout, checked_spec, mesh_coordinate
from hyper_parallel.core.shard.spec import Spec
from hyper_parallel.platform.torch.dtensor.movement import extremes_reduced, move_values, tied_to
from hyper_parallel.platform.torch.dtensor.state_dicts import check_not_gathered

__all__ = ["DTensor", "wrapped"]

_make = torch.Tensor._make_wrapper_subclass
_dispatch = _OP_DISPATCHER.dispatch
DIRECT: dict[Any, Callable[..., Any]] = {}  # functions that ask about a tensor and have no rule; filled by `questions`


class DTensor(torch.Tensor):
    """A tensor over the ranks of a mesh. Made by `from_local`, `distribute_tensor` and the factories.

    Example:
        >>> import torch
        >>> import hyper_parallel as hp
        >>> mesh = hp.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        >>> x = hp.DTensor.from_local(torch.ones(2, 3), mesh, [hp.Shard(0)])
        >>> (x * 2).sum().item()
        12.0
    """

    _spec: Spec
    _local: torch.Tensor
    _values: torch.Tensor  # local values of the result of a redistribution, which has no `_local` until it is used
    _origin: tuple[torch.Tensor, Layout]  # what that result was made from, with its layout
    _ties: dict[tuple[str, ...], torch.Tensor]
    _last_grad: DTensor  # what `grad` answered last
    _view_of: Any  # a `View`, if it shares another one's memory

    def __new__(cls, local: torch.Tensor, spec: Spec | None = None, *, requires_grad: bool = False) -> DTensor:
        # Regions take tensors apart and put them together again: by this call, from the local tensor and the spec.
        if isinstance(spec, Spec):
            return wrapped(local, spec).requires_grad_(requires_grad or local.requires_grad)
        raise ArgumentTypeError(
            "A DTensor is not made by its class.",
            do="Use `DTensor.from_local(local, mesh, placements)` or `hp.distribute_tensor(tensor, mesh, placements)`.",
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        direct = DIRECT.get(func)
        if direct is not None:
            return direct(*args, **(kwargs or {}))
        return _dispatch(func, args, {} if kwargs is None else kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: object, types: object, args: Sequence[Any] = (), kwargs: object = None) -> Any:
        raise NoRuleError(
            f"`{func}` reached the framework with a distributed tensor.",
            expected="a function of `torch`, a method of the tensor, or a `DFunction`",
            got="a call from below them, such as `torch.autograd.Function.apply` or an operator of `torch.ops`",
            do="Make the function a `hp.DFunction`, or call it with `x.to_local()`.",
        )

    def __getattr__(self, name: str) -> Any:
        if name == "_local":
            values, (source, layout) = self._values, self._origin
            local = tied_to(source, values, layout, self._spec.layout, (), self._spec.shape)
            self._local = local
            return local
        raise AttributeError(f"'{type(self).__name__}' object has no attribute {name!r}")

    # -- made from, and turned into, other things ---------------------------------------------------------------------

    @classmethod
    def from_local(
        cls,
        local: torch.Tensor,
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
        if hasattr(local, "_local_tensor"):
            raise ArgumentTypeError(
                "This is a DTensor of PyTorch.", got=describe(local), do="Use `DTensor.from_torch(tensor)`."
            )
        if not isinstance(local, torch.Tensor):
            raise ArgumentTypeError("A part is a tensor.", expected="a torch.Tensor", got=describe(local))
        layout = mesh if isinstance(mesh, Layout) else as_layout(mesh, placements, local.ndim)
        return wrapped(local, checked_spec(local, layout, shape, run_check))

    def to_local(self) -> torch.Tensor:
        """Return this rank's part, with its graph: its gradient is laid out as that of the DTensor."""
        return self._local.view_as(self._local) if self._local.requires_grad else self._local

    def full_tensor(self) -> torch.Tensor:
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
        target = (
            mesh
            if isinstance(mesh, Layout)
            else as_layout(layout.mesh if mesh is None else mesh, placements, layout.ndim)
        )
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

    def to_torch(self) -> Any:
        """Return PyTorch's own DTensor with the same part; no copy, and gradients flow."""
        from hyper_parallel.platform.torch.dtensor.conversion import to_torch

        return to_torch(self)

    @staticmethod
    def from_torch(tensor: object) -> DTensor:
        """Make a DTensor of PyTorch's own, with the same part; no copy, and gradients flow."""
        from hyper_parallel.platform.torch.dtensor.conversion import from_torch

        return from_torch(tensor)

    # -- what it looks like -------------------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout:  # the contract's name; PyTorch's own `layout` always says "strided"
        return self._spec.layout

    @property
    def placements(self) -> tuple[Placement, ...]:
        return self._spec.layout.placements

    @property
    def device_mesh(self) -> DeviceMesh:
        return self._spec.layout.mesh

    @property
    def _local_tensor(self) -> torch.Tensor:
        """Return the local values, tied or not.

        The name is that of PyTorch's own DTensor: what moves memory asks for it.
        """
        return _any_local(self)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Return the shape of this rank's part."""
        return tuple(_any_local(self).shape)

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._spec.shape)

    @property
    def ndim(self) -> int:
        return len(self._spec.shape)

    @property
    def dtype(self) -> torch.dtype:
        return _any_local(self).dtype

    @property
    def device(self) -> torch.device:
        return _any_local(self).device

    def stride(self, dim: int | None = None) -> Any:
        """Return strides of the whole tensor, as if it lay in memory in the order of this rank's part."""
        local = _any_local(self)
        order = sorted(range(self.ndim), key=lambda at: (-local.stride(at), at))
        strides, step = [0] * self.ndim, 1
        for at in reversed(order):
            strides[at] = step
            step *= max(self._spec.shape[at], 1)
        return tuple(strides) if dim is None else strides[dim]

    def __len__(self) -> int:
        if not self._spec.shape:
            raise TypeError("len() of a 0-d tensor")
        return self._spec.shape[0]

    def __repr__(self, *, tensor_contents: object = None) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"DTensor({dtype}{list(self._spec.shape)}, {self._spec.layout}, here: {_any_local(self)!r})"

    def item(self) -> Any:
        """Return the number, of the whole tensor."""
        if self._spec.num_elements != 1:
            raise ArgumentError("Only one element can be a number.", expected="one", got=f"shape {self._spec.shape}")
        with torch.no_grad():
            return self.full_tensor().item()

    def tolist(self) -> Any:
        with torch.no_grad():
            return self.full_tensor().tolist()

    # -- gradients: those of the local tensor -------------------------------------------------------------------------

    @property
    def requires_grad(self) -> bool:
        return self._local.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self._local.requires_grad = value

    def requires_grad_(self, requires_grad: bool = True) -> DTensor:
        self._local.requires_grad_(requires_grad)
        return self

    @property
    def is_leaf(self) -> bool:
        return self._local.is_leaf

    @property
    def grad_fn(self) -> Any:
        return self._local.grad_fn

    @property
    def retains_grad(self) -> bool:
        return self._local.retains_grad

    def retain_grad(self) -> None:
        self._local.retain_grad()

    @property
    def grad(self) -> Any:
        grad = self._local.grad
        if grad is None:
            return None
        # speed: an optimizer asks several times in a step; a wrapper costs 6 us (CPU, 2026-11-20)
        last = self.__dict__.get("_last_grad")
        if last is None or last._local is not grad:
            last = self._last_grad = _as_gradient(grad, self)
        return last

    @grad.setter
    def grad(self, value: DTensor | None) -> None:
        self.__dict__.pop("_last_grad", None)
        self._local.grad = None if value is None else _laid_out(value, self, "a gradient")

    @grad.deleter
    def grad(self) -> None:
        self.__dict__.pop("_last_grad", None)
        self._local.grad = None

    @property
    def data(self) -> DTensor:
        return wrapped(self._local.data, self._spec)

    @data.setter
    def data(self, value: DTensor) -> None:
        if not isinstance(value, DTensor) or value._spec.shape != self._spec.shape:
            raise ArgumentTypeError(
                "The data of a DTensor are replaced by those of another.",
                expected=f"a DTensor of shape {self._spec.shape}", got=describe(value),
            )  # fmt: skip
        self._local.data = value._local.data
        self._spec = value._spec

    def detach(self) -> DTensor:
        check_not_gathered(self)
        return wrapped(_any_local(self).detach(), self._spec)

    def detach_(self) -> DTensor:
        self._local.detach_()
        return self

    def backward(
        self,
        gradient: DTensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        """Run backward from this tensor, of one element or with its gradient, over all ranks at once."""
        if gradient is not None:
            local = _laid_out(gradient, self, "a gradient")
        elif self._spec.num_elements != 1:
            raise StateError("grad can be implicitly created only for scalar outputs", got=f"shape {self._spec.shape}")
        else:
            local = torch.ones_like(self._local) / gradient_divisor(self._spec.layout)  # rule G4
        chosen = None
        if inputs is not None:
            listed = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
            chosen = [tensor._local if isinstance(tensor, DTensor) else tensor for tensor in listed]
        torch.autograd.backward(self._local, local, retain_graph, create_graph, inputs=chosen)

    def register_hook(self, hook: Callable[[DTensor], Any]) -> Any:
        """Have `hook` called with the gradient as a DTensor; it may answer another."""

        def on_local(grad: torch.Tensor) -> Any:
            answer = hook(_as_gradient(grad, self))
            return answer if answer is None else _laid_out(answer, self, "a gradient")

        return self._local.register_hook(on_local)

    def register_post_accumulate_grad_hook(self, hook: Callable[[DTensor], None]) -> Any:
        return self._local.register_post_accumulate_grad_hook(lambda _: hook(self))

    # -- for the dispatcher -------------------------------------------------------------------------------------------

    def _tied(self, axes: tuple[str, ...]) -> torch.Tensor:
        """Return the local tensor for uses whose gradient is partial on `axes`. See rules T1 and T2."""
        if not torch.is_grad_enabled():
            return _any_local(self)
        spec = self._spec
        if "_local" in self.__dict__:
            local = self._local
            if not local.requires_grad:
                return local
            if "_view_of" in self.__dict__:
                ties = self.__dict__.setdefault("_ties", {})
                if axes not in ties:
                    ties[axes] = self._view_of.tied(axes)
                view: torch.Tensor = ties[axes]
                return view
            source, values, layout = local, None, spec.layout
        else:
            values, (source, layout) = self._values, self._origin
        if values is None and source.is_leaf:
            # Not kept: its graph would outlive the step, and an optimizer changes the leaf in place.
            return tied_to(source, None, layout, spec.layout, axes, spec.shape)
        ties = self.__dict__.setdefault("_ties", {})
        if axes not in ties:
            ties[axes] = tied_to(source, values, layout, spec.layout, axes, spec.shape)
        tied: torch.Tensor = ties[axes]
        return tied

    def _changed_in_place(self) -> DTensor:
        self.__dict__.pop("_ties", None)
        self.__dict__.pop("_view_of", None)
        return self

    # -- copies -------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        if id(self) in memo:
            found: DTensor = memo[id(self)]
            return found
        made = wrapped(copy.deepcopy(self._local, memo), self._spec)
        if getattr(self, "_is_param", False):
            made._is_param = True
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: object) -> Any:
        coordinate = mesh_coordinate(self._spec.layout.mesh)
        return _rebuilt, (self._local, self._spec, bool(getattr(self, "_is_param", False)), coordinate)

    # -- saved by torch.distributed.checkpoint, as PyTorch's own DTensor is: by its protocol ---------------------------

    def __create_write_items__(self, fqn: str, tensor: object) -> Any:
        native = self.detach().to_torch()
        return native.__create_write_items__(fqn, native)

    def __create_chunk_list__(self) -> Any:
        return self.detach().to_torch().__create_chunk_list__()

    def __get_tensor_shard__(self, index: object) -> torch.Tensor:
        shard: torch.Tensor = self.detach().to_torch().__get_tensor_shard__(index)
        return shard


def wrapped(local: torch.Tensor, spec: Spec) -> DTensor:
    """Make a DTensor of a local tensor; nothing is checked."""
    made: DTensor = _make(DTensor, spec.shape, dtype=local.dtype, device=local.device)
    made._local = local
    made._spec = spec
    return made


def moved(tensor: DTensor, target: Layout) -> DTensor:
    """Move a tensor to another layout.

    Values are moved now, and tied to their source when they are used (rule T2).
    """
    spec = tensor._spec
    if target is spec.layout:
        return tensor
    is_recorded = torch.is_grad_enabled() and tensor.requires_grad
    source, layout = (tensor._local if is_recorded else _any_local(tensor)), spec.layout
    if any(op in ("max", "min", "prod") for _, op in layout.partial):
        source, layout = extremes_reduced(source, layout)
        if layout is target:
            return wrapped(source, Spec(target, spec.shape))
    values = move_values(source.detach(), layout, target, spec.shape)
    if not is_recorded:
        return wrapped(values, Spec(target, spec.shape))
    made: DTensor = _make(DTensor, spec.shape, dtype=values.dtype, device=values.device)
    made._spec = Spec(target, spec.shape)
    made._values = values
    made._origin = source, layout
    return made


def _any_local(tensor: DTensor) -> torch.Tensor:
    """Return the local values, tied or not."""
    found = tensor.__dict__.get("_local")
    return tensor._values if found is None else found


def _laid_out(value: object, like: DTensor, what: str) -> torch.Tensor:
    """Return the local part of a gradient, in the layout of the gradients of `like`."""
    if not isinstance(value, DTensor) or value._spec.shape != like._spec.shape:
        raise ArgumentTypeError(
            f"This is not {what} of the tensor.", expected=f"a DTensor of shape {like._spec.shape}", got=describe(value)
        )
    local = moved(value, gradient_layout(like._spec.layout))._local
    divisor = gradient_divisor(like._spec.layout)
    return local if divisor == 1 else local / divisor  # rule G4


def _as_gradient(grad: torch.Tensor, of: DTensor) -> DTensor:
    """Make the DTensor that a local gradient is the part of."""
    if not of._spec.layout.partial:  # most: gradients lie as their tensors do
        return wrapped(grad, of._spec)
    divisor = gradient_divisor(of._spec.layout)
    whole = grad if divisor == 1 else grad * divisor
    return wrapped(whole, Spec(gradient_layout(of._spec.layout), of._spec.shape))


def _rebuilt(local: torch.Tensor, spec: Spec, is_parameter: bool, coordinate: tuple[int, ...] | None = None) -> DTensor:
    """Make a DTensor from a pickle.

    A process at another coordinate than the one that wrote it would take its part for the own: refused.
    """
    layout = spec.layout
    here = mesh_coordinate(layout.mesh)
    if coordinate is not None and _part(spec, coordinate) != _part(spec, here):
        raise StateError(
            "A file or message has another rank's part of a distributed tensor.",
            expected=f"the part at {here} of {layout.mesh}",
            got=f"that at {coordinate}",
            do="Let every rank load what it saved; or save whole tensors (`x.full_tensor()`), or by "
            "`torch.distributed.checkpoint`.",
        )
    made = wrapped(local, spec)
    if is_parameter:
        made._is_param = True
    return made


def _part(spec: Spec, coordinate: tuple[int, ...]) -> Any:
    """Return what a rank there holds: its box, and its summand where there are several."""
    layout = spec.layout
    return box_of(layout, spec.shape, coordinate), [
        coordinate[layout.mesh.axis_index(axis)] for axis, _ in layout.partial
    ]


# `torch.load(weights_only=True)` reads what `torch.save` wrote: these make layouts, and run no code that is in a file.
torch.serialization.add_safe_globals([_rebuilt, Spec, Layout, rebuilt_mesh])
