"""Calls that cannot begin leave the group whole; calls that do not fit together are told before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from support import processes
from support.communicating import Here, backend_of

covers = pytest.mark.covers

CALLS: dict[str, Callable[[Here, Any, Any], Any]] = {
    "all_reduce": lambda here, x, group: here.platform.all_reduce(x, group),
    "all_gather_into_tensor": lambda here, x, group: here.platform.all_gather_into_tensor(x, group),
    "reduce_scatter_tensor": lambda here, x, group: here.platform.reduce_scatter_tensor(x, group),
    "broadcast": lambda here, x, group: here.platform.broadcast(x, 0, group),
    "all_to_all_single": lambda here, x, group: here.platform.all_to_all_single(x, x.shape, group)[0],
    "p2p_exchange": lambda here, x, group: here.platform.p2p_exchange(x, here.peer, group),
    "isend": lambda here, x, group: here.platform.isend(x, here.peer, group).wait(),
    "irecv": lambda here, x, group: here.platform.irecv(x, here.peer, group).wait(),
    "differentiable_all_reduce": lambda here, x, group: here.platform.differentiable_all_reduce(x, "sum", group),
    "differentiable_all_gather_concat": lambda here, x, group: here.platform.differentiable_all_gather_concat(
        x, group, here.size, 0
    ),
}


def _outcome(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def make_calls_that_cannot_begin(framework: str) -> dict[tuple[str, str], tuple[str, list[float]]]:
    """(what, call) -> (its error, the sum over the ranks in the same group afterwards)."""
    import hyper_parallel as hp

    here = Here(backend_of(framework), "world")
    platform, backend = here.platform, here.backend
    mesh = hp.init_device_mesh("cpu", (here.size,))
    tried: list[tuple[str, str, Any]] = []
    ours = hp.distribute_tensor(backend.tensor([1.0] * 4), mesh, [hp.Shard(0)])
    tried += [("ours", call, ours) for call in CALLS]
    if framework == "torch":
        import torch
        import torch.distributed.tensor as theirs

        tried += [("theirs", call, theirs.DTensor.from_local(torch.ones(2), mesh.to_torch())) for call in CALLS]
        tried += [("sparse", call, torch.eye(4).to_sparse()) for call in ("all_reduce", "isend")]
        for dtype in (torch.float8_e4m3fn, torch.int16, torch.uint32):
            reducing = ("all_reduce", "reduce_scatter_tensor", "differentiable_all_reduce")
            tried += [("dtype", f"{call} of {dtype}", torch.ones(4).to(dtype)) for call in reducing]
    else:
        for dtype in ("int16", "complex64"):
            tried += [("dtype", f"{call} of {dtype}", backend.tensor([1.0] * 4, dtype)) for call in CALLS]
    group, found = platform._create_group(range(here.size)), {}
    with backend.active():
        for what, name, x in tried:
            text = _outcome(lambda name=name, x=x: CALLS[name.partition(" ")[0]](here, x, group))
            total = platform.all_reduce(backend.tensor([here.rank + 1.0]), group)
            found[what, name] = text, backend.numbers(total).tolist()
    platform.destroy_process_group(group)
    return found


@covers("all_reduce", "broadcast", "isend", "irecv", "p2p_exchange")
@pytest.mark.parametrize("framework", ["torch", "mindspore"])
def test_a_call_that_cannot_begin_says_so_and_the_group_goes_on(framework: str) -> None:
    pytest.importorskip(framework)
    words = {"ours": "not a distributed tensor", "theirs": "not a distributed tensor", "sparse": "a dense tensor"}
    for found in processes.pool(framework, 2).run(make_calls_that_cannot_begin, framework):
        assert len(found) > 20
        for (what, name), (text, total) in found.items():
            assert text.startswith("ArgumentTypeError"), (what, name, text)
            assert words.get(what, "Cast it first") in text, (what, name, text)
            assert "rank 1" not in text.replace("rank 1; nothing was sent", ""), "no other rank is blamed"
            assert total == [3.0], (what, name)


def refuse_on_one_rank(framework: str) -> tuple[str, str, list[float]]:
    """The framework itself refuses it, on rank 1 alone."""
    here = Here(backend_of(framework), "world")
    group = here.platform.split_group(None, [[0, 1]], timeout=timedelta(seconds=1))
    transport = here.platform.transport
    original = transport.launch_barrier

    def refuse(*_arguments: Any) -> Any:
        raise RuntimeError("There is no such barrier.\nMore.")

    if here.rank == 1:
        transport.launch_barrier = refuse
    try:
        first = _outcome(lambda: here.platform.barrier(group))
    finally:
        if here.rank == 1:
            del transport.launch_barrier
    assert transport.launch_barrier == original
    after = _outcome(lambda: here.platform.all_reduce(here.backend.tensor([1.0]), group)) if here.rank == 0 else ""
    here.platform.destroy_process_group(group)
    total = here.platform.all_reduce(here.backend.tensor([1.0]), None)
    return first, after, here.backend.numbers(total).tolist()


@covers("barrier")
def test_what_the_framework_refuses_on_one_rank_is_told_there_and_the_others_name_that_rank() -> None:
    (text, after, total), (own, _, other_total) = processes.pool("torch", 2).run(refuse_on_one_rank, "torch")
    assert own.splitlines()[0] == "CommunicationError: `barrier` could not begin."
    assert "from the framework: There is no such barrier" in own
    assert "The group is as it was" in own
    assert "rank 1 called `barrier (it could not begin)` instead" in text
    assert "cannot run" in after
    assert total == other_total == [2.0]


# Dtypes that gloo does not know are moved as bytes


def move_rare_dtypes(framework: str) -> list[bool]:
    import torch

    here = Here(backend_of(framework), "world")
    platform, checks = here.platform, []
    for dtype in (torch.float8_e4m3fn, torch.int16, torch.uint32):
        mine, other = ((torch.arange(6.0).reshape(2, 3) + 10 * rank).to(dtype) for rank in (here.rank, here.peer))
        both = [mine, other] if here.rank == 0 else [other, mine]
        single = torch.tensor(3.0 + here.rank).to(dtype)
        found = [
            (platform.all_gather_into_tensor(mine, None), torch.stack(both).flatten(0, 1)),
            (
                platform.all_to_all_single(mine, (6,), None)[0],
                torch.stack([each[here.rank] for each in both]).flatten(),
            ),
            (platform.broadcast(single, 1), torch.tensor(4.0).to(dtype)),
            (platform.broadcast(mine.clone().T, 1), both[1].T),
            (platform.p2p_exchange(mine, here.peer), other),
            (platform.broadcast(mine[:0].clone(), 0), mine[:0]),
        ]
        sent, received = ([2, 0], [2, 1]) if here.rank == 0 else ([1, 1], [0, 1])
        rows = torch.cat([both[0], both[1][:1]]) if here.rank == 0 else both[1][1:]
        found.append((platform.differentiable_all_to_all_single(mine, sent, received, None), rows))
        checks += [got.dtype == dtype and got.shape == want.shape and _bits(got) == _bits(want) for got, want in found]
    return checks


def _bits(tensor: Any) -> bytes:
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@covers("all_gather_into_tensor", "all_to_all_single", "broadcast", "differentiable_all_to_all_single")
def test_values_of_a_dtype_that_gloo_does_not_know_arrive_unchanged() -> None:
    assert processes.pool("torch", 2).run(move_rare_dtypes, "torch") == [[True] * 21] * 2


# Calls that do not fit together

ODD: dict[str, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "a larger tensor": ("all_reduce", lambda torch: torch.ones(4), lambda torch: torch.ones(8)),
    "a smaller tensor": ("all_to_all_single", lambda torch: torch.ones(8), lambda torch: torch.ones(4)),
    "another dtype of the same size": ("all_reduce", lambda torch: torch.ones(4), lambda torch: torch.ones(4).int()),
    "another shape": ("all_gather_into_tensor", lambda torch: torch.ones(4, 2), lambda torch: torch.ones(2, 4)),
}  # fmt: skip


def give_something_else(framework: str, odd: str) -> tuple[str, list[float]]:
    """Rank 1 does. Then the sum over the ranks in a new group."""
    import torch

    here = Here(backend_of(framework), "world")
    group = here.platform._create_group(range(here.size))
    call, usual, other = ODD[odd]
    x = (other if here.rank == 1 else usual)(torch)
    text = _outcome(lambda: CALLS[call](here, x, group))
    here.platform.destroy_process_group(group)
    total = here.platform.all_reduce(torch.ones(1), None)
    return text, total.tolist()


@covers("all_reduce", "all_gather_into_tensor", "all_to_all_single")
@pytest.mark.parametrize("odd", ODD)
def test_a_rank_that_gives_another_size_or_dtype_is_named_and_no_process_ends(odd: str) -> None:
    found = processes.pool("torch", 4).run(give_something_else, "torch", odd)
    for rank, (text, total) in enumerate(found):
        first = text.splitlines()[0]
        assert first.startswith(f"CommunicationError: `{ODD[odd][0]}` did not finish: "), text
        assert total == [4.0], "all are alive"
        if rank != 1:
            assert "rank 1 called it with " in first, text
            assert "and this rank with " in first, text
            assert not [other for other in (0, 2, 3) if f"rank {other} " in first], text
        else:
            assert all(f"rank {other} called it with" in first for other in (0, 2, 3)), text


def reduce_other_shapes(framework: str) -> list[float]:
    import torch

    here = Here(backend_of(framework), "world")
    return here.platform.all_reduce(torch.ones(()) if here.rank else torch.ones(1), None).flatten().tolist()


@covers("all_reduce")
def test_a_reduction_of_as_many_numbers_in_another_shape_is_fine() -> None:
    assert processes.pool("torch", 2).run(reduce_other_shapes, "torch") == [[2.0], [2.0]]


def call_another_thing_in_detail() -> tuple[str, list[float]]:
    import torch.distributed as dist

    here = Here(backend_of("torch"), "world")
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group = here.platform.split_group(None, [[0, 1]], timeout=timedelta(seconds=1))
        call = (
            here.platform.barrier
            if here.rank == 0
            else lambda group: here.platform.all_reduce(here.backend.tensor([1.0]), group)
        )
        text = _outcome(lambda: call(group))
    finally:
        dist.set_debug_level(level)
    here.platform.destroy_process_group(group)
    total = here.platform.all_reduce(here.backend.tensor([1.0]), None)
    return text, here.backend.numbers(total).tolist()


def test_where_pytorch_itself_looks_whether_all_ranks_call_the_same_another_rank_is_named_as_well() -> None:
    pytest.importorskip("torch")
    (first, total), (second, _) = processes.pool("torch", 2).run(call_another_thing_in_detail)
    assert "`barrier` did not finish: rank 1 called `all_reduce` instead" in first
    assert "`all_reduce` did not finish: rank 0 called `barrier` instead" in second
    assert total == [2.0]
