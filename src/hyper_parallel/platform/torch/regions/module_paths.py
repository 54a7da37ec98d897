"""Which module is running: its dotted path, read from Python's own stack.

Hooks on modules would tell as much, but they would have to be put on the user's modules, and take them off PyTorch's fast
path. The frames of `nn.Module.__call__` are there anyway.
"""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

from torch import nn

CALL = nn.Module._call_impl.__code__
# Modules around a whole model whose own name says nothing: the attribute that has the model.
_AROUND = {"DistributedDataParallel": "module", "DataParallel": "module", "OptimizedModule": "_orig_mod"}

# PyTorch's file with what FSDP2 does for the parameters of a module.
_SHARDING = "_fsdp_param_group.py"


class ModulePaths:
    """The names of the modules below one root; looked up once, again when an unknown module is met. `prefix`: what comes before all of them."""

    def __init__(self, root: nn.Module, prefix: str = "") -> None:
        self._root = weakref.ref(root)
        self._prefix, self._before = prefix, f"{prefix}."
        self._names: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._look()

    def _look(self) -> None:
        root = self._root()
        if root is not None:
            # Unwrapped: a wrapper that `fully_shard` was applied to stands in the inner module's place.
            modules = [(name, unwrapped(module)) for name, module in root.named_modules(prefix=self._prefix)]
            self._names = {id(module): (weakref.ref(module), name) for name, module in modules}

    def name(self, module: nn.Module | None) -> str:
        """The path of a module; the class's name if it is not below the root; "" without a module."""
        if module is None:
            return ""
        found = self._find(module)
        if found is not None:  # a wrapper is not among them
            return found
        inner = unwrapped(module)
        found = self._find(inner)
        if found is None:
            self._look()  # it was put into the model after the first look
            found = self._find(inner)
            if found is None:
                found = type(inner).__name__
                self._names[id(inner)] = (weakref.ref(inner), found)
        return found

    def below(self, name: str) -> str:
        """A name as it is without what comes before all of them; that of a module which is not below the root stays as it is."""
        return "" if name == self._prefix else name.removeprefix(self._before)

    def _find(self, module: nn.Module) -> str | None:
        entry = self._names.get(id(module))
        return entry[1] if entry is not None and entry[0]() is module else None


_paths: weakref.WeakKeyDictionary[nn.Module, ModulePaths] = weakref.WeakKeyDictionary()


def paths_here(module: nn.Module | None) -> ModulePaths | None:
    """The names below the outermost module that is running in this thread; below `module` if none is."""
    frame: FrameType | None = sys._getframe(1)
    outermost = None
    while frame is not None:
        if frame.f_code is CALL:
            outermost = frame
        frame = frame.f_back
    root = module if outermost is None else outermost.f_locals["self"]
    if root is None:
        return None
    root = _inside(unwrapped(root))
    paths = _paths.get(root)
    if paths is None:
        paths = _paths[root] = ModulePaths(root)
    return paths


_paths_below: weakref.WeakKeyDictionary[nn.Module, dict[str, ModulePaths]] = weakref.WeakKeyDictionary()


def paths_below(module: nn.Module, name: str) -> ModulePaths:
    """The names of what is in a module, itself called `name`: whoever calls it, and wherever else its parts are, only that one differs."""
    module = unwrapped(module)
    found = _paths_below.setdefault(module, {})
    paths = found.get(name)
    if paths is None:
        paths = found[name] = ModulePaths(module, name)
    return paths


def modules_in(root: nn.Module) -> list[nn.Module]:
    """A module and all modules in it, each once, wrappers and what they wrap included. Faster than `modules()`."""
    found = [root]
    seen = {id(root)}
    for module in found:  # grows
        attributes = module.__dict__
        children = attributes.get("_modules")
        if children is None:  # a wrapper has what its module has
            inner = attributes.get("_checkpoint_wrapped_module")
            if inner is not None and id(inner) not in seen:
                seen.add(id(inner))
                found.append(inner)
        elif children:
            for child in children.values():
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    found.append(child)
    return found


def has_sharded_modules() -> bool:
    """Whether `fully_shard` was applied to a module that still lives."""
    states = sys.modules.get("torch.distributed._composable_state")
    return states is not None and len(states._module_state_mapping) > 0


def is_sharding(depth: int) -> bool:
    """Whether the caller, `depth` frames up or more, is `fully_shard` gathering or freeing parameters around a module's call.

    That is no work of the module: when the module is called again in backward, other hooks have done it. The casts of
    mixed precision are the module's: they are made in both calls.
    """
    try:
        frame: FrameType | None = sys._getframe(depth)
    except ValueError:  # a thread of autograd's own called the mode from C++: no module is running there
        return False
    while frame is not None and frame.f_code is not CALL:
        if frame.f_code.co_filename.endswith(_SHARDING):
            return True
        frame = frame.f_back
    return False


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside activation wrappers, ours and PyTorch's: they have no name of their own."""
    while True:
        inner: Any = vars(module).get("_checkpoint_wrapped_module")
        modules = vars(module).get("_modules")
        if inner is None and isinstance(modules, dict):  # a TorchScript module has something else there
            inner = modules.get("_checkpoint_wrapped_module")
        if inner is None:
            return module
        module = inner


def _inside(root: nn.Module) -> nn.Module:
    while (attribute := _AROUND.get(type(root).__name__)) is not None and isinstance(
        getattr(root, attribute, None), nn.Module
    ):
        root = unwrapped(getattr(root, attribute))
    return root
