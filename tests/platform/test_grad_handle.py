"""The gradient reduction in flight: one text, every framework."""

from __future__ import annotations

from typing import Any

import pytest

from hyper_parallel.platform import Platform
from support.backends import Backend

pytestmark = pytest.mark.covers("set_grad_reduce_handle", "wait_grad_handle", "_process_current_handle")


class Handle:
    def __init__(self, seen: list[str], name: str, platform: Any) -> None:
        self.seen, self.name, self.platform, self.stream = seen, name, platform, None

    def wait(self) -> None:
        self.seen.append(f"wait {self.name}")
        self.stream = self.platform.get_current_stream()


def test_nothing_is_pending_at_first_and_waiting_does_nothing(platform: Any) -> None:
    assert Platform.current_grad_handle is Platform.post_grad_handle_process is Platform.grad_sync_stream is None
    platform.wait_grad_handle()
    type(platform)._process_current_handle()
    assert Platform.grad_sync_stream is None


def test_setting_the_first_handle_only_keeps_it(platform: Any) -> None:
    seen: list[str] = []
    handle = Handle(seen, "a", platform)
    platform.set_grad_reduce_handle(handle, lambda: seen.append("post a"))
    assert Platform.current_grad_handle is handle
    assert seen == []
    platform.wait_grad_handle()
    assert seen == ["wait a", "post a"]
    assert Platform.current_grad_handle is Platform.post_grad_handle_process is None
    platform.wait_grad_handle()
    assert seen == ["wait a", "post a"]


def test_the_next_handle_drains_the_pending_one_first_on_the_gradient_stream(backend: Backend, platform: Any) -> None:
    seen: list[str] = []
    first, second = Handle(seen, "a", platform), Handle(seen, "b", platform)
    platform.set_grad_reduce_handle(first, lambda: seen.append("post a"))
    platform.set_grad_reduce_handle(handle=second, post_process=None)
    assert seen == ["wait a", "post a"]
    assert Platform.current_grad_handle is second
    assert first.stream == Platform.grad_sync_stream != platform.get_current_stream()
    platform.wait_grad_handle()
    assert seen == ["wait a", "post a", "wait b"]
    assert second.stream == first.stream


@pytest.mark.parametrize("drain", ["set", "wait", "process"])
@pytest.mark.parametrize("culprit", ["wait", "post_process"])
def test_an_exception_reaches_the_caller_and_leaves_nothing_pending(platform: Any, drain: str, culprit: str) -> None:
    def fail() -> None:
        raise KeyError("mine")

    handle = Handle([], "a", platform)
    if culprit == "wait":
        handle.wait = fail  # type: ignore[method-assign]
    before = platform.get_current_stream()
    platform.set_grad_reduce_handle(handle, fail)
    drains = {
        "set": lambda: platform.set_grad_reduce_handle(Handle([], "b", platform)),
        "wait": platform.wait_grad_handle,
        "process": platform._process_current_handle,
    }
    with pytest.raises(KeyError, match="mine"):
        drains[drain]()
    assert Platform.current_grad_handle is Platform.post_grad_handle_process is None
    assert platform.get_current_stream() == before
    platform.wait_grad_handle()


def test_something_that_is_no_handle_is_refused(platform: Any) -> None:
    with pytest.raises(TypeError, match="wait"):
        platform.set_grad_reduce_handle("a handle")
    with pytest.raises(ValueError, match="None"):
        platform.set_grad_reduce_handle(None, lambda: None)
    with pytest.raises(TypeError, match="callable"):
        platform.set_grad_reduce_handle(Handle([], "a", platform), post_process=3)
    assert Platform.current_grad_handle is None


def test_none_drains_the_pending_reduction_and_keeps_nothing(platform: Any) -> None:
    seen: list[str] = []
    platform.set_grad_reduce_handle(Handle(seen, "a", platform), lambda: seen.append("post a"))
    platform.set_grad_reduce_handle(None)
    assert seen == ["wait a", "post a"]
    assert Platform.current_grad_handle is Platform.post_grad_handle_process is None


def test_the_gradient_stream_is_made_by_the_new_stream_of_a_users_subclass(platform: Any) -> None:
    made = []

    class Mine(type(platform)):  # type: ignore[misc]
        def new_stream(self) -> Any:
            made.append(super().new_stream())
            return made[-1]

    mine = Mine()
    mine.set_grad_reduce_handle(Handle([], "a", mine))
    mine.wait_grad_handle()
    assert Platform.grad_sync_stream is made[0]
    Platform.grad_sync_stream = None
    mine.set_grad_reduce_handle(Handle([], "b", mine))
    Mine._process_current_handle()  # on the class, too
    assert Platform.grad_sync_stream is made[1]
    assert len(made) == 2
