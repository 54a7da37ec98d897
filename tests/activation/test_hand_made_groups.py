"""Moves by hand: a SwapTensor and its states, storages, groups, layers in order; beside what moves by itself."""

from __future__ import annotations

import contextlib
import copy
import errno
import gc
import itertools
import os
import pickle
import random
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import hyper_parallel
from hyper_parallel import Storage, SwapManager, SwapTensor
from hyper_parallel._base import trace
from hyper_parallel.core.swap import disk_stream, engines
from hyper_parallel.core.swap import engine as engine_module
from hyper_parallel.core.swap.by_hand import tensor as swap_tensor
from hyper_parallel.core.swap.by_hand.tensor import Parts
from hyper_parallel.core.swap.states import SlotState
from hyper_parallel.platform import selection
from hyper_parallel.platform.torch.activation_checkpoint import AsyncSaveOnCpu, swap_wrapper
from support.campaign import share
from support.planted_bugs import BY_HAND
from support.planting import Bug, beside
from support.simulated_device import SimulatedBuffer, SimulatedDevice
from support.simulated_tier import SimulatedTier
from support.swapping import Swapping, check_nothing_left, gradients

MOVES = ["async_offload", "wait_offload", "async_load", "wait_load"]
CALLS = [*MOVES, "get_val"]
DEVICE, D2H, HOST, DISK, H2D, NON_TENSOR = (
    SlotState(value) for value in ("device", "d2h", "host", "disk", "h2d", "non_tensor")
)


@pytest.fixture(autouse=True)
def as_in_a_new_process() -> Iterator[None]:
    """A tensor or module handed to a public call binds the process to its framework; each test starts unbound and in no group."""
    yield
    SwapManager().set_current_group_name("")
    selection._forget()


def away(swapping: Swapping) -> SlotState:
    return DISK if swapping.kind == "cpu" else HOST


def told(tensor: SwapTensor, *calls: str) -> SwapTensor:
    for call in calls:
        getattr(tensor, call)()
    return tensor


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if (left.dtype, left.size(), left.stride()) != (right.dtype, right.size(), right.stride()):
        return False
    as_bytes = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right)]
    return torch.equal(*as_bytes)


def stored(*tensors: Any, key: Any = 0) -> Storage:
    storage = Storage()
    for number, tensor in enumerate(tensors):
        wrapped = tensor if isinstance(tensor, SwapTensor) else SwapTensor(tensor, f"tensor {number}")
        storage.swap_storage[key].append(wrapped)
    return storage


def tensors_of(storage: Storage) -> list[SwapTensor]:
    return [tensor for values in storage.swap_storage.values() for tensor in values]


# -- the states of one tensor --------------------------------------------------------------------------------------------


def in_state(swapping: Swapping, state: str, kind: str) -> tuple[SwapTensor, torch.Tensor]:
    if state == "non_tensor":
        return SwapTensor(7, "layers.3, x"), torch.tensor(7)
    value = swapping.randn(8, 4)
    tensor = SwapTensor(nn.Parameter(value) if kind == "kept" else value.clone(), "layers.3, x")
    return told(tensor, *MOVES[: ["device", "d2h", "away", "h2d"].index(state)]), value


@pytest.mark.parametrize("kind", ["swapped", "kept"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("state", ["device", "d2h", "away", "h2d", "non_tensor"])
def test_a_call_does_what_the_table_says_or_raises_and_changes_nothing(
    swapping: Swapping, state: str, call: str, kind: str
) -> None:
    tensor, value = in_state(swapping, state, kind)
    rest = HOST if kind == "kept" else away(swapping)
    states = {"device": DEVICE, "d2h": D2H, "away": rest, "h2d": H2D, "non_tensor": NON_TENSOR}
    now = states[state]
    assert tensor.state is now
    legal = {
        ("device", "async_offload"): D2H,
        ("d2h", "wait_offload"): rest,
        ("away", "async_load"): H2D,
        ("h2d", "wait_load"): DEVICE,
        ("device", "get_val"): DEVICE,
        ("d2h", "get_val"): D2H,
        **{("non_tensor", each): NON_TENSOR for each in CALLS},
    }
    if (state, call) in legal:
        got = getattr(tensor, call)()
        if call == "get_val":
            assert got == 7 if state == "non_tensor" else torch.equal(got, value)
        else:
            assert got is None
        assert tensor.state is legal[state, call]
    else:
        with pytest.raises(RuntimeError) as caught:
            getattr(tensor, call)()
        text = str(caught.value)
        needed = {"async_offload": "device", "wait_offload": "d2h", "wait_load": "h2d", "get_val": "device or d2h"}
        assert "layers.3, x" in text
        assert f"got state {now.value}" in text
        assert f"xpected state {needed.get(call, 'disk or host')}" in text
        ways = {"device": "async_offload()", "d2h": "wait_offload()", "away": "async_load()", "h2d": "wait_load()"}
        assert ways[state] in text, "it says what to call"
        assert tensor.state is now
    if state != "non_tensor":  # and whatever was called, the rest of the way is open
        told(tensor, *MOVES[[DEVICE, D2H, rest, H2D].index(tensor.state) :])
        assert torch.equal(tensor.get_val(), value)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64], ids=str
)
def test_every_bit_comes_back_and_the_bytes_are_those_of_the_storage(swapping: Swapping, dtype: torch.dtype) -> None:
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (64 * dtype.itemsize,), dtype=torch.uint8)
    value = bits.to(swapping.kind).view(dtype)  # not-a-numbers of all kinds among them
    tensor = told(SwapTensor(value, "x"), "async_offload", "wait_offload")
    assert swapping.offloaded_bytes == value.untyped_storage().nbytes()
    assert swapping.loaded_bytes == 0
    told(tensor, "async_load", "wait_load")
    assert same_bits(tensor.get_val(), value)
    assert swapping.loaded_bytes == value.untyped_storage().nbytes()


def test_a_tensor_goes_round_many_times_with_the_value_it_has_each_time(swapping: Swapping) -> None:
    tensor = SwapTensor(swapping.randn(16, 16), "x")
    for _ in range(10):
        before = tensor.get_val().clone()
        told(tensor, *MOVES)
        assert torch.equal(tensor.get_val(), before)
        tensor = SwapTensor(tensor.get_val() * 0.5, "x")


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.t(),
    "expanded": lambda x: x[:1].expand(5, -1),
    "sliced": lambda x: x[3:7, 2:9:2],
    "of another dtype": lambda x: x.view(torch.int16)[1::3],
    "overlapping": lambda x: x.as_strided((6, 4), (3, 1), 5),
    "a number": lambda x: x[2, 3],
    "empty": lambda x: x[4:4],
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_comes_back_with_its_size_stride_and_offset_and_leaves_the_base_alone(
    swapping: Swapping, view: str
) -> None:
    base = swapping.randn(12, 12)
    value, before = VIEWS[view](base), base.clone()
    tensor = told(SwapTensor(value, "x"), *MOVES)
    got = tensor.get_val()
    assert same_bits(got, value)
    assert got.storage_offset() == value.storage_offset()
    assert got.untyped_storage().data_ptr() != base.untyped_storage().data_ptr(), "it really went away"
    assert torch.equal(base, before)


@pytest.mark.parametrize("value", [7, None, "text", 2.5, (1, 2), torch.float32, torch.Size([2])], ids=str)
def test_what_is_no_tensor_stays_itself(value: Any) -> None:
    tensor = SwapTensor(value, "x")
    for call in (*MOVES, *reversed(MOVES)):
        getattr(tensor, call)()
        assert tensor.state is NON_TENSOR
        assert tensor.get_val() is value


