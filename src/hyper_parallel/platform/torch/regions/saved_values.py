"""A value that stays where it is, without what autograd and dispatch modes would see of it."""

from __future__ import annotations

import torch

from hyper_parallel.platform.torch.regions.local_parts import (
    PLAIN_TYPES,
    Outer,
    is_plain,
    local_tensor,
    version_of,
)
from hyper_parallel.platform.torch.regions.placeholders import View

_ADInplaceOrView = torch._C.DispatchKey.ADInplaceOrView
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_num_modes = torch._C._len_torch_dispatch_stack
# Of the base class: `detach` without modes, in half the time of a block without them.
_unseen_detach = torch.Tensor._make_subclass


class Saved:
    """A value that stays where it is. The alias shares its version counter and leads to no autograd node."""

    __slots__ = ("_alias", "_version")

    def __init__(self, alias: torch.Tensor) -> None:
        self._alias = alias
        self._version: int | None = None

    def seal(self) -> None:
        """From now on a change is noticed. Not before the region ends: an op's own write is counted after it was recorded."""
        self._version = version_of(self._alias)

    def is_changed(self) -> bool:
        return self._version is not None and version_of(self._alias) != self._version

    def memory(self) -> torch.UntypedStorage:
        return local_tensor(self._alias).untyped_storage()

    @property
    def alias(self) -> torch.Tensor:
        return self._alias


class Swappable(Saved):
    """A value that a policy wants swapped; it leaves when something is known to need it (see `region`)."""

    __slots__ = ()


def aliased(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory and version counter, without autograd and unseen by dispatch modes."""
    if type(tensor) not in PLAIN_TYPES:
        outer = Outer.of(tensor)
        if outer is not None:
            return outer.around(aliased(local_tensor(tensor)))
        if is_plain(tensor):
            tensor = local_tensor(tensor)  # all of it, if a collective still writes it
    if type(tensor) in PLAIN_TYPES:
        if not _is_excluded(_ADInplaceOrView):
            return _unseen_detach(torch.Tensor, tensor, False)
        if _num_modes() == 0:
            return _detached(tensor)
    with torch._C._DisableTorchDispatch():
        return _detached(tensor)


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    if not _is_excluded(_ADInplaceOrView):
        return tensor.detach()
    # Inside a dispatch mode the layer that counts versions is already behind us, and `detach` alone would give the alias a
    # counter of its own.
    with torch._C._SetExcludeDispatchKeyGuard(_ADInplaceOrView, False):
        return tensor.detach()


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that looks the same at a copy of the whole storage."""
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        storage = local_tensor(tensor).untyped_storage().clone()
    return View.of(tensor).on(storage, tensor.device)
