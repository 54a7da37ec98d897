"""Streams, events, contexts, devices and random state: one text, every framework."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from hyper_parallel._base.errors import UnsupportedDeviceError
from support.backends import Backend
from support.outcomes import refuses

covers = pytest.mark.covers


@covers("new_stream", "get_current_stream", "get_stream_context")
def test_operations_go_to_the_stream_of_the_block(backend: Backend, platform: Any) -> None:
    use, default, stream = platform.get_stream_context(), platform.get_current_stream(), platform.new_stream()
    with use(stream):
        assert platform.get_current_stream() == stream
        with use(default):
            assert platform.get_current_stream() == default
        assert platform.get_current_stream() == stream
    assert platform.get_current_stream() == default
    with pytest.raises(KeyError), use(stream):
        raise KeyError
    assert platform.get_current_stream() == default


@covers("new_stream", "get_current_stream", "get_stream_context")
def test_two_new_streams_are_not_the_same(platform: Any) -> None:
    assert platform.new_stream() != platform.new_stream()


@covers("get_current_stream", "get_stream_context")
def test_the_current_stream_belongs_to_the_thread(platform: Any) -> None:
    seen = []
    default = platform.get_current_stream()
    with platform.get_stream_context()(platform.new_stream()):
        thread = threading.Thread(target=lambda: seen.append(platform.get_current_stream()))
        thread.start()
        thread.join(20)
    assert seen == [default]


@covers("new_stream", "new_event", "get_stream_context")
def test_a_stream_that_waits_for_an_event_sees_what_was_recorded_before(backend: Backend, platform: Any) -> None:
    producer, consumer, use = platform.new_stream(), platform.new_stream(), platform.get_stream_context()
    x = backend.tensor(np.full((64, 64), 0.5))
    producer.wait_stream(platform.get_current_stream())
    with use(producer):
        y = x
        for _ in range(50):
            y = y @ x / 32.0
        done = producer.record_event()
    consumer.wait_event(done)
    with use(consumer):
        z = y + 1
        finished = platform.new_event()
        finished.record(consumer)
    finished.wait(platform.get_current_stream())
    finished.synchronize()
    assert finished.query()
    assert done.query()
    assert np.allclose(backend.numbers(z), 1.5)


@covers("new_event")
def test_an_event_that_was_never_recorded_holds_nobody_up(platform: Any) -> None:
    event = platform.new_event()
    event.wait()
    platform.get_current_stream().wait_event(event)
    assert event.query()


@covers("no_grad")
def test_nothing_is_tracked_without_grad(backend: Backend, platform: Any) -> None:
    def partly(x: Any) -> Any:
        with platform.no_grad():
            constant = x * 3
        return x * 2 + constant

    (grad,) = backend.grad_of(partly, backend.tensor([1.0, 2.0]))
    assert grad.tolist() == [2.0, 2.0]


@covers("profiler_record")
def test_a_profiler_range_is_a_context_and_a_decorator(backend: Backend, platform: Any) -> None:
    @platform.profiler_record("decorated range")
    def double(x: Any) -> Any:
        return x * 2

    with platform.profiler_record("range in a block"):
        assert backend.numbers(double(backend.tensor([1.0]))).tolist() == [2.0]
    assert backend.numbers(double(backend.tensor([2.0]))).tolist() == [4.0]
    with pytest.raises(KeyError), platform.profiler_record("range that raises"):
        raise KeyError
    if backend.name.startswith("torch"):
        import torch

        activities = [torch.profiler.ProfilerActivity.CPU]
        with (
            torch.profiler.profile(activities=activities, acc_events=True) as profile,
            platform.profiler_record("range in a block"),
        ):
            double(backend.tensor([1.0]))
        names = {event.key for event in profile.key_averages()}
        assert {"range in a block", "decorated range"} <= names


@covers("get_symmetric_memory_handler")
def test_symmetric_memory_is_there_on_cuda_and_refused_elsewhere(backend: Backend, platform: Any) -> None:
    if backend.name == "torch-cuda":
        assert hasattr(platform.get_symmetric_memory_handler(), "rendezvous")
    else:
        with refuses(backend, "get_symmetric_memory_handler", UnsupportedDeviceError) as caught:
            platform.get_symmetric_memory_handler()
        assert "cpu" in str(caught.value)


def test_the_device_is_named_and_usable(backend: Backend, platform: Any) -> None:
    kind = backend.name.split("-")[1]
    assert platform.device_type() == kind
    assert kind in str(platform.device()).lower()
    assert tuple(platform.zeros((2,), device=platform.device()).shape) == (2,)
    handle = platform.get_device_handle()
    handle.synchronize()
    assert handle.device_count() >= 1
    with handle.stream(handle.Stream()):
        assert handle.current_stream() is not None


def test_a_random_state_brings_the_same_numbers_back(backend: Backend, platform: Any) -> None:
    platform.manual_seed(7)
    backend.rand((3,))
    state = platform.get_rng_state()
    first = [backend.numbers(backend.rand((5,))), backend.numbers(backend.dropout(backend.tensor(np.ones(64)), 0.5))]
    assert not np.array_equal(first[0], backend.numbers(backend.rand((5,)))), "the generator moves on"
    platform.set_rng_state(state)
    again = [backend.numbers(backend.rand((5,))), backend.numbers(backend.dropout(backend.tensor(np.ones(64)), 0.5))]
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


def test_the_same_seed_gives_the_same_numbers(backend: Backend, platform: Any) -> None:
    platform.manual_seed(11)
    first = backend.numbers(backend.rand((5,)))
    platform.manual_seed(11)
    assert np.array_equal(backend.numbers(backend.rand((5,))), first)


@pytest.mark.parametrize("wrong", [None, 3, {}, {"x": 1}])
def test_something_else_than_a_random_state_is_refused(platform: Any, wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="(?s)xpected.*got"):
        platform.set_rng_state(wrong)
