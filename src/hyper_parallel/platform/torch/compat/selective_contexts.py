"""The forward and the recompute context of a policy, for those who call `torch.utils.checkpoint` themselves.

`checkpoint` of this package knows what backward needs and keeps nothing else; these two contexts do not: they keep
every result that the policy names. Unlike PyTorch's own pair they swap, keep random numbers exact whatever is saved,
and serve a second backward.
"""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel._base.errors import StateError
from hyper_parallel.core.activation_checkpoint.policies import as_policy_fn
from hyper_parallel.core.regions.functions import engine_key
from hyper_parallel.core.regions.policy import RegionPolicy, region_policy
from hyper_parallel.platform.torch.regions.module_paths import paths_here
from hyper_parallel.platform.torch.regions.recording import Record, RecordingMode
from hyper_parallel.platform.torch.regions.region_swap import RegionSwap, Swapped
from hyper_parallel.platform.torch.regions.replaying import Replay, ReplayMode
from hyper_parallel.platform.torch.regions.saved_values import Swappable
from hyper_parallel.platform.torch.regions.values import Value


def create_selective_checkpoint_contexts(
    policy_fn_or_list: object, allow_cache_entry_mutation: bool = False
) -> tuple[RecordingMode, ReplayMode]:
    """Make the contexts in which a function runs first and again.

    Args:
        policy_fn_or_list: `policy_fn(ctx, op, *args, **kwargs)`, or a list of ops (or their names) to save.
        allow_cache_entry_mutation: whether a saved result may be changed in place before backward. Then it is
            recomputed.

    Raises:
        TypeError: neither a function nor a list of ops.

    Example:
        >>> from functools import partial
        >>> from torch.utils.checkpoint import checkpoint
        >>> contexts = partial(create_selective_checkpoint_contexts, ["aten.mm"])
        >>> x = torch.randn(4, 4, requires_grad=True)
        >>> checkpoint(lambda y: (y @ y).exp().sum(), x, use_reentrant=False, context_fn=contexts).backward()
    """
    policy = region_policy(as_policy_fn(policy_fn_or_list))
    kept = _KeptValues(policy, allow_cache_entry_mutation)
    return _Forward(kept), _Recompute(kept)


class _KeptValues:
    """What the two contexts share: the ops of the forward, and the values that the policy has kept."""

    def __init__(self, policy: RegionPolicy | None, allows_changes: bool) -> None:
        self.policy = policy
        self.allows_changes = allows_changes
        # PyTorch collects residuals from the tensors of the second run, so an in-place op must really write there.
        self.record = Record(policy, paths_here(None), keeps_random_state=True, keeps_writes=False)
        # The block that runs is not known here; a key of its own keeps the engine from learning across blocks.
        self._swap = RegionSwap(engine_key("selective checkpoint", self))
        # Hooks around the checkpoint give its arguments back as other tensors, with other versions, and look for
        # changes themselves.
        self.is_in_hooks = torch._C._autograd._top_saved_tensors_default_hooks(False) is not None

    def end_forward(self) -> None:
        for value in self.record.kept:
            if not self.record.is_current(value):
                continue  # found out when it is asked for
            if type(value.kept) is Swappable:
                place = self.record.ops[value.op].place()
                value.kept = self._swap.swap(value.kept, value.num_bytes, place) or value.kept
            if type(value.kept) is not Swapped:
                value.kept.seal()

    def plan(self) -> tuple[frozenset[int], frozenset[Value]]:
        for value in self.record.kept:
            if value.kept is not None and self._is_changed(value):
                value.kept = None
        return self.record.everything()

    def _is_changed(self, value: Value) -> bool:
        is_swapped = type(value.kept) is Swapped
        if (is_swapped or self.record.is_current(value)) and not value.kept.is_changed():
            return False
        if self.allows_changes:
            return True
        raise StateError(
            "A result that a policy saved was changed in place before backward.",
            where=str(self.record.ops[value.op]),
            do="Replace the in-place call after it, let the policy recompute this op, "
            "or allow_cache_entry_mutation=True.",
        )


class _Forward(RecordingMode):
    def __init__(self, kept: _KeptValues) -> None:
        super().__init__(kept.record)
        self._kept = kept

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            self._kept.end_forward()


class _Recompute(ReplayMode):
    """The context of the second run; it begins a new replay each time it is entered."""

    def __init__(self, kept: _KeptValues) -> None:
        super().__init__(None)
        self._kept = kept

    def __enter__(self) -> Any:
        kept = self._kept
        runs, takes = kept.plan()
        self._replay = Replay(
            kept.record,
            runs,
            takes,
            set(),
            kept.policy,
            check_outputs=False,  # PyTorch compares what it needs itself
            early_stop=False,
            restores_random_state=True,
            checks_outside=not kept.is_in_hooks,
        )
        return super().__enter__()