def kept_values(swapping: Swapping) -> dict[str, Callable[[], Any]]:
    weight = nn.Parameter(swapping.randn(8, 8))
    with torch.inference_mode():
        inference = swapping.randn(8, 8)
    return {
        "a parameter": lambda: weight,
        "a view of one": lambda: weight.t(),
        "an empty storage": lambda: torch.empty(0, device=swapping.kind),
        "a sparse one": lambda: swapping.randn(8, 8).to_sparse(),
        "an inference tensor": lambda: inference,
        "a conjugate": lambda: torch.randn(8, 8, dtype=torch.complex64).to(swapping.kind).conj(),
    }


KEPT = ["a parameter", "a view of one", "an empty storage", "a sparse one", "an inference tensor", "a conjugate"]


@pytest.mark.parametrize("kind", KEPT)
def test_what_cannot_be_swapped_goes_through_the_same_states_with_its_value_kept(swapping: Swapping, kind: str) -> None:
    value = kept_values(swapping)[kind]()
    tensor = SwapTensor(value, "x")
    states = [told(tensor, call).state for call in MOVES]
    assert states == [D2H, HOST, H2D, DEVICE]
    got = tensor.get_val()
    assert torch.equal(got.to_dense() if got.is_sparse else got, value.to_dense() if value.is_sparse else value)
    assert swapping.offloaded_bytes == swapping.loaded_bytes == 0


def test_a_cpu_tensor_without_a_directory_goes_through_the_same_states() -> None:
    """Rule 14."""
    before = engines.total_stats().offloaded_bytes
    value = torch.randn(256, 256)
    tensor = SwapTensor(value, "x")
    assert [told(tensor, call).state for call in MOVES] == [D2H, HOST, H2D, DEVICE]
    assert tensor.get_val().data_ptr() == value.data_ptr()
    assert engines.total_stats().offloaded_bytes == before


def test_a_full_tier_keeps_the_value_and_counts_it(swapping: Swapping) -> None:
    value = swapping.randn(64, 64)
    with swapping.configured(**{f"{'disk' if swapping.kind == 'cpu' else 'host'}_budget": "4KiB"}):
        tensor = SwapTensor(value, "x")
        assert [told(tensor, call).state for call in MOVES] == [D2H, HOST, H2D, DEVICE]
    assert tensor.get_val().data_ptr() == value.data_ptr()
    assert sum(swapping.kept(reason) for reason in engines.total_stats().kept if "no room" in reason) == 1
    assert swapping.offloaded_bytes == 0


def test_the_tensor_is_held_until_wait_offload_and_not_after(swapping: Swapping) -> None:
    value = swapping.randn(64, 64)
    storage = StorageWeakRef(value.untyped_storage())
    tensor = SwapTensor(value, "x")
    del value
    tensor.async_offload()
    for managed in engines.all_engines().values():
        managed.engine.join()
    assert not storage.expired(), "the copy is done, and the value can still be asked for"
    assert tensor.get_val().numel() == 64 * 64
    tensor.wait_offload()
    assert storage.expired()


def test_a_value_leads_to_no_graph(swapping: Swapping) -> None:
    class Token:
        pass

    y = swapping.randn(8, 8, requires_grad=True).exp()
    token = Token()
    y.grad_fn.register_prehook(lambda _, token=token: None)
    reference = weakref.ref(token)
    tensor = SwapTensor(y, "x")
    del y, token
    assert reference() is None, "the node is gone"
    assert not tensor.get_val().requires_grad


@pytest.mark.parametrize("num_moves", range(5))
def test_a_tensor_dropped_in_any_state_leaves_nothing(swapping: Swapping, num_moves: int) -> None:
    gc.collect()
    gc.disable()
    try:
        for _ in range(20):
            tensor = told(SwapTensor(swapping.randn(64, 64), "x"), *MOVES[:num_moves])
            del tensor
        check_nothing_left()
    finally:
        gc.enable()
    assert all(len(managed.engine._prefetch._unclaimed) < 3 for managed in engines.all_engines().values())


# -- changes in place ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changed_after", [0, 1])
def test_a_change_while_it_was_held_is_an_error_where_the_value_is_asked_for(
    swapping: Swapping, changed_after: int
) -> None:
    """Rule 4."""
    value = swapping.randn(8, 8)
    tensor = told(SwapTensor(value, "layers.3, x"), *MOVES[:changed_after])
    value.mul_(2)
    message = r"(?s)changed in place.*xpected version 0, got version 1; layers.3, x"
    with pytest.raises(RuntimeError, match=message):
        tensor.get_val()
    told(tensor, *MOVES[changed_after:3])
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            tensor.wait_load()
        assert tensor.state is H2D


def test_a_change_through_another_view_is_seen_too(swapping: Swapping) -> None:
    base = swapping.randn(8, 8)
    tensor = told(SwapTensor(base[2:4], "x"), "async_offload")
    base[7].zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        tensor.get_val()


def test_a_change_after_wait_offload_is_harmless(swapping: Swapping) -> None:
    value = swapping.randn(8, 8)
    before = value.clone()
    tensor = told(SwapTensor(value, "x"), "async_offload", "wait_offload")
    value.zero_()
    told(tensor, "async_load", "wait_load")
    assert torch.equal(tensor.get_val(), before)


def test_a_change_before_it_was_given_is_harmless(swapping: Swapping) -> None:
    value = swapping.randn(8, 8).mul_(2)
    assert torch.equal(told(SwapTensor(value, "x"), *MOVES).get_val(), value)


@pytest.mark.parametrize("num_moves", [2, 3])
def test_a_kept_value_changed_at_any_time_is_an_error(swapping: Swapping, num_moves: int) -> None:
    weight = nn.Parameter(swapping.randn(8, 8))
    tensor = told(SwapTensor(weight, "x"), *MOVES[:num_moves])
    with torch.no_grad():
        weight.add_(1)
    told(tensor, *MOVES[num_moves:3])
    with pytest.raises(RuntimeError, match="changed in place"):
        tensor.wait_load()


def test_a_loaded_value_changed_in_place_is_an_error_too(swapping: Swapping) -> None:
    tensor = told(SwapTensor(swapping.randn(8, 8), "x"), *MOVES)
    tensor.get_val().zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        tensor.get_val()


