"""Each known trap, on machines that have it and on machines that have not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyper_parallel.cli.doctor.checks import CHECKS, Finding, State, choose, examine, worst
from hyper_parallel.cli.doctor.facts import Bfloat16, Facts, Framework, Package, release_of
from hyper_parallel.platform import PlatformType


def finding(name: str, facts: Facts) -> Finding:
    return next(one for one in examine(facts) if one.name == name)


def with_environment(facts: Facts, **variables: str) -> Facts:
    return replace(facts, environment=variables)


def stopped(framework: Framework, stage: str, error: str) -> Framework:
    return replace(framework, is_installed=True, stopped_at=stage, error=error)


def test_a_machine_without_traps_is_ok_in_every_check(machine, machine_with_gpu):
    for facts in (machine, machine_with_gpu):
        findings = examine(facts)
        assert [one.name for one in findings] == list(CHECKS)
        assert {one.state for one in findings} == {State.OK}
        assert all(one.do is None for one in findings)
        assert worst(findings) is State.OK


def test_whatever_is_not_ok_says_what_to_do(machine_with_both, machine_with_gpu):
    bad = with_environment(machine_with_both, HYPER_PARALLEL_PLATFORM="jax", OMP_NUM_THREADS="400")
    no_gpu = replace(machine_with_gpu, torch=replace(machine_with_gpu.torch, accelerators=()))
    found = [one for facts in (bad, no_gpu) for one in examine(facts) if one.state is not State.OK]
    assert len(found) == 3
    assert all(one.do for one in found)


def test_the_worst_state_counts(machine_with_both):
    assert worst(examine(machine_with_both)) is State.ATTENTION
    assert worst(examine(with_environment(machine_with_both, HYPER_PARALLEL_PLATFORM="jax"))) is State.PROBLEM


def test_no_framework_at_all_is_a_problem(machine):
    facts = replace(machine, torch=Framework(PlatformType.PYTORCH))
    found = finding("usable-framework", facts)
    assert found.state is State.PROBLEM
    assert "pip install 'torch>=2.8'" in found.do
    assert finding("torch", facts).state is State.OK, "a framework that is not installed is no trap by itself"


def test_frameworks_that_are_installed_and_unusable_are_a_problem(machine):
    facts = replace(machine, torch=stopped(machine.torch, "import", "ImportError: libfoo.so: cannot open"))
    assert finding("usable-framework", facts).state is State.PROBLEM
    found = finding("torch", facts)
    assert found.state is State.PROBLEM
    assert "import" in found.what
    assert "libfoo.so" in found.what


def test_a_crash_in_one_framework_is_a_problem_even_if_the_other_works(machine_with_both):
    error = "the process was killed by SIGILL"
    facts = replace(machine_with_both, mindspore=stopped(machine_with_both.mindspore, "first operator", error))
    assert finding("usable-framework", facts).state is State.OK
    found = finding("mindspore", facts)
    assert found.state is State.PROBLEM
    assert "first operator" in found.what
    assert "SIGILL" in found.what


@pytest.mark.parametrize(
    ("version", "state"), [("2.7.1", State.PROBLEM), ("2.8.0", State.OK), ("2.13.0a0+git", State.OK)]
)
def test_pytorch_before_2_8_is_too_old(machine, version, state):
    facts = replace(machine, torch=replace(machine.torch, version=version))
    assert finding("torch", facts).state is state
    assert finding("usable-framework", facts).state is state


def test_an_old_pytorch_beside_a_good_mindspore_needs_attention_only(machine_with_both):
    facts = replace(machine_with_both, torch=replace(machine_with_both.torch, version="2.4.0"))
    assert finding("torch", facts).state is State.ATTENTION
    assert worst(examine(facts)) is State.ATTENTION


def test_an_old_mindspore_is_found_too(machine_with_both):
    facts = replace(machine_with_both, mindspore=replace(machine_with_both.mindspore, version="2.6.0"))
    assert finding("mindspore", facts).state is State.ATTENTION


@pytest.mark.parametrize("value", ["jax", "cuda", " "])
def test_a_variable_that_names_no_framework_is_a_problem(machine, value):
    found = finding("platform-variable", with_environment(machine, HYPER_PARALLEL_PLATFORM=value))
    assert found.state is State.PROBLEM
    assert repr(value) in found.what


@pytest.mark.parametrize("value", ["torch", " Torch ", "TORCH", ""])
def test_a_variable_that_names_an_installed_framework_is_ok(machine, value):
    assert finding("platform-variable", with_environment(machine, HYPER_PARALLEL_PLATFORM=value)).state is State.OK


def test_a_variable_that_names_a_missing_framework_is_a_problem(machine):
    found = finding("platform-variable", with_environment(machine, HYPER_PARALLEL_PLATFORM="mindspore"))
    assert found.state is State.PROBLEM
    assert "not installed" in found.what


def test_two_frameworks_need_attention_until_the_variable_says_which(machine, machine_with_both):
    found = finding("both-frameworks", machine_with_both)
    assert found.state is State.ATTENTION
    assert "MindSpore" in found.what
    decided = with_environment(machine_with_both, HYPER_PARALLEL_PLATFORM="torch")
    assert finding("both-frameworks", decided).state is State.OK
    assert finding("both-frameworks", machine).state is State.OK


def test_numpy_2_with_a_mindspore_that_fails_is_a_problem(machine_with_both):
    error = "SystemError: <built-in method pyboost_add_ext> returned a result with an exception set"
    facts = replace(
        machine_with_both,
        mindspore=stopped(machine_with_both.mindspore, "first operator", error),
        packages=(Package("numpy", "2.4.6", "arrays"),),
    )
    found = finding("numpy-2", facts)
    assert found.state is State.PROBLEM
    assert "pip install 'numpy<2'" in found.do
    assert "NumPy 2" in finding("mindspore", facts).do


def test_numpy_2_is_ok_without_mindspore_or_with_one_that_runs(machine, machine_with_both):
    assert finding("numpy-2", machine).state is State.OK
    assert finding("numpy-2", machine_with_both).state is State.OK
    later = replace(machine_with_both, packages=(Package("numpy", "2.4.6", "arrays"),))
    assert finding("numpy-2", later).state is State.OK


def test_mindspore_on_the_cpu_is_said_to_run_without_its_asynchronous_mode(
    machine, machine_with_both, machine_with_gpu
):
    assert "hyper_parallel turns it off" in finding("mindspore-asynchronous", machine_with_both).what
    accelerators = machine_with_gpu.torch.accelerators
    ascend = replace(machine_with_both, mindspore=replace(machine_with_both.mindspore, accelerators=accelerators))
    assert "turns it off" not in finding("mindspore-asynchronous", ascend).what
    assert "turns it off" not in finding("mindspore-asynchronous", machine).what


@pytest.mark.parametrize(
    ("bfloat16", "state"),
    [
        (Bfloat16.WORKS, State.OK),
        (Bfloat16.CURED, State.OK),
        (Bfloat16.UNKNOWN, State.OK),
        (Bfloat16.NEEDS_CURE, State.ATTENTION),
        (Bfloat16.INCURABLE, State.PROBLEM),
    ],
)
def test_a_cpu_on_which_bfloat16_kills_the_process_is_found(machine, bfloat16, state):
    found = finding("bfloat16", replace(machine, bfloat16=bfloat16))
    assert found.state is state
    if state is State.ATTENTION:
        assert "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16" in found.do


def test_a_wrong_value_of_the_bfloat16_variable_is_to_be_replaced_by_the_right_one(machine):
    facts = with_environment(replace(machine, bfloat16=Bfloat16.INCURABLE), ONEDNN_MAX_CPU_ISA="ALL")
    assert "AVX512_CORE_FP16" in finding("bfloat16", facts).do


def test_a_cpu_build_of_pytorch_beside_an_nvidia_driver_needs_attention(machine, machine_with_gpu):
    facts = replace(machine, host=machine_with_gpu.host)
    assert finding("torch-without-cuda", facts).state is State.ATTENTION
    assert finding("torch-without-cuda", machine).state is State.OK
    assert finding("torch-without-cuda", machine_with_gpu).state is State.OK
    without_torch = replace(facts, torch=Framework(PlatformType.PYTORCH))
    assert finding("torch-without-cuda", without_torch).state is State.OK


def test_a_driver_that_pytorch_cannot_use_needs_attention_and_its_reason_is_repeated(machine, machine_with_gpu):
    reason = "CUDA initialization: The NVIDIA driver on your system is too old"
    torch = replace(machine_with_gpu.torch, accelerators=(), links=(), accelerator_error=reason)
    found = finding("cuda-available", replace(machine_with_gpu, torch=torch))
    assert found.state is State.ATTENTION
    assert reason in found.what
    assert finding("cuda-available", machine_with_gpu).state is State.OK
    assert finding("cuda-available", machine).state is State.OK


@pytest.mark.parametrize("value", ["", "-1"])
def test_hidden_gpus_are_not_blamed_on_the_driver(machine_with_gpu, value):
    facts = replace(machine_with_gpu, torch=replace(machine_with_gpu.torch, accelerators=(), links=()))
    found = finding("cuda-available", with_environment(facts, CUDA_VISIBLE_DEVICES=value))
    assert found.state is State.ATTENTION
    assert "CUDA_VISIBLE_DEVICES" in found.do


def test_one_cuda_connection_needs_attention_where_there_is_a_cuda_device(machine, machine_with_gpu):
    one = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert finding("cuda-connections", with_environment(machine_with_gpu, **one)).state is State.ATTENTION
    assert finding("cuda-connections", with_environment(machine, **one)).state is State.OK
    more = with_environment(machine_with_gpu, CUDA_DEVICE_MAX_CONNECTIONS="32")
    assert finding("cuda-connections", more).state is State.OK


@pytest.mark.parametrize(
    ("value", "state"),
    [
        ("16", State.OK),
        ("1", State.OK),
        ("17", State.ATTENTION),
        ("17,2", State.ATTENTION),
        ("4,2", State.OK),
        ("0", State.ATTENTION),
        ("many", State.ATTENTION),
    ],
)
def test_more_openmp_threads_than_usable_cores_need_attention(machine, value, state):
    found = finding("omp-threads", with_environment(machine, OMP_NUM_THREADS=value))
    assert found.state is state
    if state is State.ATTENTION:
        assert "OMP_NUM_THREADS=16" in found.do


def test_cores_that_this_process_may_not_use_do_not_count(machine):
    facts = with_environment(replace(machine, host=replace(machine.host, num_usable_cores=2)), OMP_NUM_THREADS="4")
    assert finding("omp-threads", facts).state is State.ATTENTION


def test_a_memory_limit_below_the_machines_memory_needs_attention(machine):
    found = finding("memory-limit", replace(machine, memory=replace(machine.memory, limit_bytes=8 * 2**30)))
    assert found.state is State.ATTENTION
    assert "8.0 GiB" in found.what
    assert "64.0 GiB" in found.what
    assert finding("memory-limit", machine).state is State.OK


@pytest.mark.parametrize(("size", "state"), [(64 * 2**20, State.ATTENTION), (2**30, State.OK), (None, State.OK)])
def test_a_small_shared_memory_needs_attention(machine, size, state):
    found = finding("shared-memory", replace(machine, memory=replace(machine.memory, shared_bytes=size)))
    assert found.state is state


def test_the_choice_follows_the_variable_then_mindspore_then_pytorch(machine, machine_with_both):
    assert choose(machine).platform is PlatformType.PYTORCH
    assert choose(machine_with_both).platform is PlatformType.MINDSPORE
    named = choose(with_environment(machine_with_both, HYPER_PARALLEL_PLATFORM="Torch"))
    assert named.platform is PlatformType.PYTORCH
    assert "HYPER_PARALLEL_PLATFORM" in named.why


def test_the_choice_passes_over_a_framework_that_is_too_old_or_whose_import_fails(machine_with_both):
    old = replace(machine_with_both, mindspore=replace(machine_with_both.mindspore, version="2.2.0"))
    assert choose(old).platform is PlatformType.PYTORCH
    broken = stopped(machine_with_both.mindspore, "import", "ImportError: libfoo.so")
    assert choose(replace(machine_with_both, mindspore=broken)).platform is PlatformType.PYTORCH


def test_the_choice_fails_at_a_framework_that_dies_on_import(machine_with_both):
    broken = stopped(machine_with_both.mindspore, "import", "the process was killed by SIGSEGV")
    choice = choose(replace(machine_with_both, mindspore=broken))
    assert choice.platform is None
    assert "MindSpore" in choice.why


def test_the_choice_fails_at_a_mindspore_with_the_wrong_numpy(machine_with_both):
    broken = stopped(machine_with_both.mindspore, "first operator", "SystemError: …")
    facts = replace(machine_with_both, mindspore=broken, packages=(Package("numpy", "2.4.6", "arrays"),))
    choice = choose(facts)
    assert choice.platform is None
    assert "NumPy 2" in choice.why
    assert choose(with_environment(facts, HYPER_PARALLEL_PLATFORM="torch")).platform is PlatformType.PYTORCH


def test_the_choice_says_why_there_is_none(machine):
    none = choose(replace(machine, torch=Framework(PlatformType.PYTORCH)))
    assert none.platform is None
    assert none.why == "MindSpore is not installed, PyTorch is not installed."
    old = replace(machine, torch=replace(machine.torch, version="1.13.1"))
    assert "too old" in choose(with_environment(old, HYPER_PARALLEL_PLATFORM="torch")).why


@pytest.mark.parametrize(
    ("text", "release"),
    [("2.13.0+cpu", (2, 13)), ("2.8", (2, 8)), ("2", None), ("", None), (None, None), ("two.one", None)],
)
def test_a_version_is_read_from_its_first_two_numbers(text, release):
    assert release_of(text) == release
