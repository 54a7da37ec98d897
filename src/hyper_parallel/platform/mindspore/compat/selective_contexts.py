"""The forward and the recompute context of a policy.

They are for those who call `mindspore.recompute(use_reentrant=False)` themselves.

`checkpoint` of this package knows what backward needs and keeps nothing else; these two contexts do not: they keep
every result that the policy names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from hyper_parallel.core.activation_checkpoint.policies import as_policy_fn
from hyper_parallel.core.regions.functions import engine_key
from hyper_parallel.core.regions.policy import RegionPolicy, region_policy
from hyper_parallel.platform.mindspore.regions.cell_paths import paths_here
from hyper_parallel.platform.mindspore.regions.planning import ReplayEntries
from hyper_parallel.platform.mindspore.regions.random_ops import SeedState
from hyper_parallel.platform.mindspore.regions.recording import Record, RegionMode, Swappable
from hyper_parallel.platform.mindspore.regions.region_swap import RegionSwap
from hyper_parallel.platform.mindspore.regions.replaying import Replay
from hyper_parallel.platform.mindspore.swap.storages import unseen


def create_selective_checkpoint_contexts(policy_fn_or_list: object, allow_cache_entry_mutation: bool = False) -> Any:
    """Make the contexts in which a function runs first and again.

    Args:
        policy_fn_or_list: `policy_fn(ctx, op, *args, **kwargs)`, or a list of op names to save.
        allow_cache_entry_mutation: accepted and without effect: a write that an op makes is seen, and the result is
            made again; others are not seen (MindSpore counts no writes on the CPU).

    Raises:
        TypeError: neither a function nor a list of ops.
    """
    kept = _KeptValues(region_policy(as_policy_fn(policy_fn_or_list)))
    return kept.forward(), kept.recompute()


class _KeptValues:
    """What the two contexts share: the ops of the forward, and the values that the policy has kept."""

    def __init__(self, policy: RegionPolicy | None) -> None:
        self._policy = policy
        self._seeds: SeedState | None = None
        self._record = Record(policy, paths_here(None), keeps_random_state=True)
        # What MindSpore compares is what autograd saves in the second run, so that every op is run that is not kept.
        self._record.runs_everything = True
        self._swap = RegionSwap(engine_key("selective checkpoint", self))

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        self._seeds = SeedState()
        with RegionMode(self._record) as mode:
            yield
            mode.check()
        with unseen():
            for op in self._record.ops:
                for node in op.nodes:
                    if type(node.kept) is Swappable:
                        node.kept = self._swap.swap(node.kept.tensor(), str(op)) or node.kept

    def recompute(self) -> contextlib.AbstractContextManager[None]:
        return _Again(self)

    @contextlib.contextmanager
    def replay(self) -> Iterator[None]:
        entries = ReplayEntries(self._record, {}, stops=False)
        replay = Replay(
            self._record,
            entries.runs,
            entries.takes,
            {},
            self._policy,
            check_outputs=False,
            early_stop=False,
            preserves_random_state=True,
        )
        with contextlib.nullcontext() if self._seeds is None else self._seeds.again(), RegionMode(replay) as mode:
            yield
            mode.check()


class _Again:
    """A context that can be entered once for each backward."""

    def __init__(self, kept: _KeptValues) -> None:
        self._kept = kept
        self._open: list[Any] = []

    def __enter__(self) -> None:
        context = self._kept.replay()
        context.__enter__()
        self._open.append(context)

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)
