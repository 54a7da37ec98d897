"""Tensors of an accelerator over gloo: what is sent goes through the host, and everything has the bits that it has on the CPU."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

from support import processes
from support.communicating import Here, backend_of

covers = pytest.mark.covers


def compare(device: str) -> dict[str, str]:
    from support.accelerator_over_gloo import found_on

    return found_on(backend_of("torch").platform, device)


@covers("isend", "irecv", "p2p_exchange", "send_object_list", "recv_object_list", "all_gather_object", "barrier")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_call_between_two_ranks_gives_the_bits_of_the_cpu(device: str) -> None:
    torch = pytest.importorskip("torch")
    from support.accelerator_over_gloo import CALLS

    names = [call.__name__ for call in CALLS]
    if device == "cpu":
        assert processes.pool("torch", 2).run(compare, device) == [dict.fromkeys(names, "equal")] * 2
        return
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    program = "from support import accelerator_over_gloo; accelerator_over_gloo.main()"
    output = processes.run_program(
        [sys.executable, "-c", program, device], deadline_s=300, CUDA_VISIBLE_DEVICES=visible
    )
    outcomes = [line for line in output.splitlines() if line.startswith("rank ")]
    assert sorted(outcomes) == sorted(f"rank {rank}, {name}: equal" for rank in range(2) for name in names), output


# The order of things, with a device that notes what it is asked


class NotedDevice:
    """Stands for `torch.cuda`: one stream, of tensors that are on the CPU."""

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes

    def current_stream(self, device: Any) -> NotedDevice:
        return self

    def record_event(self) -> str:
        self._notes.append("record")
        return "event"

    def wait_event(self, event: str) -> None:
        self._notes.append(f"wait for {event}")

    def synchronize(self) -> None:
        self._notes.append("synchronize")


def send_through_the_host(framework: str) -> Any:
    from unittest import mock

    import torch

    from hyper_parallel.platform.torch.communication import staging, transport

    here = Here(backend_of(framework), "world")
    platform, notes = here.platform, list[str]()
    original = staging.dist.isend, staging.dist.irecv

    def noted(name: str, call: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> Any:
            notes.append(name)
            return call(*args, **kwargs)

        return launch

    with (
        mock.patch.object(transport, "_is_staged", return_value=True),
        mock.patch.object(torch, "get_device_module", return_value=NotedDevice(notes)),
        mock.patch.object(staging.dist, "isend", noted("isend", original[0])),
        mock.patch.object(staging.dist, "irecv", noted("irecv", original[1])),
    ):
        target = torch.zeros(3)
        receiving = platform.irecv(target, here.peer)
        sent = torch.full((3,), float(here.rank + 1))
        sending = platform.isend(sent, here.peer)
        sent.zero_()  # the host has the values already
        version = target._version
        sending.wait()
        before = target.tolist(), list(notes)
        receiving.wait()
        receiving.wait()
        after = target.tolist(), notes[len(before[1]) :], target._version - version
        strided = torch.zeros(2, 2).T
        handles = [platform.isend(torch.arange(4.0).reshape(2, 2), here.peer), platform.irecv(strided, here.peer)]
        for handle in handles:
            handle.wait()
        x = torch.tensor([here.rank + 1.0], requires_grad=True)
        (platform.p2p_exchange(x, here.peer) * (here.rank + 1)).sum().backward()
    return before, after, strided.tolist(), x.grad.tolist()


@covers("isend", "irecv", "p2p_exchange")
def test_what_is_sent_is_copied_first_and_what_arrives_is_copied_by_the_stream_that_waits() -> None:
    found = processes.pool("torch", 2).run(send_through_the_host, "torch")
    for rank, (before, after, strided, gradient) in enumerate(found):
        assert before == ([0.0] * 3, ["record", "irecv", "synchronize", "isend"]), "nothing has arrived without a wait"
        assert after == ([2.0 - rank] * 3, ["wait for event"], 1), "copied once"
        assert strided == [[0.0, 1.0], [2.0, 3.0]]
        assert gradient == [2.0 - rank]
