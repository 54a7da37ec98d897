"""Who a process is and which groups it is in: one text, every framework; and what wrong arguments are told."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hyper_parallel._base import log
from hyper_parallel.platform.interface import EXISTING_COMM_GROUPS
from support import processes
from support.backends import Backend
from support.communicating import backend_of

covers = pytest.mark.covers


def pool_of(backend: Backend, world_size: int) -> processes.Pool:
    if backend.name == "torch-cuda":
        pytest.skip("a rank needs a GPU of its own, and these tests have at most one")
    return processes.pool("torch" if backend.name.startswith("torch") else "mindspore", world_size)


# A process of its own


@covers("get_rank", "get_world_size", "get_process_group_ranks", "get_group_local_rank", "get_global_rank")
def test_a_single_process_is_rank_0_of_1(platform: Any) -> None:
    assert platform.get_rank() == 0
    assert platform.get_world_size() == 1
    assert platform.get_process_group_ranks() == [0]
    assert platform.get_group_local_rank() == 0
    assert platform.get_global_rank(None, 0) == 0


@covers("all_reduce", "get_backend", "barrier", "create_group", "destroy_process_group")
def test_communication_that_was_not_started_is_an_error_that_says_so(backend: Backend, platform: Any) -> None:
    calls = (lambda: platform.all_reduce(backend.tensor([1.0]), None), platform.barrier, platform.get_backend,
             lambda: platform.create_group([0]), lambda: platform.split_group(None, [[0]]))  # fmt: skip
    for call in calls:
        with pytest.raises(RuntimeError, match="init_process_group"):
            call()
    platform.destroy_process_group()  # nothing to end


# Groups of several processes


def make_groups(framework: str) -> dict[str, Any]:
    platform = backend_of(framework).platform
    rank, size = platform.get_rank(), platform.get_world_size()
    made: dict[str, Any] = {"rank": rank, "size": size, "backend": platform.get_backend()}
    platform.init_process_group()  # again: nothing happens
    platform.init_process_group(world_size=size, rank=rank, timeout=timedelta(seconds=9))
    half = list(range(size // 2)) if rank < size // 2 else list(range(size // 2, size))

    group = platform.create_group(half)
    made["same object"] = platform.create_group(tuple(reversed(half))) is group
    made["found"] = platform.get_created_group(half) is group
    made["uncached is another"] = platform._create_group(half) != group
    made["of the others"] = platform.create_group([each for each in range(size) if each not in half])
    made["ranks"] = platform.get_process_group_ranks(group)
    made["local rank"] = platform.get_group_local_rank(group)
    made["global ranks"] = [platform.get_global_rank(group, each) for each in range(len(half))]
    made["world ranks"] = platform.get_process_group_ranks()
    made["key"] = sorted(EXISTING_COMM_GROUPS)

    platform.destroy_process_group(group)
    made["forgotten"] = platform.get_created_group(half)
    again = platform.create_group(half)
    total = platform.all_reduce(backend_of(framework).tensor([1.0]), again)
    made["works again"] = backend_of(framework).numbers(total).tolist()

    platform.mark_created_groups([again])
    del EXISTING_COMM_GROUPS[str(tuple(half))]
    platform.mark_created_groups(process_group=again)
    made["marked"] = platform.create_group(half) is again

    alone = platform.split_group(None, [[0]])
    made["in no list"] = alone is None
    thirds = platform.split_group(parent_pg=again, split_ranks=[[each] for each in half], group_desc="alone")
    made["split"] = platform.get_process_group_ranks(thirds)
    return made


def wrong_groups(framework: str) -> list[str]:
    """The error of each wrong call."""
    platform = backend_of(framework).platform
    tensor = backend_of(framework).tensor([1.0, 2.0, 3.0])
    size = platform.get_world_size()
    calls = [
        lambda: platform.create_group([0, size]),
        lambda: platform.create_group([0, 0]),
        lambda: platform.create_group([]),
        lambda: platform.create_group("01"),
        lambda: platform.create_group([0, "1"]),
        lambda: platform.split_group(None, None),
        lambda: platform.split_group(None, []),
        lambda: platform.split_group(None, [[0, 1], [1]]),
        lambda: platform.split_group(None, [[size]]),
        lambda: platform.get_global_rank(None, size),
        lambda: platform.all_reduce(tensor, "no such group"),
        lambda: platform.all_reduce(tensor, SimpleNamespace(group=None, group_name=None, rank_size=2)),
        lambda: platform.all_reduce([1.0], None),
        lambda: platform.reduce_scatter_tensor(tensor, None),
        lambda: platform.broadcast(tensor, size),
        lambda: platform.isend(tensor),
        lambda: platform.irecv(tensor, src=None),
        lambda: platform.isend(tensor, platform.get_rank()),
        lambda: platform.send_object_list([], dst=0),
        lambda: platform.all_gather_object([None], 1),
        lambda: platform.all_to_all_single(tensor, (3,)),
        lambda: platform.differentiable_all_to_all(backend_of(framework).tensor(np.ones((4, 2))), (3,), None),
        lambda: platform.differentiable_all_to_all_single(tensor, [1, 1], [1, 1]),
        lambda: platform.differentiable_all_to_all_single(tensor, [3], [3]),
        lambda: platform.differentiable_all_to_all_single(tensor, [3, 0], None),
        lambda: platform.differentiable_all_reduce(tensor, "median", None),
        lambda: platform.differentiable_all_reduce(tensor, None, None),
        lambda: platform.differentiable_all_reduce(backend_of(framework).tensor([1], "int64"), "mean", None),
        lambda: platform.differentiable_reduce_scatter(tensor, 2, 0, "sum", None),
        lambda: platform.differentiable_reduce_scatter(tensor, 5, 0, "sum", None),
        lambda: platform.differentiable_reduce_scatter(backend_of(framework).tensor([1.0, 2.0]), 2, 0, "prod", None),
        lambda: platform.differentiable_all_gather_concat(tensor, None, 3, 0),
        lambda: platform.differentiable_all_gather_concat(tensor, None, size, 1),
        lambda: platform.p2p_exchange(tensor, size),
        lambda: platform.init_process_group(rank=7),
        lambda: platform.get_process_group_ranks(SimpleNamespace(group=None, group_name=None)),
    ]  # fmt: skip
    found = []
    for call in calls:
        try:
            call()
        except (ValueError, TypeError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append("nothing was raised")
    platform.barrier()  # none of them has sent anything: the ranks still agree
    return found


WRONG = """
not there.*ranks 0, 1, got 2
each rank once
each rank once
list of world ranks
not there.*'1'
needs the lists
needs the lists
disjoint.*rank 1 in two
not there
no such member
a group that this rank is in.*no such group
a group that this rank is in
TypeError.*takes a tensor
multiple of 2, got 3
one of ranks 0, 1, got 2
needs `dst`
needs `src`
between two ranks
takes a list
list of 2 entries
multiple of 2, got 3
as many elements.*8 elements.*3
adds up to 2
2 entries, got 1
both
sum, avg, max, min, prod, got 'median'
one of sum
average whole numbers
multiple of 2, got 3
number of ranks.*2, got 5
one of sum, avg, max, min, got 'prod'
number of ranks.*2, got 3
not a dim
one of ranks 0, 1
other numbers
a group that this rank is in
""".strip().splitlines()


@covers(
    "get_rank", "get_world_size", "get_global_rank", "get_group_local_rank", "init_process_group", "destroy_process_group",
    "get_process_group_ranks", "get_backend", "split_group", "create_group", "_create_group", "get_created_group",
    "mark_created_groups",
)  # fmt: skip
@pytest.mark.parametrize("world_size", [2, 4])
def test_groups_are_made_found_ended_and_made_again(backend: Backend, world_size: int) -> None:
    pool = pool_of(backend, world_size)
    found = pool.run(make_and_end_groups, pool.framework, deadline_s=60)
    for rank, made in enumerate(found):
        half = list(range(world_size // 2)) if rank < world_size // 2 else list(range(world_size // 2, world_size))
        assert (made["rank"], made["size"]) == (rank, world_size)
        assert made["backend"] == ("gloo" if pool.framework == "torch" else "mccl")
        assert made["same object"]
        assert made["found"]
        assert made["uncached is another"]
        assert made["of the others"] is None
        assert made["ranks"] == half == made["global ranks"]
        assert made["local rank"] == half.index(rank)
        assert made["world ranks"] == list(range(world_size))
        assert made["key"] == [str(tuple(half))]
        assert made["forgotten"] is None
        assert made["works again"] == [float(len(half))]
        assert made["marked"]
        assert made["in no list"] == (rank != 0)
        assert made["split"] == [rank]


def make_and_end_groups(framework: str) -> dict[str, Any]:
    """`make_groups`, and nothing left of it; groups that other tests keep in these processes are not seen by it, and stay."""
    before = dict(EXISTING_COMM_GROUPS)
    EXISTING_COMM_GROUPS.clear()
    others: set[Any] = set()
    if framework == "torch":
        import torch.distributed as dist

        others = set(dist.distributed_c10d._world.pg_names)
    try:
        return make_groups(framework)
    finally:
        EXISTING_COMM_GROUPS.clear()
        if framework == "torch":
            for group in set(dist.distributed_c10d._world.pg_names) - others:
                dist.destroy_process_group(group)
        EXISTING_COMM_GROUPS.update(before)


@covers(
    "create_group", "split_group", "get_global_rank", "reduce_scatter_tensor", "broadcast", "isend", "irecv", "send_object_list",
    "all_gather_object", "all_to_all_single", "differentiable_all_to_all_single", "differentiable_all_reduce",
    "differentiable_reduce_scatter", "differentiable_all_gather_concat", "p2p_exchange", "init_process_group",
)  # fmt: skip
def test_wrong_arguments_are_told_before_anything_is_sent(backend: Backend) -> None:
    import re

    pool = pool_of(backend, 2)
    for found in pool.run(wrong_groups, pool.framework):
        assert len(found) == len(WRONG)
        for text, pattern in zip(found, WRONG, strict=True):
            assert re.search(pattern, text, re.DOTALL), (text, pattern)


def group_of_a_member_of_more_groups(framework: str) -> list[float]:
    """The members of one group are in different numbers of other groups, which PyTorch's own naming does not survive."""
    backend = backend_of(framework)
    platform, rank = backend.platform, backend.platform.get_rank()
    extra = [platform._create_group([0]) for _ in range(3)] if rank == 0 else []
    group = platform._create_group([0, 1])
    total = backend.numbers(platform.all_reduce(backend.tensor([rank + 1.0]), group)).tolist()
    for each in (*extra, group):
        if each is not None:
            platform.destroy_process_group(each)
    return total


