"""Collectives, their gradients, sends and objects on two and four ranks: one text, every framework."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from support import communicating, processes
from support.backends import Backend
from support.communicating import CASES, Here, backend_of

pytest.importorskip("torch")  # what one process alone computes is computed with it

covers = pytest.mark.covers


def pool_of(backend: Backend, world_size: int) -> processes.Pool:
    if backend.name == "torch-cuda":
        pytest.skip("a rank needs a GPU of its own, and these tests have at most one")
    return processes.pool("torch" if backend.name.startswith("torch") else "mindspore", world_size)


def operations(name: str) -> tuple[str, ...]:
    return ("isend", "irecv") if name.startswith("isend") else (name.partition(",")[0],)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", [pytest.param(name, marks=covers(*operations(name))) for name in CASES])
def test_every_rank_gets_what_one_process_alone_computes(backend: Backend, name: str, world_size: int) -> None:
    pool = pool_of(backend, world_size)
    found = pool.run(communicating.run_case, pool.framework, name, deadline_s=60)
    wanted = communicating.expected(name, world_size)
    for rank in range(world_size):
        assert set(found[rank]) == {setting for setting, _ in wanted}
        for setting, (result, gradient) in found[rank].items():
            wanted_result, wanted_gradient = wanted[setting, rank]
            assert np.array_equal(result, wanted_result), (setting, rank, result, wanted_result)
            assert (gradient is None) == (wanted_gradient is None)
            assert gradient is None or np.array_equal(gradient, wanted_gradient), (
                setting,
                rank,
                gradient,
                wanted_gradient,
            )


# The second derivative


def second_derivative(framework: str, op: str) -> list[float]:
    import torch

    here = Here(backend_of(framework), "world")
    x = torch.full((4,), float(here.rank + 1), requires_grad=True)
    y = here.platform.differentiable_all_reduce(x**2, op, None)
    (first,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    return second.tolist()


@covers("differentiable_all_reduce")
@pytest.mark.parametrize("op", ["sum", "avg", "max", "min", "prod"])
def test_the_second_derivative_goes_through_the_ranks(op: str) -> None:
    import torch

    xs = [torch.full((4,), float(rank + 1), requires_grad=True) for rank in range(2)]
    reduced = getattr(communicating, f"_{'mean' if op == 'avg' else op}")([x**2 for x in xs])[0]
    # Every rank has its own loss of the same y; backward adds up what they say.
    first = torch.autograd.grad(2 * (reduced**2).sum(), xs, create_graph=True, materialize_grads=True)
    wanted = torch.autograd.grad(sum(each.sum() for each in first), xs, materialize_grads=True)
    found = processes.pool("torch", 2).run(second_derivative, "torch", op)
    assert found == [each.tolist() for each in wanted]


# A ring of exchanges


def exchange_around(framework: str) -> list[tuple[list[float], list[float]]]:
    """Every pair of neighbours exchanges, one pair after the other: the ranks of a ring, without a deadlock."""
    backend = backend_of(framework)
    with backend.active():
        here = Here(backend, "world")
        found = []
        for step in range(here.size):
            pair = (step, (step + 1) % here.size)
            if here.rank in pair:
                peer = pair[1 - pair.index(here.rank)]
                x = backend.tensor([float(here.rank), 1.0])
                result = backend.numbers(here.platform.p2p_exchange(tensor=x, peer_rank=peer, group=None))
                (gradient,) = backend.grad_of(
                    lambda each, peer=peer: here.platform.p2p_exchange(each, peer) * (here.rank + 1), x
                )
                found.append((result.tolist(), gradient.tolist()))
        return found


@covers("p2p_exchange")
def test_exchanges_go_around_a_ring(backend: Backend) -> None:
    pool = pool_of(backend, 4)
    found = pool.run(exchange_around, pool.framework)
    for rank in range(4):
        peers = [1, 3] if rank == 0 else [rank - 1, (rank + 1) % 4]
        assert found[rank] == [([float(peer), 1.0], [peer + 1.0] * 2) for peer in peers]


# Returning before the end


def launch_before_the_others(framework: str, directory: str) -> list[Any]:
    """Rank 1 takes part only once rank 0 has returned from its call: so that call cannot have waited."""
    import pathlib

    from hyper_parallel._base import trace
    from support.processes import _until

    here = Here(backend_of(framework), "world")
    x = here.backend.tensor([[1.0 + here.rank], [2.0]])
    x.requires_grad_()
    flag = pathlib.Path(directory, "returned")
    if here.rank == 1:
        import time

        for _ in _until(time.monotonic() + 20):
            if flag.exists():
                break
    with trace.recording() as record:
        y = here.platform.differentiable_all_to_all_single_async(x, [1, 1], [1, 1])
        was_waited_for = bool(record.events("communication.wait"))
        flag.touch()
        shape, view = tuple(y.shape), y.reshape(1, 2)  # neither is a use
        still_not = bool(record.events("communication.wait"))
        total = view * 2
        kinds = [event.kind for event in record.events("communication.")]
    total.sum().backward()
    assert type(total) is type(x)
    assert type(x.grad) is type(x), "what is left in .grad is a plain tensor"
    return [was_waited_for, still_not, shape, kinds, total.detach().tolist(), x.grad.tolist()]


@covers("differentiable_all_to_all_single_async")
def test_the_asynchronous_exchange_returns_before_it_is_done_and_its_first_use_waits(tmp_path: Any) -> None:
    found = processes.pool("torch", 2).run(launch_before_the_others, "torch", str(tmp_path))
    for rank in range(2):
        was_waited_for, still_not, shape, kinds, total, gradient = found[rank]
        assert not was_waited_for
        assert not still_not
        assert shape == (2, 1)
        assert kinds == ["communication.launch", "communication.wait"]
        assert total == ([[2.0, 4.0]] if rank == 0 else [[4.0, 4.0]])
        assert gradient == [[2.0], [2.0]]


# Finishing an exchange, with and without a box


def finish_with_a_box(framework: str, empties_it: bool) -> Any:
    backend = backend_of(framework)
    with backend.active():
        here = Here(backend, "world")
        platform = here.platform
        x = backend.tensor(communicating.values(here.rank, (4, 3), 5))
        weight = backend.tensor(communicating.values(here.rank, (4 // here.size, 3 * here.size), 7, seed=1))
        pieces = [platform.chunk(x, 0, here.size, index) for index in range(here.size)]
        leading = platform.cat(pieces, 0).reshape((here.size, 4 // here.size, 3))
        box: list[Any] = []

        def fill(each: Any) -> Any:
            received, work = platform.all_to_all_single(leading, leading.shape, None, async_op=True)
            doubled = each * 2
            if empties_it:
                doubled.register_hook(take)
            return platform.differentiable_async_a2a_wait(doubled, work, received, None, here.size, 1, 0, box) * weight

        def take(placeholder: Any) -> Any:
            assert not backend.numbers(placeholder).any(), "zeros stand for the gradient"
            work, buffer = box.pop()
            work.wait()
            return platform.cat([buffer[index] for index in range(here.size)], 0)

        try:
            (gradient,) = backend.grad_of(fill, x)
        except RuntimeError as error:
            return str(error)
        return gradient


@covers("differentiable_async_a2a_wait")
@pytest.mark.parametrize("world_size", [2, 4])
def test_the_gradient_fetched_from_the_box_is_the_true_one(backend: Backend, world_size: int) -> None:
    import torch

    pool = pool_of(backend, world_size)
    found = pool.run(finish_with_a_box, pool.framework, True)
    weights = [
        torch.tensor(communicating.values(rank, (4 // world_size, 3 * world_size), 7, seed=1)).float()
        for rank in range(world_size)
    ]
    xs = [torch.ones(4, 3, requires_grad=True) for _ in range(world_size)]
    turned = communicating._turned([2 * x for x in xs])
    sum((y * w).sum() for y, w in zip(turned, weights, strict=True)).backward()
    for rank in range(world_size):
        assert np.array_equal(found[rank], xs[rank].grad.numpy())


@covers("differentiable_async_a2a_wait")
def test_a_box_that_was_not_emptied_is_an_error_at_the_end_of_backward(backend: Backend) -> None:
    pool = pool_of(backend, 2)
    for text in pool.run(finish_with_a_box, pool.framework, False):
        assert isinstance(text, str)
        assert "handle_box" in text


# Objects


def send_objects(framework: str) -> Any:
    here = Here(backend_of(framework), "world")
    platform = here.platform
    gathered: list[Any] = [None] * here.size
    platform.all_gather_object(gathered, {"rank": here.rank, "long": "x" * 1000 * here.rank})
    received: list[Any] = [None] * 3
    if here.rank == 0:
        platform.send_object_list([1, "two", np.arange(3)], dst=here.size - 1)
    elif here.rank == here.size - 1:
        platform.recv_object_list(received, src=0)
    assert platform.barrier() is None
    handle = platform.barrier(async_op=True)
    handle.wait()
    return gathered, received


@covers("send_object_list", "recv_object_list", "all_gather_object", "barrier")
@pytest.mark.parametrize("world_size", [2, 4])
def test_objects_of_any_size_arrive_in_the_order_of_the_ranks(backend: Backend, world_size: int) -> None:
    pool = pool_of(backend, world_size)
    found = pool.run(send_objects, pool.framework)
    for rank, (gathered, received) in enumerate(found):
        assert gathered == [{"rank": each, "long": "x" * 1000 * each} for each in range(world_size)]
        if rank == world_size - 1:
            assert received[:2] == [1, "two"]
            assert np.array_equal(received[2], np.arange(3))


# The whole run's norm and state on ranks


def clip_and_collect(framework: str) -> Any:
    from types import SimpleNamespace

    backend = backend_of(framework)
    with backend.active():
        platform = backend.platform
        parameter = platform.new_zero_parameter((2,), "float32", True, None)
        backend.set_grad(parameter, np.array([3.0, 4.0]))
        norm = float(platform.clip_grad_norm_([parameter], 1.0))
        model = backend.model()
        everywhere = sorted(platform.get_model_state_dict(model))
        only_first = sorted(
            platform.get_model_state_dict(model, options=SimpleNamespace(rank0_only=True, cpu_offload=True))
        )
        return norm, backend.get_grad(parameter), everywhere, only_first


@covers("clip_grad_norm_", "get_model_state_dict")
def test_plain_parameters_are_clipped_by_each_rank_and_their_state_is_on_all_or_the_first(backend: Backend) -> None:
    pool = pool_of(backend, 2)
    found = pool.run(clip_and_collect, pool.framework)
    for rank, (norm, gradient, everywhere, only_first) in enumerate(found):
        assert norm == 5.0
        assert np.allclose(gradient, [0.6, 0.8], rtol=1e-5)  # the divisor carries 1e-6 against a division by zero
        assert len(everywhere) == 5
        assert only_first == (everywhere if rank == 0 else [])
