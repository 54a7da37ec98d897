"""Modules that read a number or a tensor which may be another one the next time, in every kind of region.

A program is three words: where the number comes from, what is done with it, and when it changes.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody calls it

from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy
from hyper_parallel.core.regions.policy import RegionPolicy
from hyper_parallel.platform.torch.regions.repeated_call import checkpoint_by_framework
from hyper_parallel.platform.torch.regions.unwatched_region import UnwatchedRegion
from hyper_parallel.platform.torch.wrappers.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

WIDTH = 4
aten = torch.ops.aten


class Drift(NamedTuple):
    """What `source` gives the module (a whole number) in each call, and in each second run."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]

    @property
    def is_steady(self) -> bool:
        """Whether a second run finds what its forward found."""
        return self.forward == self.backward


NUM_CALLS = 6
_SAME = (0,) * NUM_CALLS
DRIFTS = {
    "steady": Drift(_SAME, _SAME),
    "call against call": Drift((0, 1, 2, 0, 1, 2), (0, 1, 2, 0, 1, 2)),
    "call against call from the fourth on": Drift((0, 0, 0, 1, 2, 1), (0, 0, 0, 1, 2, 1)),
    "forward against backward": Drift(_SAME, (1,) * NUM_CALLS),
    "forward against backward from the fourth call on": Drift(_SAME, (0, 0, 0, 1, 1, 1)),
    "another forward in the fourth call": Drift((0, 0, 0, 1, 0, 0), _SAME),
    "both": Drift((0, 1, 2, 0, 1, 2), (1, 2, 0, 1, 2, 0)),
}

# -- where it comes from -----------------------------------------------------------------------------------------------------

_global = 0


class _Box:
    number = 0  # of the class


class Source:
    """Sets the number, and reads it as a module would."""

    def __init__(self, kind: str) -> None:
        self.set, self.read = SOURCES[kind]()


def _cell(store: Any, name: Any) -> tuple[Callable[[int], None], Callable[[], int]]:
    return (lambda number: store.__setitem__(name, number)), (lambda: store[name])


def _from_global() -> Any:
    def put(number: int) -> None:
        global _global
        _global = number

    return put, lambda: _global


def _from_closure() -> Any:
    number = 0

    def put(to: int) -> None:
        nonlocal number
        number = to

    return put, lambda: number


def _from_iterator() -> Any:
    numbers: list[int] = [0]
    iterator = (numbers[0] for _ in itertools.count())
    return (lambda number: numbers.__setitem__(0, number)), lambda: next(iterator)


def _from_object() -> Any:
    holder = types.SimpleNamespace(inner=types.SimpleNamespace(number=0))
    return (lambda number: setattr(holder.inner, "number", number)), lambda: holder.inner.number


def _from_class() -> Any:
    return (lambda number: setattr(_Box, "number", number)), lambda: _Box.number


def _from_tensor() -> Any:
    held = torch.zeros((), dtype=torch.long)
    return (lambda number: held.data.fill_(number)), lambda: int(held.item())


SOURCES: dict[str, Callable[[], tuple[Callable[[int], None], Callable[[], int]]]] = {
    "list": lambda: _cell([0], 0),
    "dict": lambda: _cell({"step": 0}, "step"),
    "array": lambda: _cell(np.zeros(1, dtype=np.int64), 0),
    "global": _from_global,
    "closure": _from_closure,
    "iterator": _from_iterator,
    "object": _from_object,
    "class": _from_class,
    "tensor": _from_tensor,
}

# -- what is done with it ----------------------------------------------------------------------------------------------------


def _slice(m: Any, h: torch.Tensor, n: int) -> torch.Tensor:
    return h + h[..., n : n + 2].sin().sum(-1, keepdim=True)


def _order(m: Any, h: torch.Tensor, n: int) -> torch.Tensor:
    for index in ((0, 1, 2), (1, 2, 0), (2, 0, 1))[n]:
        h = m.experts[index](h).tanh()
    return h