@covers("_create_group")
def test_members_agree_on_a_group_whatever_other_groups_each_is_in(backend: Backend) -> None:
    pool = pool_of(backend, 2)
    assert pool.run(group_of_a_member_of_more_groups, pool.framework) == [[3.0], [3.0]]


def reduce_other_sizes(framework: str) -> str:
    backend = backend_of(framework)
    platform = backend.platform
    try:
        platform.all_reduce(backend.tensor(np.ones(8 if platform.get_rank() else 4)), None)
    except RuntimeError as error:
        return str(error)
    return "fine"


@covers("all_reduce")
def test_ranks_that_reduce_tensors_of_different_sizes_are_told_on_mindspore() -> None:
    """Its CPU backend would go on with wrong numbers. (gloo ends the process.)"""
    pytest.importorskip("mindspore")
    pool = processes.pool("mindspore", 2)
    try:
        found = pool.run(reduce_other_sizes, "mindspore", deadline_s=60)
    finally:
        pool.close()
    assert any("all_reduce of Float32[4]" in text and "all_reduce of Float32[8]" in text for text in found), found
    assert "fine" not in found


def start_again(framework: str) -> Any:
    """End everything and start it again (PyTorch), or be told that it cannot be (MindSpore on the CPU)."""
    backend = backend_of(framework)
    platform = backend.platform
    rank, size = platform.get_rank(), platform.get_world_size()
    platform.create_group(range(size))
    if framework == "mindspore":
        platform.destroy_process_group()
        assert platform.get_world_size() == 1
        try:
            platform.init_process_group(init_method="tcp://127.0.0.1:1", rank=rank, world_size=size)
        except RuntimeError as error:
            return str(error)
        return "started"
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    platform.barrier()
    platform.destroy_process_group()
    cached = list(EXISTING_COMM_GROUPS)
    alone = platform.get_world_size()
    platform.init_process_group(store=dist.PrefixStore("again", store), rank=rank, world_size=size)
    total = backend.numbers(platform.all_reduce(backend.tensor([1.0]), None)).tolist()
    return cached, alone, platform.get_backend(), total


