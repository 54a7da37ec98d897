"""A module around a module that changes no name.

A wrapper decides how the inner module is *called*; for everything else it *is* the inner module. So it is split along
nn.Module's own state (`_FROM_INNER` and `OWN` below; a test keeps both complete):

- What a module *holds* (`_parameters`, `_buffers`, `_modules`, `training`, the state-dict hooks) the wrapper reads from
  the inner module, live, and keeps nothing of its own. The inner module is not in the wrapper's `_modules` (those are
  the inner module's children), it lies in the wrapper's `__dict__`.
- What a module does with what it holds (`_STATE_METHODS`) is called on the inner module. PyTorch walks a tree by
  calling methods of the children (`named_modules`, `state_dict`, `_apply`, `apply`, `train`, `_load_from_state_dict`)
  or by going through `_modules`, so an ancestor, a plain nn.Module, meets the inner module either way and never a name
  of ours. `load_state_dict` is the one walk that does both: the ancestor calls `_load_from_state_dict` (the inner
  module's, with its hooks and extra state) and descends into `_modules` (the inner module's children, under the prefix
  that they always had).
- How a module is called (`forward`, the forward and backward hooks) belongs to the wrapper: a hook registered on the
  wrapper runs around the wrapped call, outside of recomputation and swapping; one registered on the inner module runs
  inside.

Two things PyTorch gives no way to hide. `children()` and `named_children()` of an ancestor, its attributes, indexing
and `get_submodule` give the wrapper: that is how the wrapper gets called. Where one module stands bare and wrapped
beside each other in one parent, these list both.

A wrapper whose class was changed after it was made (`fully_shard` does so) carries state that others look for by
walking the tree: from then on `named_modules` gives the wrapper itself, in the inner module's place and under its name.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from hyper_parallel._base.errors import ArgumentError
from hyper_parallel.core.activation_checkpoint.transparent import (
    Transparent,
    check_wrapped,
    is_special,
    one_of,
    wrappers_below,
)
from hyper_parallel.platform.arguments import check_module

# PyTorch's distributed state-dict code strips exactly this prefix; both names are imported by other libraries.
_CHECKPOINT_WRAPPED_MODULE = "_checkpoint_wrapped_module"
_CHECKPOINT_PREFIX = _CHECKPOINT_WRAPPED_MODULE + "."

_FROM_INNER = (
    "training",
    "_parameters",
    "_buffers",
    "_non_persistent_buffers_set",
    "_modules",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_version",
)

_STATE_METHODS = (
    # members
    "register_buffer", "register_parameter", "add_module", "register_module",
    "get_submodule", "set_submodule", "get_parameter", "get_buffer",
    "_named_members", "parameters", "named_parameters", "buffers", "named_buffers", "children", "named_children",
    # in place, on the whole subtree
    "_apply", "apply", "cuda", "ipu", "xpu", "mtia", "cpu", "type", "float", "double", "half", "bfloat16", "to_empty",
    "to", "share_memory", "train", "eval", "requires_grad_", "zero_grad", "compile",
    # state dicts
    "state_dict", "_save_to_state_dict", "load_state_dict", "_load_from_state_dict",
    "_register_state_dict_hook", "register_state_dict_post_hook", "register_state_dict_pre_hook",
    "_register_load_state_dict_pre_hook", "register_load_state_dict_pre_hook", "register_load_state_dict_post_hook",
)  # fmt: skip


class FunctionModule(nn.Module):
    """A plain callable as a module without parameters."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self._fn = fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._fn(*args, **kwargs)

    def extra_repr(self) -> str:
        return getattr(self._fn, "__qualname__", None) or repr(self._fn)