def _some_experts(m: Any, h: torch.Tensor, n: int) -> torch.Tensor:
    """Which rows go where depends on values, and on the number."""
    chosen = (m.router(h).argmax(-1) + n) % 3
    out = torch.zeros_like(h)
    for index, expert in enumerate(m.experts):
        rows = chosen.eq(index).nonzero().flatten()
        out[rows] += expert(h[rows])
    return out


def _cat_of(m: Any, h: torch.Tensor, n: int) -> torch.Tensor:
    parts = [h.sin(), h.cos(), h.tanh()]
    return torch.cat(parts[n:] + parts[:n], -1)[..., :WIDTH] * h


def _inner_gradient(m: Any, h: torch.Tensor, n: int) -> torch.Tensor:
    with torch.enable_grad():
        inner = h.detach().requires_grad_()
        (found,) = torch.autograd.grad((inner.sin() * (n + 1.0)).sum(), inner)
    return h * found


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, by: float) -> torch.Tensor:
        ctx.save_for_backward(h)
        ctx.by = by
        return h.sin() * by

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (h,) = ctx.saved_tensors
        return gradient * h.cos() * ctx.by, None


USES: dict[str, Callable[[Any, torch.Tensor, int], torch.Tensor]] = {
    "factor": lambda m, h, n: h * (n + 1.0),
    "summand": lambda m, h, n: h + 0.5 * n,
    "alpha": lambda m, h, n: torch.add(h, h.sin(), alpha=n + 1),
    "exponent": lambda m, h, n: h.abs() ** (n + 2),
    "clamp": lambda m, h, n: h.clamp(-0.5 - n, 0.2 + n),
    "slope": lambda m, h, n: F.leaky_relu(h, 0.1 + n),
    "eps": lambda m, h, n: F.layer_norm(h, (WIDTH,), eps=10.0**-n),
    "beta": lambda m, h, n: F.softplus(h, beta=n + 1.0),
    "slice": _slice,
    "softmax dim": lambda m, h, n: h.softmax((-1, 0, 1)[n]),
    "roll": lambda m, h, n: h.roll(n, -1) * h,
    "permuted dims": lambda m, h, n: h.permute(((0, 1, 2), (1, 0, 2), (0, 1, 2))[n]).reshape(h.shape).sin() + n % 2,
    "dim of a sum": lambda m, h, n: h * h.sum((0, 1, 2)[n], keepdim=True),
    "index": lambda m, h, n: h * h[:, [n, 0, 1]],
    "branch": lambda m, h, n: (torch.sin, torch.cos, torch.tanh)[n](h),
    "branch of another length": lambda m, h, n: (h.sin() + 0.1) if n else h.cos(),
    "expert": lambda m, h, n: m.experts[n](h),
    "weight": lambda m, h, n: h * m.weights[n],
    "order of layers": _order,
    "experts by values": _some_experts,
    "list of tensors": _cat_of,
    "operand": lambda m, h, n: h.sin() * (h.cos(), h.tanh(), h)[n],
    "tensor made of it": lambda m, h, n: h * torch.tensor(n + 1.0, device=h.device),
    "full tensor": lambda m, h, n: h * torch.full((WIDTH,), n + 1.0, device=h.device),
    "tensor from NumPy": lambda m, h, n: h * torch.from_numpy(np.full(WIDTH, n + 1, np.float32)).to(h.device),
    "tensor that is held": lambda m, h, n: h * m.held[n],
    "mask": lambda m, h, n: h.masked_fill(m.masks[n], 0.25),
    "norm of a part": lambda m, h, n: h / (h.narrow(-1, n, 2).norm() + 1),
    "inner gradient": _inner_gradient,
    "custom function": lambda m, h, n: _Scale.apply(h, n + 1.0),
    "no gradient": lambda m, h, n: h * (h.detach() * (n + 1)).tanh(),
    "batch norm": lambda m, h, n: F.batch_norm(h.flatten(0, 1), m.mean, m.var, training=True).view_as(h) * (n + 1),
    "in place": lambda m, h, n: (h * 1).mul_(n + 1.0).sin(),
    "drawn numbers": lambda m, h, n: h * torch.rand_like(h).mul(n + 1.0),
}


