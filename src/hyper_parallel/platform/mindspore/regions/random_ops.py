"""Random numbers of a region: what its random ops drew the first time, they draw again.

On the CPU a random op's numbers come from two seeds in the primitive and from the state of its kernel.

- Functions (`ops.dropout`, `ops.rand`) make a primitive for each call, with seeds from a counter per kind of op, and mark it so that its kernel
  is not used again (`random_cache`). The counters are set back for the second run, which so makes primitives with the same seeds.
- A primitive that is kept, as in `nn.Dropout`, keeps its kernel, and nobody can read or set that kernel's state. So the draw itself is kept:
  dropout's mask, as one bit per element, and for any other op its results. Seeds of zero let the kernel choose: the same holds.

On accelerators random ops take seed and offset from the framework's generator as arguments; it is set back, too.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mindspore
import numpy as np
from mindspore import Tensor

from hyper_parallel.platform.mindspore.swap.device import is_on_host
from hyper_parallel.platform.mindspore.swap.storages import unseen, watcher

# As an attribute `mindspore.common.seed` is a function; the module is reached by its name alone.
_seeds: Any = sys.modules["mindspore.common.seed"]
_SEEDS = (("Seed0", "Seed1"), ("seed", "seed2"), ("seed", "offset"))
SEED_NAMES = frozenset(name for names in _SEEDS for name in names)


class SeedState:
    """The counters that seeds of new primitives come from, and the framework's generator."""

    def __init__(self) -> None:
        self._seed = _seeds._GLOBAL_SEED
        self._counters = dict(_seeds._KERNEL_SEED)
        with unseen():
            self._generator = mindspore.get_rng_state()

    def restore(self) -> None:
        _seeds._GLOBAL_SEED = self._seed
        _seeds._KERNEL_SEED.clear()
        _seeds._KERNEL_SEED.update(self._counters)
        with unseen():
            mindspore.set_rng_state(self._generator)

    @contextmanager
    def again(self) -> Iterator[None]:
        """A block in which they are as they were here, and after which they are as they were before it."""
        now = SeedState()
        self.restore()
        try:
            yield
        finally:
            now.restore()


def seeds_of(primitive: object) -> tuple[Any, ...] | None:
    """The seeds of a primitive; None if it has none."""
    attributes = getattr(primitive, "attrs", None) or {}
    for names in _SEEDS:
        if names[0] in attributes and names[1] in attributes:
            return tuple(attributes[name] for name in names)
    return None


def draws_the_same_again(primitive: Any) -> bool:
    """Whether a primitive with the same seeds gives what this one gives, however often either was called."""
    if primitive is None:
        return True  # seed and offset are among its arguments
    seeds = seeds_of(primitive)
    return seeds is not None and any(seeds) and primitive.attrs.get("random_cache") is False


def redo_dropout(name: str, primitive: Any, result: Any) -> Callable[[Any], Any] | None:
    """For a dropout whose kernel has drawn: what gives its results from its input once more; None if this is no such op."""
    if name != "Dropout" or not isinstance(result, tuple) or len(result) != 2 or not is_on_host(result[1]):
        return None
    return _Dropout(result[1], float(primitive.attrs["keep_prob"]))


# Attributes of a dropout, without its seeds -> one that runs in its place, always the same: MindSpore keeps the kernel of every primitive for ever (63 KB).
_stand_ins: dict[tuple[Any, ...], Any] = {}


def stand_in(primitive: Any) -> Any:
    """A primitive that runs where `primitive` must not draw again; nobody uses its numbers."""
    key = (type(primitive), *((name, value) for name, value in primitive.init_attrs.items() if name not in SEED_NAMES))
    if key not in _stand_ins:
        _stand_ins[key] = copy.deepcopy(primitive)
    return _stand_ins[key]


class _Dropout:
    """A draw of dropout as bits. Gives the numbers that the kernel of the CPU gives, rounding included."""

    __slots__ = ("_bits", "_scale", "_shape")

    def __init__(self, mask: Tensor, keep_prob: float) -> None:
        with unseen():
            self._bits = np.packbits(mask.asnumpy() != 0)
        watching = watcher()
        if watching is not None:
            watching.holds(self._bits)
        self._shape = mask.shape
        self._scale = np.float32(1) / np.float32(keep_prob)

    def __call__(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        with unseen():
            values = tensor.asnumpy()
            mask = np.unpackbits(self._bits, count=int(np.prod(self._shape))).reshape(self._shape).astype(np.float32)
            result = (values.astype(np.float32) * mask * self._scale).astype(values.dtype)
            return Tensor.from_numpy(result), Tensor.from_numpy(mask.astype(values.dtype))