@covers("init_process_group", "destroy_process_group")
def test_everything_can_be_ended_and_started_again_or_says_that_it_cannot(backend: Backend) -> None:
    pool = pool_of(backend, 2)
    try:
        found = pool.run(start_again, pool.framework)
    finally:
        pool.close()  # these workers' world is not the one that other tests expect
    for each in found:
        if pool.framework == "torch":
            assert each == ([], 1, "gloo", [2.0])
        else:
            assert "once in a process" in each


# A world of one rank: what can be tested where there is one device


@pytest.fixture
def world_of_one(backend: Backend) -> Iterator[Any]:
    if not backend.name.startswith("torch"):
        pytest.skip("MindSpore starts communication once in a process; its ranks are processes of their own")
    import torch.distributed as dist

    platform = backend.platform
    platform.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    assert log.current_rank == platform.get_rank
    yield platform
    platform.destroy_process_group()
    assert platform.get_world_size() == 1
    assert log.current_rank is log.rank_of_environment


@covers(
    "all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor", "broadcast", "all_to_all_single", "isend", "irecv",
    "send_object_list", "recv_object_list", "all_gather_object", "barrier", "differentiable_all_gather_concat", "differentiable_all_reduce",
    "differentiable_reduce_scatter", "differentiable_all_to_all", "differentiable_all_to_all_single",
    "differentiable_all_to_all_single_async", "p2p_exchange", "differentiable_async_a2a_wait", "get_backend", "split_group",
    "create_group", "_create_group", "get_created_group", "mark_created_groups", "init_process_group", "destroy_process_group",
)  # fmt: skip
def test_in_a_world_of_one_rank_every_collective_gives_back_what_it_got(backend: Backend, world_of_one: Any) -> None:
    platform = world_of_one
    numbers = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    group = platform.create_group([0])
    assert platform.get_created_group([0]) is group
    platform.mark_created_groups(group)
    assert platform.split_group(None, [[0]]) is not None
    assert platform._create_group([0]) is not group
    assert platform.get_backend() in ("gloo", "nccl")
    plain = {
        "gather": lambda x: platform.all_gather_into_tensor(x, None),
        "reduce": lambda x: platform.all_reduce(x, group),
        "scatter": lambda x: platform.reduce_scatter_tensor(x, None),
        "broadcast": lambda x: platform.broadcast(x, 0),
        "exchange": lambda x: platform.all_to_all_single(x, x.shape, None)[0],
    }
    graded = {
        "gather": lambda x: platform.differentiable_all_gather_concat(x, None, 1, 1),
        "exchange": lambda x: platform.differentiable_all_to_all(x, x.shape, None),
        "rows": lambda x: platform.differentiable_all_to_all_single(x, [2], [2], group),
        "rows, async": lambda x: platform.differentiable_all_to_all_single_async(x, [2], [2], group),
        "pair": lambda x: platform.p2p_exchange(x, 0),
        "finish": lambda x: platform.differentiable_async_a2a_wait(x, None, x.detach().reshape(1, 2, 3), None, 1, 1, 0),
    }
    for op in ("sum", "avg", "max", "min", "prod"):
        graded[f"reduce {op}"] = lambda x, op=op: platform.differentiable_all_reduce(x, op, None)
        if op != "prod":
            graded[f"scatter {op}"] = lambda x, op=op: platform.differentiable_reduce_scatter(x, 1, 0, op, None)
    for name, call in (plain | graded).items():
        assert np.array_equal(backend.numbers(call(backend.tensor(numbers))), numbers), name
    for name, call in graded.items():
        (gradient,) = backend.grad_of(lambda x, call=call: call(x) * 3, backend.tensor(numbers))
        assert np.array_equal(gradient, np.full((2, 3), 3.0)), name
    gathered = [None]
    platform.all_gather_object(gathered, {"a": 1})
    assert gathered == [{"a": 1}]
    platform.barrier()
    for call in (platform.isend, platform.irecv):
        with pytest.raises(ValueError, match="between two ranks"):
            call(backend.tensor([1.0]), 0)
    for call in (platform.send_object_list, platform.recv_object_list):
        with pytest.raises(ValueError, match="between two ranks"):
            call([1], 0)


def test_in_a_world_of_one_rank_a_mesh_of_more_or_of_other_devices_is_refused(
    backend: Backend, world_of_one: Any
) -> None:
    import torch

    import hyper_parallel as hp

    with contextlib.suppress(ImportError):  # who is asked must not depend on what is imported
        import mindspore  # noqa: F401
    with pytest.raises(RuntimeError, match="Expected 16 processes, got 1"):
        hp.init_device_mesh("cpu", (16,))
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match='Expected "cpu", got "cuda"'):
            hp.init_device_mesh("cuda", (1,))
    assert hp.init_device_mesh("cpu", (1,)).size() == 1