# -- a disk that fails, and streams of the user's ------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["at once", "before wait_offload"])
def test_a_disk_that_fails_to_write_keeps_the_value(
    swapping: Swapping, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    if swapping.kind != "cpu":
        pytest.skip("copies of a device cannot fail by halves")

    def full(fd: int, view: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    value = swapping.randn(64, 64)
    with monkeypatch.context() as patch:
        patch.setattr(disk_stream, "_write_some", full)
        tensor = told(SwapTensor(value, "x"), "async_offload")
        if when == "before wait_offload":
            for managed in engines.all_engines().values():
                managed.engine.join()
        tensor.wait_offload()
    assert tensor.state is HOST
    assert swapping.kept("the copy failed") == 1
    told(tensor, "async_load", "wait_load")
    assert tensor.get_val().data_ptr() == value.data_ptr()


def test_a_disk_that_fails_to_read_is_an_error_and_can_be_asked_again(
    swapping: Swapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    if swapping.kind != "cpu":
        pytest.skip("copies of a device cannot fail by halves")

    def broken(fd: int, view: memoryview, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    value = swapping.randn(64, 64)
    storage = stored(SwapTensor(value, "layers.3, x"))
    SwapManager().add_storage("group 1", storage)
    storage.launch_offload()
    storage.wait_offload()
    with monkeypatch.context() as patch:
        patch.setattr(disk_stream, "_read_some", broken)
        SwapManager().launch_load("group 1")
        with pytest.raises(RuntimeError, match=r"(?s)could not be brought back.*group 'group 1', layers.3, x"):
            SwapManager().wait_load("group 1")
    (tensor,) = tensors_of(storage)
    assert tensor.state is DISK
    told(tensor, "async_load", "wait_load")
    assert torch.equal(tensor.get_val(), value)


def test_a_copy_stream_takes_the_place_of_the_engines_and_means_nothing_on_the_cpu(swapping: Swapping) -> None:
    stream = torch.cuda.Stream() if swapping.kind == "cuda" else object()
    value = swapping.randn(64, 64)
    tensor = SwapTensor(value.clone(), "x")
    tensor.async_offload(stream)
    tensor.wait_offload()
    tensor.async_load(copy_stream=stream)
    tensor.wait_load()
    assert torch.equal(tensor.get_val(), value)
    if swapping.kind == "cuda":
        with pytest.raises(TypeError, match="copy_stream"):
            SwapTensor(value, "x").async_offload(object())


# -- storages ------------------------------------------------------------------------------------------------------------


def test_a_storage_has_two_dicts_of_lists() -> None:
    storage = Storage()
    for kept in (storage.save_storage, storage.swap_storage):
        assert type(kept) is defaultdict
        assert kept.default_factory is list


def test_a_storage_moves_what_is_under_every_key_in_order_and_back_in_reverse(swapping: Swapping) -> None:
    storage = Storage()
    values = {}
    for number in range(6):
        values[f"x{number}"] = value = swapping.randn(8, 8, seed=number)
        nested = SwapTensor(value.clone(), f"x{number}")
        storage.swap_storage[number // 2].append((nested, [SwapTensor(number, "n")]) if number % 2 else nested)
    storage.save_storage["mine"].append(swapping.randn(2))
    with trace.recording() as recording:
        storage.launch_offload()
        storage.wait_offload()
        storage.launch_load()
        storage.wait_load()
    order = [f"x{number}" for number in range(6)]
    assert [event.fields["label"] for event in recording.events("swap.offload")] == order
    assert [event.fields["label"] for event in recording.events("swap.load")] == order[::-1]
    for tensor in swap_tensors(storage):
        assert torch.equal(tensor.get_val(), values[tensor.label])
    assert len(storage.save_storage["mine"]) == 1


def swap_tensors(storage: Storage) -> list[SwapTensor]:
    flat = []
    for item in itertools.chain.from_iterable(storage.swap_storage.values()):
        flat += [item] if isinstance(item, SwapTensor) else [item[0]]
    return flat


@pytest.mark.parametrize("call", ["launch_offload", "wait_offload", "launch_load", "wait_load"])
def test_a_storage_that_cannot_move_as_a_whole_does_not_move_at_all(swapping: Swapping, call: str) -> None:
    """The last tensor is one step behind, or one ahead."""
    steps = ["launch_offload", "wait_offload", "launch_load", "wait_load"].index(call)
    first = told(SwapTensor(swapping.randn(8, 8), "first"), *MOVES[:steps])
    last = told(SwapTensor(swapping.randn(8, 8), "last"), *MOVES[: steps + 1])
    storage = stored(first, last)
    before = [first.state, last.state]
    with pytest.raises(RuntimeError, match=f"(?s)got state {last.state.value}; last"):
        getattr(storage, call)()
    assert [first.state, last.state] == before


def test_two_views_of_one_storage_move_once_and_a_tensor_stored_twice_does_too(swapping: Swapping) -> None:
    """Rule 1, over all storages of a group."""
    base = swapping.randn(64, 64)
    views = [base[:32], base.t(), base[5], base]
    twice = SwapTensor(swapping.randn(8, 8), "twice")
    storages = [stored(*views[:2], twice), stored(*views[2:], twice)]
    manager = SwapManager()
    for storage in storages:
        manager.add_storage("views", storage)
    manager.launch_offload("views")
    manager.wait_offload("views")
    assert swapping.offloaded_bytes == (64 * 64 + 8 * 8) * 4
    manager.launch_load("views")
    manager.wait_load("views")
    assert swapping.loaded_bytes == (64 * 64 + 8 * 8) * 4
    got = [tensor.get_val() for storage in storages for tensor in tensors_of(storage) if tensor is not twice]
    assert all(same_bits(left, right) for left, right in zip(got, views, strict=True))
    assert len({tensor.untyped_storage().data_ptr() for tensor in got}) == 1


def test_one_of_two_views_that_comes_back_alone_is_not_held_for_the_other(swapping: Swapping) -> None:
    base = swapping.randn(64, 64)
    expected = base.clone()
    storage = stored(base[:32], base[32:])
    first, second = tensors_of(storage)
    storage.launch_offload()
    storage.wait_offload()
    told(first, "async_load", "wait_load")
    assert torch.equal(first.get_val(), expected[:32])
    memory = StorageWeakRef(first.get_val().untyped_storage())
    storage.swap_storage.clear()
    del first
    assert memory.expired()
    assert torch.equal(told(second, "async_load", "wait_load").get_val(), expected[32:])


def test_what_is_no_swap_tensor_in_a_storage_is_an_error_that_names_its_key(swapping: Swapping) -> None:
    storage = stored(swapping.randn(8, 8))
    storage.swap_storage["mlp"].append(swapping.randn(2, 2))
    with pytest.raises(TypeError, match=r"(?s)SwapTensor.*float32\[2, 2\].*key 'mlp'"):
        storage.launch_offload()
    assert tensors_of(storage)[0].state is DEVICE


# -- groups --------------------------------------------------------------------------------------------------------------


def test_there_is_one_manager_also_from_eight_threads_and_as_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SwapManager, "_instance", None)  # as in a new process; the real one comes back afterwards
    found: list[SwapManager] = []
    barrier = threading.Barrier(8)

    def make() -> None:
        barrier.wait(60)
        found.append(SwapManager())

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 8
    assert len(set(map(id, found))) == 1
    manager = found[0]
    assert copy.deepcopy(manager) is copy.copy(manager) is pickle.loads(pickle.dumps(manager)) is manager  # noqa: S301 - our own


def test_a_group_moves_all_its_storages(swapping: Swapping) -> None:
    manager = SwapManager()
    values = [swapping.randn(8, 8, seed=seed) for seed in range(4)]
    storages = [stored(value.clone()) for value in values]
    for storage in storages:
        manager.add_storage("layers.0", storage)
        manager.add_storage("layers.0", storage)  # twice is once
    assert sum(reference() is not None for reference in manager._groups["layers.0"]) == 4
    other = stored(swapping.randn(8, 8))
    manager.add_storage("layers.1", other)
    tensors = [tensors_of(storage)[0] for storage in storages]
    expected = [D2H, away(swapping), H2D, DEVICE]
    for call, state in zip(["launch_offload", "wait_offload", "launch_load", "wait_load"], expected, strict=True):
        with trace.recording() as recording:
            getattr(manager, call)("layers.0", None)
        assert [tensor.state for tensor in tensors] == [state] * 4
        if call == "launch_load":
            assert len(recording.events("swap.load")) == 4
    assert all(torch.equal(tensor.get_val(), value) for tensor, value in zip(tensors, values, strict=True))
    assert tensors_of(other)[0].state is DEVICE


@pytest.mark.parametrize("call", ["launch_offload", "wait_offload", "launch_load", "wait_load"])
def test_an_unknown_group_is_an_error_that_names_it_and_those_that_are_known(call: str) -> None:
    manager = SwapManager()
    storages = [stored(1), stored(2), stored(3)]
    for name, storage in zip(["layers.1", "layers.0", "gone"], storages, strict=True):
        manager.add_storage(name, storage)
    del storages[2], storage
    for name in ("layers.7", "gone", ""):
        with pytest.raises(
            ValueError, match=f"(?s)Group '{name}' is unknown.*one of 'layers.0', 'layers.1', got '{name}'"
        ):
            getattr(manager, call)(name)
    storages.clear()
    with pytest.raises(ValueError, match="(?s)'layers.0' is unknown.*add_storage"):
        getattr(manager, call)("layers.0")
    with pytest.raises(TypeError, match="7"):
        getattr(manager, call)(7)


@pytest.mark.parametrize("call", ["launch_offload", "wait_offload", "launch_load", "wait_load"])
def test_an_illegal_move_of_a_group_names_group_label_state_and_what_was_expected(
    swapping: Swapping, call: str
) -> None:
    steps = ["launch_offload", "wait_offload", "launch_load", "wait_load"].index(call)
    tensor = told(SwapTensor(swapping.randn(8, 8), "layers.3, x"), *MOVES[: steps + 1])
    storage = stored(tensor)
    SwapManager().add_storage("group 1", storage)
    with pytest.raises(
        RuntimeError, match=f"(?s)xpected state .*got state {tensor.state.value}; group 'group 1', layers.3, x"
    ):
        getattr(SwapManager(), call)("group 1")


@pytest.mark.parametrize(
    ("group", "storage", "error"),
    [(7, Storage(), TypeError), ("g", [], TypeError), (None, Storage(), TypeError)],
)
def test_only_storages_join_groups_that_have_a_name(group: Any, storage: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="got"):
        SwapManager().add_storage(group, storage)


def test_a_storage_may_join_the_group_that_a_thread_has_at_first() -> None:
    manager, storage = SwapManager(), Storage()
    manager.add_storage(manager.get_current_group_name(), storage)
    manager.launch_offload("")
    manager.wait_offload("")


def test_a_group_does_not_keep_its_storages_and_names_do_not_pile_up(swapping: Swapping) -> None:
    manager = SwapManager()
    gc.collect()
    gc.disable()
    try:
        for step in range(1000):
            storage = stored(step)
            reference = weakref.ref(storage)
            manager.add_storage(f"step {step}", storage)
            manager.add_storage("every step", storage)
            del storage
            assert reference() is None
    finally:
        gc.enable()
    assert len(manager._groups) < 200
    assert sum(map(len, manager._groups.values())) < 200


def test_the_current_group_is_the_threads_own(swapping: Swapping) -> None:
    manager = SwapManager()
    assert manager.get_current_group_name() == ""
    manager.set_current_group_name("mine")
    seen: list[str] = []

    def work() -> None:
        seen.append(manager.get_current_group_name())
        manager.set_current_group_name("another's")
        seen.append(SwapManager().get_current_group_name())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert seen == ["", "another's"]
    assert manager.get_current_group_name() == "mine"
    with pytest.raises(TypeError, match="None"):
        manager.set_current_group_name(None)


def test_the_numbers_have_names_and_add_up(swapping: Swapping) -> None:
    manager = SwapManager()
    before = manager.stats()
    assert set(before) == {
        "offloaded_bytes", "loaded_bytes", "num_offloads", "num_loads", "num_late_loads", "num_window_waits",
        "load_stall_ms", "offload_stall_ms", "peak_in_flight_bytes", "kept_bytes", "kept", "pool_used_bytes", "pool_reserved_bytes",
    }  # fmt: skip
    storage = stored(*(swapping.randn(64, 64, seed=seed) for seed in range(3)))
    manager.add_storage("g", storage)
    manager.launch_offload("g")
    manager.wait_offload("g")
    tier, num_bytes = "disk" if swapping.kind == "cpu" else "host", 3 * 64 * 64 * 4
    during = manager.stats()
    assert during["pool_used_bytes"][tier] == num_bytes
    assert during["pool_reserved_bytes"][tier] >= num_bytes
    assert during["peak_in_flight_bytes"] >= 64 * 64 * 4
    manager.launch_load("g")
    manager.wait_load("g")
    after = manager.stats()
    assert after["pool_used_bytes"] == {"host": 0, "disk": 0}
    difference = {
        key: after[key] - before[key] for key in ("offloaded_bytes", "loaded_bytes", "num_offloads", "num_loads")
    }
    assert difference == {"offloaded_bytes": num_bytes, "loaded_bytes": num_bytes, "num_offloads": 3, "num_loads": 3}
    after["kept"]["mine"] = 1
    assert "mine" not in manager.stats()["kept"], "what is given is a copy"


def test_threads_that_move_one_group_get_right_values_or_an_error(swapping: Swapping) -> None:
    manager = SwapManager()
    values = [swapping.randn(32, 32, seed=seed) for seed in range(4)]
    storage = stored(*(value.clone() for value in values))
    manager.add_storage("g", storage)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        calls = random.Random(seed)
        for _ in range(60):
            call = calls.choice(["launch_offload", "wait_offload", "launch_load", "wait_load"])
            try:
                getattr(manager, call)("g")
            except RuntimeError as error:
                if "now" not in str(error):
                    failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert failures == []
    for tensor, value in zip(tensors_of(storage), values, strict=True):
        steps = {DEVICE: 4, D2H: 1, HOST: 2, DISK: 2, H2D: 3}[tensor.state]
        assert torch.equal(told(tensor, *MOVES[steps:]).get_val(), value)


# -- what moves by itself, in a group ------------------------------------------------------------------------------------


def loss_of(x: torch.Tensor) -> torch.Tensor:
    return (x.exp().tanh() * x.sin()).sum()


def saved_in(group: str, x: torch.Tensor, **options: Any) -> tuple[AsyncSaveOnCpu, torch.Tensor]:
    SwapManager().set_current_group_name(group)
    hooks = AsyncSaveOnCpu(**options)
    with hooks:
        loss = loss_of(x)
    SwapManager().set_current_group_name("")
    return hooks, loss


numbers = itertools.count()


def new_name() -> str:
    """A block of its own each time: the tail of one that is known stays on the device (rule 10)."""
    return f"block {next(numbers)}"


def test_a_block_joins_the_current_group_with_the_first_tensor_it_saves(swapping: Swapping) -> None:
    manager = SwapManager()
    manager.set_current_group_name("g")
    hooks = AsyncSaveOnCpu(name=new_name())
    assert isinstance(hooks.storage, Storage)
    assert (hooks.add_to_storage, hooks.pack_count, hooks.count_idx, hooks.unpack_count) == (False, 0, 0, 0)
    with hooks:
        pass
    with pytest.raises(ValueError, match="'g' is unknown"):
        manager.wait_offload("g")
    x = swapping.randn(64, 64, requires_grad=True)
    with hooks:
        loss = loss_of(x)
    assert hooks.add_to_storage
    manager.wait_offload("g")
    assert hooks.pack_count == hooks.count_idx == 5
    loss.backward()
    assert hooks.unpack_count == 5
    assert torch.equal(x.grad, gradients(loss_of, x)[0])


def test_without_a_current_group_everything_moves_by_itself(swapping: Swapping) -> None:
    x = swapping.randn(64, 64, requires_grad=True)
    policy = lambda tensor: hyper_parallel.CheckpointPolicy.MUST_SWAP  # noqa: E731 - it reads as the user writes it
    hooks, loss = saved_in("", x, policy_fn=policy, name=new_name())
    assert hooks.policy_fn is policy
    assert not hooks.add_to_storage
    assert swapping.offloaded_bytes == 4 * 64 * 64 * 4, "x, and the results of exp, tanh and sin"
    loss.backward()
    assert torch.equal(x.grad, gradients(loss_of, x)[0])


def test_a_block_that_keeps_all_joins_too_so_that_programs_are_the_same_everywhere(swapping: Swapping) -> None:
    x = swapping.randn(64, 64, requires_grad=True)
    hooks, loss = saved_in("g", x, policy_fn=lambda tensor: True)
    assert hooks.add_to_storage
    assert (hooks.pack_count, hooks.count_idx, dict(hooks.storage.swap_storage)) == (0, 0, {})
    for call in ("launch_offload", "wait_offload", "launch_load", "wait_load"):
        getattr(SwapManager(), call)("g")
    loss.backward()
    assert torch.equal(x.grad, gradients(loss_of, x)[0])


def test_the_calls_of_a_group_reach_what_moves_by_itself(swapping: Swapping) -> None:
    """`wait_offload` lets go of the sources, `launch_load` brings all back, whatever the limit of prefetching."""
    manager = SwapManager()
    x = swapping.randn(64, 64, requires_grad=True)
    plain = gradients(loss_of, x)
    num_bytes = 4 * 64 * 64 * 4
    with swapping.configured(window_bytes="1MiB", prefetch_bytes=1):
        hooks, loss = saved_in("g", x, name=new_name())
        manager.launch_offload("g")
        assert swapping.offloaded_bytes == num_bytes, "they were on their way already"
        manager.wait_offload("g")
        assert sum(managed.engine.in_flight_bytes for managed in engines.all_engines().values()) == 0
        assert swapping.loaded_bytes == 0
        manager.launch_load("g")
        assert swapping.loaded_bytes == num_bytes
        manager.launch_load("g")
        manager.wait_load("g")
        if swapping.kind == "cuda":
            torch.cuda.synchronize()  # there it is the stream that waits: the host would still find the loads under way
        late = engines.total_stats().num_late_loads
        loss.backward()
        assert engines.total_stats().num_late_loads == late
    assert swapping.loaded_bytes == num_bytes, "and nothing came twice"
    assert torch.equal(x.grad, plain[0])
    assert hooks.unpack_count == 5


def test_a_block_shows_each_swapped_tensor_and_what_shows_it_can_be_hurried_along(swapping: Swapping) -> None:
    x = swapping.randn(64, 64, requires_grad=True)
    with swapping.configured(window_bytes="1MiB", prefetch_bytes=1):
        hooks, loss = saved_in("g", x, name=new_name())
        shown = [tensor for index in range(5) for tensor in hooks.storage.swap_storage[index]]
        assert len(shown) == len(hooks.storage.swap_storage) == hooks.count_idx == 5
        assert all(isinstance(tensor, SwapTensor) and tensor.label == f"g::{x.shape}" for tensor in shown)
        SwapManager().wait_offload("g")
        assert all(tensor.state in (HOST, DISK) for tensor in shown)
        for tensor in shown:
            tensor.async_offload()
            tensor.wait_offload()
        with pytest.raises(RuntimeError, match=r"(?s)not on the device.*got state (host|disk); g::.*async_load"):
            shown[0].get_val()
        for tensor in shown:
            tensor.async_load()
            assert tensor.state is H2D
            tensor.wait_load()
        assert torch.equal(shown[0].get_val(), x.exp()), "the first that was saved"
        before = swapping.loaded_bytes
        loss.backward()
        assert swapping.loaded_bytes == before, "nothing came twice"
    assert (hooks.unpack_count, hooks.pack_count) == (5, 5)
    assert hooks.storage is None
    assert torch.equal(x.grad, gradients(loss_of, x)[0])
    del loss
    assert "gone" in repr(shown[0])
    with pytest.raises(RuntimeError, match="graph that saved this tensor is gone"):
        shown[0].get_val()


def test_what_a_block_shows_can_be_assigned(swapping: Swapping) -> None:
    x, mine = swapping.randn(64, 64, requires_grad=True), Storage()
    hooks = AsyncSaveOnCpu(name=new_name())
    hooks.storage, hooks.policy_fn = mine, lambda tensor: tensor is not x
    with hooks:
        loss = loss_of(x)
    assert hooks.storage is mine
    assert hooks.count_idx == len(mine.swap_storage) == 1, "the policy keeps all but x itself"
    hooks.count_idx = hooks.pack_count = hooks.unpack_count = 7
    assert (hooks.count_idx, hooks.pack_count, hooks.unpack_count, hooks.storage) == (7, 7, 7, None)
    with pytest.raises(TypeError, match="callable or None"):
        hooks.policy_fn = 3
    loss.backward()
    assert torch.equal(x.grad, gradients(loss_of, x)[0])


def test_a_group_loads_again_for_another_backward(swapping: Swapping) -> None:
    x = swapping.randn(64, 64, requires_grad=True)
    _, loss = saved_in("g", x, name=new_name())
    SwapManager().wait_offload("g")
    grads = []
    for retain in (True, True, False):
        before = swapping.loaded_bytes
        SwapManager().launch_load("g")
        assert swapping.loaded_bytes == before + 4 * 64 * 64 * 4
        grads.append(torch.autograd.grad(loss, x, retain_graph=retain)[0])
        assert swapping.loaded_bytes == before + 4 * 64 * 64 * 4
    assert all(torch.equal(grad, gradients(loss_of, x)[0]) for grad in grads)


def test_a_group_does_not_load_what_backward_has_asked_for_already(swapping: Swapping) -> None:
    x = swapping.randn(64, 64, requires_grad=True)
    with swapping.configured(prefetch_bytes=1):
        SwapManager().set_current_group_name("g")
        with AsyncSaveOnCpu(name=new_name()):
            middle = x.exp().sin()
            loss = middle.tanh().exp().sum()
        SwapManager().wait_offload("g")
        middle.grad_fn.register_prehook(lambda _: SwapManager().launch_load("g"))
        loss.backward(retain_graph=True)
    assert swapping.loaded_bytes == 3 * 64 * 64 * 4, "the results of exp, tanh and exp, each once"
    del loss, middle


def test_a_group_keeps_neither_a_forward_nor_its_tensors(swapping: Swapping) -> None:
    x = swapping.randn(64, 64, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        hooks, loss = saved_in("g", x, name=new_name())
        SwapManager().launch_load("g")
        storage, reference = hooks.storage, weakref.ref(hooks.storage)
        del hooks, loss
        check_nothing_left()
        assert [followed.group() for followed in storage._followed] == [None]
        storage.launch_load()  # nothing is left in it
        storage.wait_offload()
        del storage
        assert reference() is None
        with pytest.raises(ValueError, match="'g' is unknown"):
            SwapManager().launch_load("g")
    finally:
        gc.enable()


def test_wrapped_modules_and_hand_made_tensors_share_a_group(swapping: Swapping) -> None:
    torch.manual_seed(0)
    layer, manager = nn.Linear(64, 64).to(swapping.kind), SwapManager()
    x, extra = swapping.randn(17, 64, requires_grad=True), swapping.randn(32, 32)
    layer(x).tanh().sum().backward()
    expected, x.grad = x.grad, None
    storage = stored(extra.clone())
    manager.add_storage("g", storage)
    manager.set_current_group_name("g")
    loss = swap_wrapper(layer)(x).tanh().sum()
    manager.set_current_group_name("")
    for call in ("launch_offload", "wait_offload", "launch_load", "wait_load"):
        getattr(manager, call)("g")
    loss.backward()
    assert torch.equal(x.grad, expected)
    assert torch.equal(tensors_of(storage)[0].get_val(), extra)
    assert swapping.offloaded_bytes == (17 * 64 + 32 * 32) * 4


def test_fifty_steps_with_the_collector_off_leave_what_three_left(swapping: Swapping) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(swap_wrapper(nn.Sequential(nn.Linear(32, 32), nn.Tanh())) for _ in range(3))).to(
        swapping.kind
    )
    manager, x = SwapManager(), swapping.randn(16, 32)
    for first, second in itertools.pairwise(model):
        manager.set_forward_prefetch_layer(first, second)

    def step() -> None:
        h, held = x, []
        for number, layer in enumerate(model):
            manager.set_current_group_name(f"layer {number}")
            h = layer(h)
            held.append(stored(h))
            manager.add_storage(f"layer {number}", held[-1])
            manager.launch_offload(f"layer {number}")
            if number:
                manager.wait_offload(f"layer {number - 1}")
        manager.set_current_group_name("")
        h.square().mean().backward()
        for number in range(2):
            assert tensors_of(held[number])[0].state is H2D, "launched when the backward of the next layer began"
            held[number].wait_load()
        assert tensors_of(held[2])[0].state is D2H

    gc.collect()
    gc.disable()
    try:
        counts = []
        for _ in range(50):
            model.zero_grad(set_to_none=True)
            step()
            check_nothing_left()
            counts.append(sum(issubclass(type(obj), (torch.Tensor, Storage, SwapTensor)) for obj in gc.get_objects()))
    finally:
        gc.enable()
    assert counts[2] == counts[-1]
    assert swapping.loaded_bytes > 0


# -- layers in order -----------------------------------------------------------------------------------------------------


class Aside(nn.Module):
    """A layer that puts its input aside by hand, and copies it out at once."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.storages: list[Storage] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        storage = stored(SwapTensor(x, self.name))
        self.storages.append(storage)
        SwapManager().add_storage(self.name, storage)
        storage.launch_offload()
        storage.wait_offload()
        return x * 2

    def states(self) -> list[SlotState]:
        return [tensors_of(storage)[0].state for storage in self.storages]


def chain(
    num_layers: int, wrap: Callable[[nn.Module], nn.Module] = lambda layer: layer
) -> tuple[list[Aside], list[Any]]:
    inner = [Aside(f"layer {number}") for number in range(num_layers)]
    layers = [wrap(layer) for layer in inner]
    for first, second in itertools.pairwise(layers):
        SwapManager().set_forward_prefetch_layer(first, second)
    return inner, layers


def run(layers: list[Any], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


@pytest.mark.parametrize("wrap", [lambda layer: layer, swap_wrapper], ids=["plain", "wrapped"])
def test_the_backward_of_a_layer_launches_the_loads_of_the_one_before(swapping: Swapping, wrap: Any) -> None:
    inner, layers = chain(3, wrap)
    x = swapping.randn(8, 8, requires_grad=True)
    h = run(layers[:2], x)
    seen = []
    h.grad_fn.register_hook(lambda *_: seen.append([layer.states() for layer in inner]))
    out = layers[2](h)
    rest = away(swapping)
    assert [layer.states() for layer in inner] == [[rest]] * 3
    out.sum().backward()
    # when the backward of layer 1 was done, that of layer 0 had not begun: what belongs to the last layer was never asked for
    assert seen == [[[H2D], [H2D], [rest]]]
    SwapManager().wait_load("layer 0")
    assert torch.equal(tensors_of(inner[0].storages[0])[0].get_val(), x.detach())


def test_to_tell_the_order_again_adds_nothing(swapping: Swapping) -> None:
    _, layers = chain(2)

    def count() -> int:
        return sum(len(layer._forward_pre_hooks) + len(layer._forward_hooks) for layer in layers)

    before = count()
    assert before > 0
    for _ in range(100):
        SwapManager().set_forward_prefetch_layer(*layers)
    assert count() == before
    x = swapping.randn(8, 8, requires_grad=True)
    with trace.recording() as recording:
        out = run(layers, x)
        out.sum().backward()
    assert [event.fields["label"] for event in recording.events("swap.load")] == ["layer 0"]
    assert set(vars(layers[0])) == set(vars(Aside("another"))), "nothing is stuck on a module"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_each_of_two_forwards_loads_what_is_its_own(swapping: Swapping, order: tuple[int, int]) -> None:
    """Rule 11."""
    inner, layers = chain(2)
    losses = [run(layers, swapping.randn(8, 8, seed=seed, requires_grad=True)).sum() for seed in range(2)]
    losses[order[0]].backward()
    assert [inner[0].states()[index] for index in order] == [H2D, away(swapping)]
    losses[order[1]].backward()
    assert inner[0].states() == [H2D, H2D]


def test_the_order_keeps_no_storage(swapping: Swapping) -> None:
    inner, layers = chain(2)
    gc.collect()
    gc.disable()
    try:
        out = run(layers, swapping.randn(8, 8, requires_grad=True))
        references = [weakref.ref(layer.storages.pop()) for layer in inner]
        assert [reference() for reference in references] == [None, None]
        out.sum().backward()  # there is nothing to load
        assert swapping.loaded_bytes == 0
    finally:
        gc.enable()


def test_a_layer_inside_a_layer_has_its_own(swapping: Swapping) -> None:
    inner, _ = chain(2)
    outer, head = nn.Sequential(*inner), Aside("head")
    SwapManager().set_forward_prefetch_layer(outer, head)
    x = swapping.randn(8, 8, requires_grad=True)
    out = head(outer(x))
    seen = []
    out.grad_fn.register_prehook(lambda _: seen.append([layer.states() for layer in inner]))
    out.sum().backward()
    rest = away(swapping)
    assert seen == [[[rest], [rest]]], "all layers of the outer one at once would be too much"
    assert inner[0].states() == [H2D]


def test_an_evaluation_and_a_forward_that_raises_leave_the_order_right(swapping: Swapping) -> None:
    inner, layers = chain(2)
    x = swapping.randn(8, 8, requires_grad=True)
    with torch.no_grad():
        run(layers, x)
    with pytest.raises(TypeError):
        layers[0](None)
    for layer in inner:
        layer.storages.clear()
    out = run(layers, x)
    out.sum().backward()
    assert inner[0].states() == [H2D]


def test_the_order_keeps_no_module_and_copies_and_files_of_a_model_work(swapping: Swapping) -> None:
    inner, layers = chain(2)
    model = nn.Sequential(*layers)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - our own
        SwapManager().set_forward_prefetch_layer(*other)
        hooks = [len(layer._forward_pre_hooks) + len(layer._forward_hooks) for layer in other]
        assert hooks == [len(layer._forward_pre_hooks) + len(layer._forward_hooks) for layer in model]
        out = other(swapping.randn(8, 8, requires_grad=True))
        out.sum().backward()
        assert other[0].states() == [H2D]
    gc.collect()
    gc.disable()
    try:
        run(layers, swapping.randn(8, 8, requires_grad=True)).sum().backward()
        references = [weakref.ref(layer) for layer in layers]
        last = layers[1]
        del inner, layers, model, other
        assert [reference() for reference in references] == [None, last]
        del last
        assert references[1]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(("second", "error"), [(None, ValueError), (7, TypeError), (torch.ones(2), TypeError)], ids=str)
def test_only_modules_have_an_order(second: Any, error: type[Exception]) -> None:
    layer = Aside("x")
    for pair in ((layer, second), (second, layer)):
        with pytest.raises(error, match="set_forward_prefetch_layer"):
            SwapManager().set_forward_prefetch_layer(*pair)
    assert not layer._forward_pre_hooks


# -- public names --------------------------------------------------------------------------------------------------------


def test_the_names_are_the_same_wherever_they_are_imported_from() -> None:
    from hyper_parallel.core.activation_checkpoint import policy, swap, wrap, wrappers
    from hyper_parallel.core.swap.config import configure_swap

    assert hyper_parallel.SwapManager is swap.SwapManager
    assert hyper_parallel.SwapTensor is swap.SwapTensor
    assert hyper_parallel.Storage is swap.Storage
    assert hyper_parallel.configure_swap is configure_swap
    assert hyper_parallel.CheckpointPolicy is policy.CheckpointPolicy
    assert hyper_parallel.wrappers is wrappers.wrappers
    assert hyper_parallel.swap_wrapper is wrap.swap_wrapper
    assert hyper_parallel.offload_wrapper is wrap.offload_wrapper


@pytest.mark.parametrize("name", ["swap_wrapper", "offload_wrapper"])
def test_the_neutral_wrappers_give_those_of_the_modules_framework(swapping: Swapping, name: str) -> None:
    wrap = getattr(hyper_parallel, name)
    x = swapping.randn(64, 64, requires_grad=True)
    for wrapped in (wrap(nn.Sequential(nn.Tanh()).to(swapping.kind)), wrap(torch.tanh)):
        before = swapping.offloaded_bytes
        (grad,) = torch.autograd.grad(wrapped(x).sum(), x)
        assert torch.equal(grad, gradients(lambda y: y.tanh().sum(), x)[0])
        assert swapping.offloaded_bytes > before
        assert [each for _, each in hyper_parallel.wrappers(wrapped)] == [wrapped]
    with pytest.raises(ValueError, match=name):
        wrap(None)
    with pytest.raises(TypeError, match=f"(?s){name}.*7"):
        wrap(7)


# -- on the simulated device: every order, every stream, failures ----------------------------------------------------------


class SimulatedBackend:
    """What the platform gives to moves by hand, for buffers of the simulated device."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def hold(self, buffer: SimulatedBuffer) -> Any:
        return SimulatedHeld(buffer, self.engine)


class SimulatedHeld:
    def __init__(self, buffer: SimulatedBuffer, engine: Any) -> None:
        self.value = buffer
        self.engine = engine
        self.stream = engine.device.current_stream()

    def read_version(self) -> int:
        return self.value.version

    def parts(self) -> Parts:
        return Parts(self.engine, self.value, self.value.num_bytes, self.value.range.start, lambda buffer: buffer)


class Mover:
    """Tensors that the user moves, each with what must be in it; some share a storage."""

    def __init__(self, tensors: list[SwapTensor], value: str, writer: Any, buffer: SimulatedBuffer | None) -> None:
        self.tensors = tensors
        self.value = value
        self.writer = writer  # the stream on which it was written last
        self.buffer = buffer  # what the user still holds of it
        self.used: list[Any] = []  # events after what the user did with it


class HandMadeProgram:
    """Random moves by hand on two compute streams, through the engine's copy streams and two of the user's; beside automatic ones."""

    def __init__(self, seed: int, modules: Any = engine_module, **device_options: Any) -> None:
        self.random = random.Random(seed)
        self.device = SimulatedDevice(seed, num_compute_streams=4, **device_options)
        choose = self.random.choice
        self.modules = modules
        self.tier = SimulatedTier(self.device, choose(("host", "disk")), choose((1 << 30, 1 << 30, 60)))
        limits = modules.Limits(choose((1, 20, 60)), choose((1, 40)), choose(("wait", "keep")))
        self.engine = modules.SwapEngine(self.device, [self.tier], limits)
        self.backend = SimulatedBackend(self.engine)
        *self.computes, self.copy_a, self.copy_b = self.device.compute_streams
        self.movers: list[Mover] = []
        self.automatic: list[tuple[str, Any, Any]] = []  # (value, handle, stream)
        self.groups: list[tuple[Any, Any]] = []  # (group, stream)
        self.read: list[tuple[str, Any]] = []
        self.num_values = self.num_moves = 0

    def run(self, num_actions: int = 40) -> None:
        for _ in range(num_actions):
            self.random.choice(
                (self.new, self.move, self.move, self.move, self.drop, self.automatically, self.temporary)
            )()
        self.finish()

    def finish(self) -> None:
        while self.movers:
            self.forget(self.movers[-1])
        self.automatic.clear()
        self.groups.clear()
        self.engine.join()
        self.device.finish()
        wrong = [(value, got) for value, got in self.read if value != got]
        assert not wrong, f"seed {self.device.seed}: {wrong[0]}"
        assert self.engine.in_flight_bytes == self.tier.used_bytes == 0
        self.device.check_clean()

    def new_buffer(self, stream: Any) -> tuple[SimulatedBuffer, str]:
        self.num_values += 1
        value = f"value {self.num_values}"
        with self.device.computing_on(stream):
            return self.device.create(self.random.choice((1, 2, 3, 5, 8, 16)), value, label=value), value

    def new(self) -> None:
        if len(self.movers) > 4:
            return
        home, writer = self.random.choice(self.computes), self.random.choice(self.computes)
        buffer, value = self.new_buffer(home)
        with self.without_failures():
            if writer is not home:
                writer.wait_event(home.record_event())
                with self.device.computing_on(writer):
                    self.device.kernel(writes=[buffer], fn=lambda: value)
            with self.device.computing_on(home):
                tensors = [SwapTensor(buffer, value) for _ in range(self.random.choice((1, 1, 2)))]
            mover = Mover(tensors, value, writer, buffer if self.random.random() < 0.5 else None)
            mover.used.append(writer.record_event())
        self.movers.append(mover)

    def move(self) -> None:
        """The next move of a tensor, on any stream: a user who uses a tensor on another stream orders the two, and no more."""
        if not self.movers:
            return
        mover = self.random.choice(self.movers)
        stream = self.random.choice(self.computes)
        copies = self.random.choice((None, None, self.copy_a, self.copy_b))
        storage = stored(*mover.tensors)
        state = mover.tensors[0].state
        self.num_moves += 1
        if state is DEVICE:
            if stream is not mover.writer:
                stream.wait_event(mover.writer.record_event())
            with self.device.computing_on(stream):
                storage.launch_offload(copies)
        elif state is D2H:
            if self.random.random() < 0.5:
                self.read_at_home(mover)
            source = weakref.ref(mover.tensors[0].get_val())
            with self.device.computing_on(stream):
                storage.wait_offload()
                was_moved = mover.tensors[0]._held is None
                assert source() is None or mover.buffer is not None or not was_moved, "nobody needs it any more"
                if was_moved and mover.buffer is not None:
                    self.write(stream, mover)
        elif state is H2D:
            with self.device.computing_on(stream):
                storage.wait_load()
                self.check(mover)
            mover.writer = stream
        else:
            with self.device.computing_on(stream):
                storage.launch_load(copies)

    def read_at_home(self, mover: Mover) -> None:
        home = mover.tensors[0]._held.stream
        with self.without_failures():
            home.wait_event(mover.writer.record_event())
            with self.device.computing_on(home):
                self.check(mover)
            mover.used.append(home.record_event())

    def write(self, stream: Any, mover: Mover) -> None:
        """The user writes what he still holds: harmless after `wait_offload`, on the stream that called it."""
        with self.without_failures():
            for event in mover.used:
                stream.wait_event(event)
            self.device.kernel(writes=[mover.buffer], fn=lambda: "something else")
            mover.buffer.stream.wait_event(stream.record_event())  # the memory goes back there
        mover.buffer = None

    def check(self, mover: Mover) -> None:
        for tensor in mover.tensors:
            buffer = tensor.get_val()
            self.device.kernel(reads=[buffer], fn=lambda got: self.read.append((mover.value, got)))

    def drop(self) -> None:
        if self.movers and self.random.random() < 0.5:
            self.forget(self.random.choice(self.movers))

    def forget(self, mover: Mover) -> None:
        with self.without_failures():
            for held in [tensor._held for tensor in mover.tensors]:
                if held is not None and held.stream != mover.writer:
                    held.stream.wait_event(mover.writer.record_event())  # the user's write, before the memory goes back
        self.movers.remove(mover)

    @contextlib.contextmanager
    def without_failures(self) -> Iterator[None]:
        """What the user orders himself does not fail: the races would be his."""
        failures, self.device._failures = self.device._failures, []
        try:
            yield
        finally:
            self.device._failures = failures

    def automatically(self) -> None:
        """Forwards and backwards of the engine's own, and a group's calls on what they saved."""
        if self.groups and self.random.random() < 0.5:
            group, stream = self.random.choice(self.groups)
            call = self.random.choice(("wait_group_offload", "launch_group_load", "wait_group_load"))
            arguments = [self.random.choice((None, self.copy_a))] if call == "launch_group_load" else []
            with self.device.computing_on(self.random.choice(self.computes)):
                getattr(self.engine, call)(group, *arguments)
        elif self.automatic and self.random.random() < 0.6:
            value, handle, home = self.automatic.pop()
            stream = home
            if self.random.random() < 0.3:
                stream = self.random.choice(self.computes)
                stream.wait_event(home.record_event())
            with self.device.computing_on(stream):
                buffer = self.engine.acquire(handle)
                with self.without_failures():
                    self.device.kernel(reads=[buffer], fn=lambda got: self.read.append((value, got)))
                    home.wait_event(stream.record_event())
        else:
            stream = self.random.choice(self.computes)
            group = self.engine.new_group("group")
            self.groups = [*self.groups[-2:], (group, stream)]
            for _ in range(self.random.randint(1, 3)):
                buffer, value = self.new_buffer(stream)
                with self.device.computing_on(stream):
                    slot = self.engine.save(
                        buffer, buffer.num_bytes, group, value, lambda buffer=buffer: buffer.version
                    )
                self.automatic.append((value, self.modules.Handle(slot), stream))
                del buffer, slot

    def temporary(self) -> None:
        for stream in self.computes:
            with self.device.computing_on(stream):
                self.device.create(self.random.choice((1, 2, 3, 5, 8, 16)), "temporary")


def run_simulated(seed: int, modules: Any = engine_module, **options: Any) -> HandMadeProgram:
    program = HandMadeProgram(seed, modules, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(swap_tensor, "_backend_of", lambda value: program.backend)
        program.run()
    return program


def test_random_moves_by_hand_give_right_values_without_races_or_leaks() -> None:
    moves = loaded = 0
    for seed in share(20_000, 1_000):
        program = run_simulated(seed)
        moves += program.num_moves
        loaded += program.device.loaded_bytes
    assert moves > 0
    assert loaded > 0


def test_random_moves_by_hand_on_a_device_that_computes_in_the_calling_thread() -> None:
    for seed in share(2_000, 100):
        run_simulated(seed, compute_in_host=True)


def test_a_load_that_nobody_waits_for_gives_way_when_memory_is_needed_and_comes_again() -> None:
    device = SimulatedDevice(0, capacity_bytes=10)
    engine = engine_module.SwapEngine(device, [SimulatedTier(device)], engine_module.Limits(100, 100))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(swap_tensor, "_backend_of", lambda value: SimulatedBackend(engine))
        by_hand = told(SwapTensor(device.create(6, "by hand"), "by hand"), "async_offload", "wait_offload")
        buffer = device.create(6, "saved")
        handle = engine_module.Handle(engine.save(buffer, 6, engine.new_group("g"), "saved", lambda: 0))
        del buffer
        engine.join()
        by_hand.async_load()
        buffer = engine.acquire(handle)
        assert by_hand.state is H2D
        with pytest.raises(MemoryError):
            by_hand.wait_load()
        del buffer, handle
        by_hand.wait_load()
        device.finish()
        assert device.read(by_hand.get_val()) == "by hand"
        del by_hand
    engine.join()
    device.check_clean()


@pytest.mark.parametrize(("written_on", "offloaded_on"), [("home", "home"), ("home", "other"), ("other", "other")])
def test_who_waits_for_the_load_of_a_value_that_no_tier_had_room_for_comes_after_what_wrote_it(
    written_on: str, offloaded_on: str
) -> None:
    """On another stream, too, as it would have if the value had moved (O1, O6); nobody else orders the two."""
    device = SimulatedDevice(0, num_compute_streams=3)
    engine = engine_module.SwapEngine(device, [SimulatedTier(device, "host", 4)], engine_module.Limits(100, 100))
    home, other, reader = device.compute_streams
    streams = {"home": home, "other": other}
    read: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(swap_tensor, "_backend_of", lambda value: SimulatedBackend(engine))
        with device.computing_on(home):
            buffer = device.create(8, "first")
        if written_on == "other":
            other.wait_event(home.record_event())
        with device.computing_on(streams[written_on]):
            device.kernel(writes=[buffer], fn=lambda: "second")
        with device.computing_on(home):
            by_hand = SwapTensor(buffer, "by hand")
        with device.computing_on(streams[offloaded_on]):
            told(by_hand, "async_offload", "wait_offload")
        assert by_hand.state is HOST
        with device.computing_on(reader):
            told(by_hand, "async_load", "wait_load")
            device.kernel(reads=[by_hand.get_val()], fn=read.append)
        device.finish()
        del by_hand, buffer
    assert read == ["second"]
    assert device.offloaded_bytes == 0, "it was kept"
    assert not device.races
    engine.join()
    device.check_clean()


class InjectedError(Exception):
    pass


def test_an_exception_at_any_device_call_leaks_nothing_and_later_moves_are_right() -> None:
    num_failures = 0
    for seed in range(400):
        program = HandMadeProgram(seed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(swap_tensor, "_backend_of", lambda value, backend=program.backend: backend)
            program.device.fail_call(1 + seed * 7 % 500, InjectedError)
            try:
                program.run()
                continue
            except InjectedError:
                num_failures += 1
            program.device._failures.clear()
            while program.movers:  # one may be stuck half-way
                program.forget(program.movers[-1])
            program.run(20)
    assert num_failures > 100


@pytest.mark.parametrize("bug", BY_HAND, ids=lambda bug: bug.name)
def test_the_moves_by_hand_find(bug: Bug) -> None:
    modules = beside(bug, engine_module.SwapEngine)
    for seed in range(3_000):
        try:
            run_simulated(seed, modules)
        except Exception as error:
            print(f"seed {seed}: {error}")
            return
    raise AssertionError("nothing found: the programs are blind here, or the statement does nothing")
