"""The doctor's page, rendered from made-up facts."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from hyper_parallel.cli.doctor.checks import Finding, State, choose, examine
from hyper_parallel.cli.doctor.document import document_of
from hyper_parallel.cli.doctor.facts import Bfloat16, Facts
from hyper_parallel.cli.doctor.show import show_doctor


def page_of(facts: Facts, width: int = 80, **options: object) -> str:
    output = io.StringIO()
    console = Console(file=output, width=width, highlight=False, **options)
    show_doctor(console, facts, choose(facts), examine(facts))
    return output.getvalue()


def words_of(text: str) -> str:
    return re.sub(r"\s+", " ", text)


@pytest.fixture
def machine_with_every_trap(machine_with_both, machine_with_gpu) -> Facts:
    host = replace(machine_with_gpu.host, num_usable_cores=2)
    memory = replace(machine_with_both.memory, limit_bytes=8 * 2**30, shared_bytes=64 * 2**20)
    mindspore = replace(
        machine_with_both.mindspore, stopped_at="first operator", error="the process was killed by SIGILL"
    )
    environment = {
        "OMP_NUM_THREADS": "64",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "HYPER_PARALLEL_PLATFORM": "jax",
    }
    return replace(
        machine_with_gpu,
        host=host,
        memory=memory,
        mindspore=mindspore,
        bfloat16=Bfloat16.NEEDS_CURE,
        packages=machine_with_both.packages,
        environment=environment,
    )


@pytest.mark.parametrize("width", [80, 120])
def test_no_line_is_wider_than_the_terminal_and_no_advice_is_cut(machine_with_every_trap, width):
    page = page_of(machine_with_every_trap, width)
    assert max(map(len, page.splitlines())) <= width
    assert "…" not in page.replace("--memory=…", "")
    findings = [one for one in examine(machine_with_every_trap) if one.do]
    assert len(findings) >= 6
    for one in findings:
        assert words_of(one.do) in words_of(page)
        assert words_of(one.what) in words_of(page)


def test_brackets_in_advice_are_kept(machine):
    output = io.StringIO()
    finding = Finding("name", "title", State.PROBLEM, "what", "pip install '.[torch]'")
    show_doctor(Console(file=output, width=80), machine, choose(machine), [finding])
    assert "pip install '.[torch]'" in words_of(output.getvalue())


def test_problems_come_before_attention_and_both_before_what_is_ok(machine_with_every_trap):
    states = re.findall(r"^  (problem|attention|ok) ", page_of(machine_with_every_trap), re.MULTILINE)
    assert states == sorted(states, key=["problem", "attention", "ok"].index)
    assert set(states) == {"problem", "attention", "ok"}


def test_the_page_names_versions_choice_devices_and_links(machine_with_gpu):
    page = words_of(page_of(machine_with_gpu))
    assert "2.13.0+cu130" in page
    assert "get_platform() chooses PyTorch" in page
    assert "Some GPU, 80.0 GiB, 79.0 GiB free, compute capability 9.0" in page
    assert "host to device 55.1 GB/s, device to host 54.9 GB/s, each way when both run 48.0 GB/s" in page
    assert "gloo, nccl" in page
    assert "mpi" not in page


def test_what_is_missing_is_said(machine):
    page = words_of(page_of(machine))
    assert "MindSpore not installed" in page
    assert "scipy not installed" in page
    assert "None that an installed framework can use." in page


def test_a_device_that_cannot_be_measured_is_still_listed(machine_with_gpu):
    torch = replace(machine_with_gpu.torch, links=(), link_error="OutOfMemoryError: CUDA out of memory")
    page = words_of(page_of(replace(machine_with_gpu, torch=torch)))
    assert "Some GPU" in page
    assert "OutOfMemoryError" in page


def test_the_last_line_counts_the_findings(machine, machine_with_every_trap):
    num = len(examine(machine))
    assert page_of(machine).rstrip().endswith(f"{num} checks: {num} ok.")
    assert re.search(
        r"checks: 2 problems, \d+ for your attention, \d+ ok\.$", page_of(machine_with_every_trap).rstrip()
    )


def test_a_pipe_gets_no_escape_codes_and_a_terminal_does(machine):
    assert "\x1b" not in page_of(machine)
    assert "\x1b[32m" in page_of(machine, force_terminal=True, color_system="standard")


def test_a_page_without_colour_is_possible_on_a_terminal(machine, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[32m" not in page_of(machine, force_terminal=True, color_system="standard")


def test_the_documents_result_is_the_worst_state(machine, machine_with_both, machine_with_every_trap):
    results = [
        document_of(facts, choose(facts), examine(facts))["result"]
        for facts in (machine, machine_with_both, machine_with_every_trap)
    ]
    assert results == ["ok", "attention", "problem"]
