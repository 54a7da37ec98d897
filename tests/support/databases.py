"""The samples of PyTorch's own operator and module databases as blocks: each runs plainly and wrapped in five ways, and must give the same bits.

An op that is made of others may take another way where a dispatch mode is on (PyTorch asks `isTensorSubclassLike`). `OTHER_WAY` has all for which
that shows in a bit: there the bits are those that PyTorch gives under a mode that does nothing.
"""

from __future__ import annotations

import contextlib
import functools
import random
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hyper_parallel._base.errors import HyperParallelError
from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy
from hyper_parallel.platform.torch.activation_checkpoint import checkpoint_wrapper, swap_wrapper
from support.op_database import database, stand_in_for_expecttest
from support.wrapped import mix, swap_everything

Wrap = Callable[[nn.Module], nn.Module]


def save_everything(*_: Any, **__: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


WAYS: dict[str, Wrap] = {
    "recompute": checkpoint_wrapper,
    "save": functools.partial(checkpoint_wrapper, policy_fn=save_everything),
    "swap": functools.partial(checkpoint_wrapper, policy_fn=swap_everything),
    "mix": functools.partial(checkpoint_wrapper, policy_fn=mix),
    "swap wrapper": swap_wrapper,
}

# What PyTorch computes in another way under a dispatch mode, with other bits. Of a matrix that needs no gradient, the singular values and
# eigenvalues alone; one with a batch of one that needs none, times a batch; see also `test_databases.py`.
OTHER_WAY = """
linalg.eigvals linalg.eigvalsh linalg.svdvals linalg.cond linalg.norm linalg.matrix_norm norm matmul __rmatmul__
nn.functional.cross_entropy nn.functional.linear_cross_entropy LinearCrossEntropyLoss CrossEntropyLoss
"""
# Values are of memory that nobody has written, as in some of the results of linalg.lstsq and of attention on CUDA (seeds, padding). Adaptive
# max pooling adds up its gradient in any order there, and PyTorch does not say so.
_WITHOUT_VALUES = """
empty empty_like empty_strided empty_permuted new_empty new_empty_strided resize_ resize_as_ linalg.lstsq
torch.ops.aten._efficient_attention_forward AdaptiveMaxPool3d nn.functional.adaptive_max_pool3d
"""
_DTYPES = (torch.float32, torch.float64, torch.complex64, torch.int64, torch.bool)


class NoOp(TorchDispatchMode):
    """A dispatch mode that does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Case(NamedTuple):
    """One sample. `make` gives a new block; `tensors` are its inputs."""

    name: str  # of the operator or module
    number: int
    make: Callable[[], nn.Module]
    tensors: list[torch.Tensor]


class Call(nn.Module):
    """An operator with its arguments. Of every second sample it gets copies, so that its inputs are results of the region."""

    def __init__(self, function: Callable[..., Any], arguments: Any, number: int) -> None:
        super().__init__()
        self._function = function
        self._arguments = arguments
        self._copies = number % 2 == 1

    def forward(self, *tensors: torch.Tensor) -> Any:
        given = iter(tensors)

        def tensor(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            found = next(given)
            return found.clone() if self._copies else found

        first, rest, named = pytree.tree_map(tensor, self._arguments)
        return self._function(first, *rest, **named)


class Method(nn.Module):
    """A module with its arguments, which may hold no tensors or others."""

    def __init__(self, module: nn.Module, arguments: Any) -> None:
        super().__init__()
        self.module = module
        self._arguments = arguments

    def forward(self, *tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        args, kwargs = pytree.tree_map(
            lambda value: next(given) if isinstance(value, torch.Tensor) else value, self._arguments
        )
        return self.module(*args, **kwargs)


def operator_cases(
    device: str, part: int, num_parts: int, most_samples: int | None, *, has_gradients: bool
) -> Iterator[Case]:
    """Every operator of a part; with `most_samples`, so many of each at most."""
    for info in database()[part::num_parts]:
        dtype = next((each for each in _DTYPES if info.supports_dtype(each, device)), None)
        if dtype is None:
            continue
        needs = has_gradients and info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
        torch.manual_seed(zlib.crc32(info.formatted_name.encode()))
        random.seed(1)
        samples: list[Any] = []
        with contextlib.suppress(Exception):  # samples that need another device
            samples = list(info.sample_inputs(device, dtype, requires_grad=needs))
        step = 1 if most_samples is None else max(1, len(samples) // most_samples)
        for number in range(0, len(samples), step):
            sample = samples[number]
            arguments = (sample.input, sample.args, sample.kwargs)
            make = functools.partial(Call, info.op, arguments, number)
            yield Case(info.name, number, make, _tensors(arguments))


def module_cases(device: str, part: int, num_parts: int, most_samples: int | None) -> Iterator[Case]:
    stand_in_for_expecttest()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_modules import module_db
    for info in module_db[part::num_parts]:
        dtype = next((each for each in info.dtypes if each is torch.float32), info.dtypes[0])
        for is_training in (True, False):
            torch.manual_seed(zlib.crc32(info.name.encode()))
            samples: list[Any] = []
            with contextlib.suppress(Exception):
                samples = info.module_inputs_func(
                    info, device=device, dtype=dtype, requires_grad=True, training=is_training
                )
            step = 1 if most_samples is None else max(1, len(samples) // most_samples)
            for number in range(0, len(samples), step):
                made, given = samples[number].constructor_input, samples[number].forward_input
                if given is None:
                    continue
                arguments = (tuple(given.args), dict(given.kwargs))
                make = functools.partial(_module, info.module_cls, made, arguments, device, dtype, is_training)
                yield Case(info.module_cls.__name__, number, make, _tensors(arguments))


def _module(cls: Any, made: Any, arguments: Any, device: str, dtype: torch.dtype, is_training: bool) -> nn.Module:
    torch.manual_seed(3)
    named = dict(made.kwargs)
    with contextlib.suppress(TypeError):
        return Method(cls(*made.args, **named, device=device, dtype=dtype).train(is_training), arguments)
    return Method(cls(*made.args, **named).to(device, dtype).train(is_training), arguments)


def _tensors(arguments: Any) -> list[torch.Tensor]:
    return [each for each in pytree.tree_leaves(arguments) if isinstance(each, torch.Tensor)]


def run(case: Case, wrap: Wrap = lambda block: block, mode: Any = None) -> list[Any]:
    """The results, the gradients of inputs and parameters, and the buffers."""
    block = case.make()
    leaves = [each.detach().clone().requires_grad_(each.requires_grad) for each in case.tensors]
    given = [each * 1 if each.requires_grad and each.layout is torch.strided else each for each in leaves]
    torch.manual_seed(5)
    random.seed(5)
    with contextlib.nullcontext() if mode is None else mode:
        result = wrap(block)(*given)
    results = _tensors(result)
    ends = [each for each in results if each.requires_grad]
    starts = [each for each in (*leaves, *block.parameters()) if each.requires_grad]
    gradients: list[Any] = []
    if ends and starts:
        torch.manual_seed(7)
        upstream = [torch.randn(each.shape, dtype=torch.float64).to(each.device, each.dtype) for each in ends]
        try:
            gradients = list(torch.autograd.grad(ends, starts, upstream, allow_unused=True))
        except HyperParallelError:
            raise
        except (RuntimeError, NotImplementedError) as error:
            gradients = [f"{type(error).__name__}: {str(error)[:60]}"]
    return [*(each.detach() for each in results), *gradients, *(each.detach().clone() for each in block.buffers())]


def differs(left: list[Any], right: list[Any]) -> bool:
    return len(left) != len(right) or not all(map(_same, left, right))


def _same(left: Any, right: Any) -> bool:
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor):
        return type(left) is type(right) and left == right
    if (left.shape, left.dtype, left.layout) != (right.shape, right.dtype, right.layout):
        return False
    if left.layout is not torch.strided:
        left, right = left.to_dense(), right.to_dense()
    left, right = (each.resolve_conj().resolve_neg() for each in (left, right))
    if left.is_complex():
        left, right = torch.view_as_real(left), torch.view_as_real(right)
    if left.dtype.is_floating_point:
        return torch.equal(left.isnan(), right.isnan()) and torch.equal(left.nan_to_num(), right.nan_to_num())
    return torch.equal(left, right)


def compare(cases: Iterable[Case]) -> tuple[Counter[str], list[str]]:
    """How many runs ended in which way, and what is wrong: other bits, an error that the plain run does not give, a refusal."""
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the samples do is PyTorch's business
        for case in cases:
            plain = _plain(case)
            if plain is None:
                continue
            for way, wrap in WAYS.items():
                verdict = _verdict(case, plain, wrap)
                counts[verdict.partition(":")[0]] += 1
                if verdict.partition(":")[0] in ("wrong", "refused", "raw"):
                    wrong.append(f"{case.name} {case.number}, {way}: {verdict}"[:300])
    return counts, wrong


def _plain(case: Case) -> list[Any] | None:
    """None for samples that are not for this device."""
    with contextlib.suppress(Exception):
        return run(case)
    return None


def _is_another_each_time(case: Case, plain: list[Any]) -> bool:
    """Whether the plain run itself gives other bits each time: of memory that nobody wrote, or as PyTorch says of some kernels on CUDA."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        again = run(case)
    is_unsteady = any("does not have a deterministic implementation" in str(each.message) for each in told)
    return is_unsteady or case.name in _WITHOUT_VALUES.split() or differs(plain, again)


def _verdict(case: Case, plain: list[Any], wrap: Wrap) -> str:
    try:
        found = run(case, wrap)
    except HyperParallelError as error:
        return f"refused: {error}"
    except Exception as error:
        return f"raw: {type(error).__name__}: {error}"
    if not differs(plain, found):
        return "right"
    if _is_another_each_time(case, plain):
        return "another each time"
    if case.name in OTHER_WAY.split() and not differs(run(case, mode=NoOp()), found):
        return "as under a mode"
    return "wrong: other bits"


def other_under_a_mode(cases: Iterable[Case]) -> set[str]:
    """What gives other bits if a dispatch mode is on that does nothing."""
    found = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases:
            plain = _plain(case)
            if plain is not None and differs(plain, run(case, mode=NoOp())) and not _is_another_each_time(case, plain):
                found.add(case.name)
    return found
