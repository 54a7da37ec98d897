"""How much memory of the host, or of a disk, a plan needs.

Its swapped storages are laid out by the real arena, without a byte of memory being taken.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hyper_parallel.core.planner.model.choices import SWAP, Decision
from hyper_parallel.core.planner.model.identity import DeviceKind
from hyper_parallel.core.planner.model.profile import StepProfile
from hyper_parallel.core.planner.search.choosing import timeline_under
from hyper_parallel.core.planner.search.settings import Setting
from hyper_parallel.core.swap import arena, disk
from hyper_parallel.core.swap.pool import BlockPool, Growth, PoolBlock

_NO_LIMIT = 1 << 62
_MAX_PARTS = 16


class HostNeed(NamedTuple):
    """What a plan needs elsewhere for what it swaps.

    `tier`: "host" for pinned memory, "disk" for files. `used_bytes`: of all that is swapped at once. `reserved_bytes`:
    what is pinned, or taken on the disk, for that, by a process that swaps nothing else.
    """

    tier: str
    used_bytes: int
    reserved_bytes: int


def host_need(profile: StepProfile, decision: Decision, setting: Setting) -> HostNeed:
    """Count what the second step of a plan needs: by then the engine has learned what it learns."""
    is_disk = profile.device_kind is DeviceKind.CPU
    tier = "disk" if is_disk else "host"
    if not any(chosen.swaps for chosen in decision):
        return HostNeed(tier, 0, 0)
    timeline = timeline_under(profile, decision, setting)
    blocks = [copy.num_bytes for copy in timeline.copies if copy.direction == "offload"]
    if any(SWAP in chosen.inputs for chosen in decision):
        # A region that swaps its inputs swaps those, too, that others are given: they are somebody else's on the
        # device, and once on the host.
        shared = [num_bytes for num_bytes in profile.shared_input_bytes if num_bytes >= profile.min_swap_bytes]
        blocks += shared
        used_bytes = timeline.host_bytes + sum(shared)
    else:
        used_bytes = timeline.host_bytes
    return HostNeed(tier, used_bytes, _reserved(blocks, disk.GROWTH if is_disk else arena.GROWTH))


def _reserved(blocks: list[int], growth: Growth) -> int:
    """Count what an arena takes for these blocks. All of them are alive at the end of a forward."""
    pool: BlockPool[Any] = BlockPool(
        PoolBlock, lambda num_bytes: object(), lambda slab: None, _NO_LIMIT, growth, max_parts=_MAX_PARTS
    )
    taken = [pool.take(num_bytes) for num_bytes in blocks]
    reserved = pool.stats().reserved_bytes
    for block in taken:
        if block is not None:
            pool.give(block)
    return reserved