class Reading(nn.Module):
    """Two layers, and between them what is done with the number."""

    def __init__(self, use: str, read: Callable[[], int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.router = nn.Linear(WIDTH, 3)
        self.weights = nn.ParameterList(torch.randn(WIDTH) for _ in range(3))
        for number in range(3):
            self.register_buffer(f"held_{number}", torch.randn(WIDTH))
            self.register_buffer(f"mask_{number}", torch.randn(WIDTH) > 0)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("var", torch.ones(WIDTH))
        self.use, self.read = USES[use], read

    @property
    def held(self) -> list[torch.Tensor]:
        return [self.held_0, self.held_1, self.held_2]

    @property
    def masks(self) -> list[torch.Tensor]:
        return [self.mask_0, self.mask_1, self.mask_2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.use(self, self.up(x).sin(), self.read())
        return x + self.down(h.tanh()).sin()


# -- regions of each kind ----------------------------------------------------------------------------------------------------


class _Policy(RegionPolicy):
    is_pure = True

    def __init__(self, *saved: Any, unwatched: UnwatchedRegion | None = None) -> None:
        self.saved = saved
        if unwatched is not None:
            self.observer = unwatched

    def answer(self, context: Any, op: Any, args: Any, kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in self.saved else CheckpointPolicy.MUST_RECOMPUTE


def _unwatched(module: nn.Module, *saved: Any, is_dynamic: bool = False) -> Callable[..., Any]:
    policy = _Policy(*saved, unwatched=UnwatchedRegion(is_dynamic=is_dynamic))
    return lambda *args, **kwargs: policy.observer.call(module, policy, args, kwargs)


_MATMULS = (aten.mm.default, aten.addmm.default)
KINDS: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "watched": lambda module: checkpoint_wrapper(module, early_stop=False),
    "recorded ops": checkpoint_wrapper,
    "recorded ops, some saved": lambda module: checkpoint_wrapper(module, policy_fn=_Policy(*_MATMULS)),
    "unwatched": _unwatched,
    "unwatched, some saved": lambda module: _unwatched(module, *_MATMULS, aten.sin.default),
    "unwatched, of changing sizes": lambda module: _unwatched(module, *_MATMULS, is_dynamic=True),
    "by the framework": lambda module: lambda *args: checkpoint_by_framework(module, *args),
    "reentrant": lambda module: checkpoint_wrapper(module, CheckpointImpl.REENTRANT),
}


class Case(NamedTuple):
    source: str
    use: str
    drift: str
    kind: str


def all_cases() -> Iterator[Case]:
    for number, (use, drift, kind) in enumerate(itertools.product(USES, DRIFTS, KINDS)):
        yield Case(list(SOURCES)[number % len(SOURCES)], use, drift, kind)


def _gradients(
    call: Callable[..., Any], module: nn.Module, source: Source, drift: Drift, number: int, device: str
) -> list[torch.Tensor]:
    torch.manual_seed(number)
    x = torch.randn(3, 3, WIDTH).to(device).requires_grad_()
    source.set(drift.forward[number])
    loss = call(x * 1).square().sum()
    source.set(drift.backward[number])
    module.zero_grad()
    loss.backward()
    found = [torch.zeros(()) if each.grad is None else each.grad for each in (x, *module.parameters())]
    return [*found, loss.detach(), torch.rand(1)]


def outcome(case: Case, device: str = "cpu") -> str:
    """ "right", "found" (a clear error), or what is wrong."""
    from hyper_parallel._base.errors import HyperParallelError

    drift = DRIFTS[case.drift]
    sources = [Source(case.source) for _ in range(2)]
    plain, module = (Reading(case.use, source.read).to(device) for source in sources)
    call = KINDS[case.kind](module)
    for number in range(NUM_CALLS):
        expected = _gradients(plain, plain, sources[0], drift, number, device)
        try:
            found = _gradients(call, module, sources[1], drift, number, device)
        except HyperParallelError as error:
            return "found" if not drift.is_steady else f"false alarm in call {number + 1}: {error}"
        except Exception as error:
            return f"raw error in call {number + 1}: {type(error).__name__}: {error}"
        if not all(map(torch.equal, found, expected)):
            return f"silently wrong in call {number + 1}"
    return "right"