class ActivationWrapper(Transparent, nn.Module):
    """The base of the wrappers: transparent in everything but the call. Abstract: `forward` is a subclass's to write.

    Attributes that a subclass defines, sets in its `__init__` or names in `OWN` are the wrapper's own; every other one
    is read from, written to and deleted from the inner module, and so are all that are parameters or modules.

    Example:
        >>> class Counted(ActivationWrapper):
        ...     def __init__(self, module):
        ...         super().__init__(module)
        ...         self.num_calls = 0
        ...
        ...     def forward(self, *args, **kwargs):
        ...         self.num_calls += 1
        ...         return self._checkpoint_wrapped_module(*args, **kwargs)
        >>> model = nn.Sequential(Counted(nn.Linear(2, 2)))
        >>> [name for name, _ in model.named_parameters()]
        ['0.weight', '0.bias']
    """

    INNER = _CHECKPOINT_WRAPPED_MODULE
    # How the wrapper is called. `forward` is among them since code that replaces it (accelerate, for one) calls the one
    # it found before: written to the inner module, that would call itself.
    OWN: frozenset[str] = frozenset({
        _CHECKPOINT_WRAPPED_MODULE,
        "forward",
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
        "_forward_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_backward_pre_hooks",
        "_backward_hooks",
        "_is_full_backward_hook",
    })  # fmt: skip

    def __init__(
        self, module: nn.Module | Callable[..., Any] | None = None, *, mod: nn.Module | Callable[..., Any] | None = None
    ) -> None:
        inner = _as_module(one_of(module, mod, type(self).__name__), type(self).__name__)
        super().__init__()
        self.__dict__[_CHECKPOINT_WRAPPED_MODULE] = inner
        self.__dict__["_class_when_made"] = type(self)

    def forward(self, *_args: Any, **_kwargs: Any) -> Any:
        raise ArgumentError(
            f"{type(self).__name__} does not say how the inner module is called.",
            expected="a subclass with its own forward()",
            do="Use `checkpoint_wrapper`, `swap_wrapper` or `offload_wrapper`, or write forward() in the subclass.",
        )

    # Hooks of PyTorch's wrapper that subclasses of it call. Names have no prefix here; states that were saved with one
    # are taken.

    @staticmethod
    def _post_state_dict_hook(
        module: nn.Module, state_dict: dict[str, Any], prefix: str, *_args: Any
    ) -> dict[str, Any]:
        _without_prefix(state_dict, prefix)
        return state_dict

    @staticmethod
    def _pre_load_state_dict_hook(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_args: Any) -> None:
        _without_prefix(state_dict, prefix)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        inner = self._checkpoint_wrapped_module
        shown = inner if type(self) is self._class_when_made else self
        for name, module in inner.named_modules(memo, prefix, remove_duplicate):
            yield name, shown if module is inner else module

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        for _, module in self.named_modules(remove_duplicate=remove_duplicate):
            yield module

    # Attributes

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__class__":
            self._check_new_class(value)
        inner = self._inner_that_has(name)
        if inner is None and isinstance(value, (nn.Parameter, nn.Module)) and name in self.DEFINED - self.OWN:
            inner = self.__dict__.get(_CHECKPOINT_WRAPPED_MODULE)  # else nobody would train it
        if inner is None:
            object.__setattr__(self, name, value)
        else:
            setattr(inner, name, value)

    def _inner_that_has(self, name: str) -> nn.Module | None:
        """Return the module that an attribute of this name belongs to; `None` means the wrapper."""
        inner = self.__dict__.get(_CHECKPOINT_WRAPPED_MODULE)
        if inner is None or name in self.OWN or is_special(name):
            return None
        is_own = name in self.DEFINED and not any(
            name in held for held in (inner._parameters, inner._modules, inner._buffers)
        )
        return None if is_own else inner

    def _check_new_class(self, new_class: type) -> None:
        # `torch.nn.utils.parametrize` derives from the class and puts properties in place of parameters; here the inner
        # module would lose the parameter and the property would be on the wrapper. A class that mixes something in is
        # fine.
        if new_class.__bases__ == (type(self),):
            raise ArgumentError(
                f"The parameters of a {type(self).__name__} cannot be replaced by properties.",
                expected="the inner module",
                got="its wrapper",
                do=f"Parametrise `wrapper.{_CHECKPOINT_WRAPPED_MODULE}`, or do it before wrapping.",
            )

    # Copies, files, text

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Not nn.Module's: it fills in what it does not find in `__dict__`, and would reset the inner module's hooks.
        self.__dict__.update(state)

    def __repr__(self) -> str:
        inner = repr(self._checkpoint_wrapped_module)
        lines = [*filter(None, self.extra_repr().split("\n")), f"({_CHECKPOINT_WRAPPED_MODULE}): {inner}"]
        return f"{self._get_name()}(\n  " + "\n".join(lines).replace("\n", "\n  ") + "\n)"


