"""Random numbers of a job with many ranks: which ranks draw alike, and which numbers belong to a name.

Example: on a mesh ("dp", "tp") of (2, 2) `manual_seed(0, mesh)` lets ranks 0 and 1 draw alike, and ranks 2 and 3: they
have other samples, and each pair the same ones.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hyper_parallel._base.errors import ArgumentError, ArgumentTypeError, StateError, describe
from hyper_parallel._base.whole_numbers import as_int
from hyper_parallel.core.dtensor.mesh import DeviceMesh, as_mesh
from hyper_parallel.platform.interface import Platform
from hyper_parallel.platform.selection import imported_platform

__all__ = ["check_seed", "derived_seed", "generators_put_back", "manual_seed", "seed_all"]

# Of a seed that is made of a text: what every generator takes.
_BITS = 63


def manual_seed(
    seed: int, mesh: DeviceMesh | None = None, differ_on: str | Sequence[str] = ("dp_replicate", "dp", "cp")
) -> int:
    """Seed all generators of this process: the framework's on every device, Python's `random` and NumPy's.

    Ranks that are at different places of an axis in `differ_on` draw different numbers from then on, all others the
    same. So dropout differs where the samples or tokens do, and is equal where ranks compute parts of one activation.

    Args:
        seed: the same on all ranks.
        mesh: says which ranks are where; without one all ranks draw differently.
        differ_on: axes; those that the mesh does not have are left out. Name "pp" as well for stages that shall drop
            other elements than their neighbours.

    Returns:
        The seed of this rank, for generators of your own. The first rank of all has `seed` itself, so that one process
        draws what the framework's own `manual_seed(seed)` gives.

    Example:
        `hp.manual_seed(0, mesh)`, and `torch.Generator().manual_seed(hp.manual_seed(0, mesh))` for a sampler.
    """
    number = check_seed(seed)
    platform = imported_platform()
    place = _place(platform, mesh, _names(differ_on))
    mine = derived_seed(number, place) if place else number
    seed_all(platform, mine)
    return mine


def _names(differ_on: object) -> tuple[str, ...]:
    names = (differ_on,) if isinstance(differ_on, str) else differ_on
    if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
        raise ArgumentTypeError(
            "Ranks differ on axes.", expected='names such as ("dp_replicate", "dp", "cp")', got=describe(differ_on)
        )
    return tuple(names)


def _place(platform: Platform, mesh: DeviceMesh | None, differ_on: Sequence[str]) -> str:
    """Write down where this rank is, as far as it counts. The first place is the empty text."""
    if mesh is None:
        rank = platform.get_rank()
        return f"rank={rank}" if rank else ""
    mesh = as_mesh(mesh, "The mesh of `manual_seed`.")
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise StateError(
            "This rank is not on the mesh.", expected=f"one of ranks {mesh.rank_list}", got=str(platform.get_rank())
        )
    at = dict(zip(mesh.axis_names, coordinate, strict=True))
    return ",".join(f"{axis}={at[axis]}" for axis in sorted(set(differ_on) & at.keys()) if at[axis])


def check_seed(seed: object) -> int:
    """Return a seed as a number of Python, or raise."""
    number = as_int(seed)
    if number is None:
        raise ArgumentTypeError("A seed is a whole number.", expected="an int", got=describe(seed))
    if not -(2**63) <= number < 2**63:
        raise ArgumentError("A seed has 64 bits.", expected="from -2**63 to 2**63 - 1", got=str(number))
    return number


def derived_seed(seed: int, name: str) -> int:
    """Make another seed, of a seed and a name. The same on every machine and in every version."""
    digest = hashlib.sha256(f"{seed}\n{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - _BITS)


@contextmanager
def generators_put_back(platform: Platform) -> Iterator[None]:
    """Around calls of `seed_all`: afterwards all generators go on where they were."""
    numpy = _numpy_random()
    before = platform.get_rng_state(), random.getstate(), None if numpy is None else numpy.get_state()
    try:
        yield
    finally:
        of_framework, of_python, of_numpy = before
        platform.set_rng_state(of_framework)
        random.setstate(of_python)
        if numpy is not None:
            numpy.set_state(of_numpy)


def seed_all(platform: Platform, seed: int) -> None:
    """Seed the framework's generators, Python's and NumPy's."""
    platform.manual_seed(seed)
    random.seed(seed)
    numpy = _numpy_random()
    if numpy is not None:
        numpy.seed(seed % 2**32)


def _numpy_random() -> Any:
    """NumPy's global generator, also if nothing has imported NumPy yet: what does so later draws from it."""
    if importlib.util.find_spec("numpy") is None:
        return None
    return importlib.import_module("numpy").random
