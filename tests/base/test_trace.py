"""The event trace: ordered, bounded, free while nobody records."""

from __future__ import annotations

import contextlib
import threading

from hyper_parallel._base import trace


def test_nothing_is_kept_while_nobody_records() -> None:
    assert not trace.is_recording()
    trace.emit("swap.offload", bytes=1)
    with trace.recording() as record:
        assert trace.is_recording()
    trace.emit("swap.offload", bytes=2)
    assert record.events() == []


def test_events_come_in_order_with_kind_fields_and_thread() -> None:
    with trace.recording() as record:
        trace.emit("swap.offload", bytes=1)
        trace.emit("swap.load", bytes=2)
        trace.emit("platform.bind")
    events = record.events()
    assert [event.kind for event in events] == ["swap.offload", "swap.load", "platform.bind"]
    assert [event.number for event in events] == [0, 1, 2]
    assert events[0].fields == {"bytes": 1}
    assert events[0].thread == threading.get_ident()
    assert events[0].time_ns <= events[1].time_ns
    assert [event.kind for event in record.events("swap.")] == ["swap.offload", "swap.load"]
    assert [event.kind for event in record.events("swap.load")] == ["swap.load"]


def test_a_full_ring_keeps_the_newest_and_counts_the_lost() -> None:
    with trace.recording(capacity=3) as record:
        for number in range(10):
            trace.emit("step", n=number)
    assert [event.fields["n"] for event in record.events()] == [7, 8, 9]
    assert record.num_lost == 7


def test_recordings_nest_and_an_exception_closes_them() -> None:
    with trace.recording() as outer:
        with contextlib.suppress(KeyError), trace.recording() as inner:
            trace.emit("a")
            raise KeyError
        trace.emit("b")
    assert [event.kind for event in outer.events()] == ["a", "b"]
    assert [event.kind for event in inner.events()] == ["a"]
    assert not trace.is_recording()


def test_events_of_ten_threads_all_arrive_in_each_threads_order() -> None:
    def work(name: int) -> None:
        for step in range(200):
            trace.emit("step", thread=name, step=step)

    with trace.recording() as record:
        threads = [threading.Thread(target=work, args=(name,)) for name in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    events = record.events()
    assert [event.number for event in events] == list(range(2000))
    for name in range(10):
        assert [event.fields["step"] for event in events if event.fields["thread"] == name] == list(range(200))