def _without_prefix(state_dict: dict[str, Any], prefix: str) -> None:
    before = prefix + _CHECKPOINT_PREFIX
    for key in [key for key in state_dict if key.startswith(before)]:
        state_dict[prefix + key.removeprefix(before)] = state_dict.pop(key)


def list_wrappers(model: nn.Module) -> list[tuple[str, ActivationWrapper]]:
    """List every wrapper in `model` once, under the name of its inner module; an outer one before an inner one."""
    return list(wrappers_below(check_module(model, nn.Module, "wrappers"), children_of))


def children_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Go through every place in `module` that holds a module, also one that is in two of them."""
    if isinstance(module, ActivationWrapper):
        yield _CHECKPOINT_WRAPPED_MODULE, module._checkpoint_wrapped_module
        return
    for name, child in module._modules.items():
        if child is not None:
            yield name, child


def _as_module(module: Any, call: str) -> nn.Module:
    if module is None:
        check_module(module, nn.Module, call)
    if isinstance(module, nn.Module):
        return module
    check_wrapped(module, nn.Module, call)
    return FunctionModule(module)


# The parts of ActivationWrapper that are the same for many names.


def _from_inner(name: str) -> property:
    def read(self: ActivationWrapper) -> Any:
        return getattr(self._checkpoint_wrapped_module, name)

    def write(self: ActivationWrapper, value: object) -> None:
        inner = self.__dict__.get(_CHECKPOINT_WRAPPED_MODULE)
        if inner is not None:  # else nn.Module.__init__ sets up a state that this wrapper does not have
            setattr(inner, name, value)

    return property(read, write)


def _on_inner(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(nn.Module, name))
    def method(self: ActivationWrapper, *args: Any, **kwargs: Any) -> Any:
        inner = self._checkpoint_wrapped_module
        result = getattr(inner, name)(*args, **kwargs)
        return self if result is inner else result  # `to`, `train` and the like return the module they were called on

    return method


class _ExtraState:
    """Gives `get_extra_state` or `set_extra_state`: the inner module's on a wrapper, nn.Module's on the class.

    PyTorch asks the class whether a module has extra state; a method there would make every wrapper claim to have one.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, wrapper: ActivationWrapper | None, owner: type) -> Any:
        return getattr(nn.Module if wrapper is None else wrapper._checkpoint_wrapped_module, self.name)


def _load_post_hooks(self: ActivationWrapper) -> dict[int, Callable[..., Any]]:
    """Give an ancestor's `load_state_dict` the inner module's hooks.

    It calls them with the wrapper, and they get the inner module.
    """
    inner = self._checkpoint_wrapped_module
    return {key: _with_module(hook, inner) for key, hook in inner._load_state_dict_post_hooks.items()}


def _with_module(hook: Callable[..., Any], inner: nn.Module) -> Callable[..., Any]:
    return lambda _wrapper, incompatible_keys: hook(inner, incompatible_keys)


for _name in _FROM_INNER:
    setattr(ActivationWrapper, _name, _from_inner(_name))
for _name in _STATE_METHODS:
    if hasattr(nn.Module, _name):
        setattr(ActivationWrapper, _name, _on_inner(_name))
for _name in ("get_extra_state", "set_extra_state"):
    setattr(ActivationWrapper, _name, _ExtraState(_name))
ActivationWrapper._load_state_dict_post_hooks = _from_inner("_load_state_dict_post_hooks").getter(_load_post_hooks)
