"""The backward side of an overlap works under the caller's modes, types, devices and flags, and leaves none of them in its thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from hyper_parallel import HookCoordinator, explicit_communication, overlap_forward_backward, unknown_ops
from hyper_parallel.core.shard._op_dispatch import are_unknown_ops_replicated
from hyper_parallel.core.shard.communication_log import _is_explicit
from hyper_parallel.platform.selection import _choose, _forget
from support.backends import Backend


@pytest.fixture(autouse=True)
def nothing_stays_chosen() -> Iterator[None]:
    yield
    _forget()


def seen_on_both_sides(look: Callable[[], Any], around: Any) -> None:
    """`look` sees the same on both sides within `around`, and something else on both once it is over."""
    coordinator = HookCoordinator(60.0)
    outside = overlap_forward_backward(look, look, coordinator)
    with around:
        here = look()
        assert overlap_forward_backward(look, look, coordinator) == (here, here)
    assert outside == overlap_forward_backward(look, look, coordinator) == (look(), look())
    assert here != outside[0], "the test sees nothing"


def torch_cases() -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    import torch

    return {
        "no_grad": (torch.is_grad_enabled, torch.no_grad),
        "inference": (torch.is_inference_mode_enabled, torch.inference_mode),
        "autocast": (
            lambda: (torch.is_autocast_enabled("cpu"), (torch.ones(2, 2) @ torch.ones(2, 2)).dtype),
            lambda: torch.autocast("cpu", torch.float16),
        ),
        "autocast cache": (torch.is_autocast_cache_enabled, lambda: torch.autocast("cpu", cache_enabled=False)),
        "default device": (lambda: torch.ones(1).device.type, lambda: torch.device("meta")),
        "set_default_device": (
            lambda: (torch.get_default_device().type, torch.ones(1).device.type),
            lambda: setting(torch.set_default_device, "meta", None),
        ),
        "default dtype": (
            lambda: torch.ones(1).dtype,
            lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
        ),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled,
            lambda: setting(torch._C._set_deterministic_algorithms, True, False),  # without the compiler's settings
        ),
        "unknown operators": (are_unknown_ops_replicated, lambda: unknown_ops("replicate")),
        "explicit communication": (_is_explicit.get, explicit_communication),
    }


@contextlib.contextmanager
def setting(change: Callable[[Any], object], inside: Any, outside: Any) -> Iterator[None]:
    change(inside)
    try:
        yield
    finally:
        change(outside)


@pytest.mark.parametrize("name", list(torch_cases()))
def test_what_pytorch_keeps_per_thread_is_carried_over(name: str) -> None:
    look, around = torch_cases()[name]
    seen_on_both_sides(look, around())


def test_modes_of_pytorch_see_both_sides_and_are_not_entered_again() -> None:
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[tuple[str, str]] = []
    entered = []

    class Functions(TorchFunctionMode):
        def __enter__(self) -> Any:
            entered.append("functions")
            return super().__enter__()

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(func, "__name__", "") == "exp":
                seen.append(("function", threading.current_thread().name))
            return func(*args, **(kwargs or {}))

    class Ops(TorchDispatchMode):
        def __enter__(self) -> Any:
            entered.append("ops")
            return super().__enter__()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.exp.default:
                seen.append(("op", threading.current_thread().name))
            return func(*args, **(kwargs or {}))

    coordinator = HookCoordinator(60.0)
    with Functions(), Ops():
        overlap_forward_backward(lambda: None, lambda: torch.ones(1).exp(), coordinator)
    (name,) = {thread for _, thread in seen}
    assert [what for what, _ in seen] == ["function", "op"]
    assert name != threading.current_thread().name
    assert entered == ["functions", "ops"]
    overlap_forward_backward(lambda: None, lambda: torch.ones(1).exp(), coordinator)
    assert len(seen) == 2


def test_hooks_on_saved_tensors_see_both_sides() -> None:
    import torch

    coordinator = HookCoordinator(60.0)
    packed = []
    weight = torch.ones(2, requires_grad=True)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(threading.current_thread())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        overlap_forward_backward(lambda: weight.exp(), lambda: weight.exp(), coordinator)
    assert len(set(packed)) == 2
    overlap_forward_backward(lambda: weight.exp(), lambda: weight.exp(), coordinator)
    assert len(packed) == 2


def test_a_backward_of_either_side_stays_in_its_thread() -> None:
    import torch

    def thread_of_backward() -> threading.Thread:
        found = []
        x = torch.ones(1, requires_grad=True)
        y = x * 2
        y.register_hook(lambda grad: found.append(threading.current_thread()))
        y.sum().backward()
        assert not torch._C._is_multithreading_enabled()
        return found[0]

    here, there = overlap_forward_backward(thread_of_backward, thread_of_backward, HookCoordinator(60.0))
    assert here is threading.current_thread()
    assert there is not here
    assert torch._C._is_multithreading_enabled()


def test_the_current_stream_is_carried_over(backend: Backend, platform: Any) -> None:
    _choose(platform.platform_type)
    coordinator = HookCoordinator(60.0)
    default, stream = platform.get_current_stream(), platform.new_stream()
    with platform.get_stream_context()(stream):
        seen = overlap_forward_backward(platform.get_current_stream, platform.get_current_stream, coordinator)
    assert seen == (stream, stream)
    assert overlap_forward_backward(lambda: 0, platform.get_current_stream, coordinator) == (0, default)


def test_gradients_are_those_of_the_caller_s_stream_and_device(backend: Backend, platform: Any) -> None:
    _choose(platform.platform_type)
    x = backend.tensor(np.full((64, 64), 0.5))
    stream = platform.new_stream()
    stream.wait_stream(platform.get_current_stream())
    with platform.get_stream_context()(stream):
        pair = overlap_forward_backward(
            lambda: backend.grad_of(lambda t: t @ t, x),
            lambda: backend.grad_of(lambda t: t @ t, x),
            HookCoordinator(60.0),
        )
    wanted = backend.grad_of(lambda t: t @ t, x)
    assert all(np.array_equal(side[0], wanted[0]) for side in pair)


def test_mindspore_records_on_the_backward_side_as_in_the_caller() -> None:
    pytest.importorskip("mindspore")
    from mindspore.graph.api import _no_grad, _pynative_executor

    def look() -> tuple[bool, bool]:
        return _pynative_executor.grad_flag(), _pynative_executor.enable_grad()

    seen_on_both_sides(look, setting(_pynative_executor.set_grad_flag, True, False))
    seen_on_both_sides(look, _no_grad())


def test_a_dispatch_mode_of_mindspore_is_refused_since_it_would_see_one_side_only() -> None:
    mindspore = pytest.importorskip("mindspore")

    class Mode(mindspore.utils.MsDispatchMode):  # type: ignore[misc, name-defined]
        pass

    coordinator = HookCoordinator(60.0)
    with Mode(), pytest.raises(RuntimeError, match="dispatch mode"):
        overlap_forward_backward(lambda: 1, lambda: 2, coordinator)
    assert overlap_forward_backward(lambda: 1, lambda: 2, coordinator) == (1, 2)


def test_where_mindspore_may_be_meant_one_side_works_at_a_time() -> None:
    pytest.importorskip("mindspore")
    working: list[str] = []

    def side(name: str) -> Callable[[], None]:
        def run() -> None:
            for _ in range(20):
                working.append(name)
                threading.Event().wait(1e-4)

        return run

    overlap_forward_backward(side("forward"), side("backward"), HookCoordinator(60.0))
    assert working == ["backward"] * 20 + ["forward"] * 20
