"""Known traps, as functions from facts to findings.

A check always answers, so that the list of findings has the same names on every machine; where its trap cannot occur it
says so and is ok. `attention` costs speed or bites later; with a `problem` something does not work at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from hyper_parallel.cli.doctor.facts import (
    OLDEST_VERSIONS,
    ONEDNN_CURE,
    ONEDNN_VARIABLE,
    SHARED_MEMORY_PATH,
    Bfloat16,
    Facts,
    Framework,
    release_of,
)
from hyper_parallel.cli.doctor.units import counted, gibibytes
from hyper_parallel.platform import HYPER_PARALLEL_PLATFORM, PlatformType

# Docker gives 64 MiB unless told; communication and data loaders' workers need more.
SMALL_SHARED_BYTES = 2**30

_INSTALL = "Run: pip install 'torch>=2.8' (or 'mindspore>=2.10,<2.11' 'numpy<2')."


class State(Enum):
    OK = "ok"
    ATTENTION = "attention"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """What one check found on one machine. Invariant: `do is None` exactly if `state is State.OK`."""

    name: str
    title: str
    state: State
    what: str
    do: str | None = None


@dataclass(frozen=True)
class Choice:
    """What `get_platform()` would return in a process started here; None if it would raise."""

    platform: PlatformType | None
    why: str


@dataclass(frozen=True)
class _Verdict:
    state: State
    what: str
    do: str | None = None


def _ok(what: str) -> _Verdict:
    return _Verdict(State.OK, what)


def _attention(what: str, do: str) -> _Verdict:
    return _Verdict(State.ATTENTION, what, do)


def _problem(what: str, do: str) -> _Verdict:
    return _Verdict(State.PROBLEM, what, do)


def examine(facts: Facts) -> list[Finding]:
    """Make every check's finding, in the order of `CHECKS`."""
    findings = []
    for name, (title, check) in CHECKS.items():
        verdict = check(facts)
        findings.append(Finding(name, title, verdict.state, verdict.what, verdict.do))
    return findings


def worst(findings: list[Finding]) -> State:
    states = [finding.state for finding in findings]
    return next((state for state in (State.PROBLEM, State.ATTENTION) if state in states), State.OK)


def choose(facts: Facts) -> Choice:
    """Tell from facts which framework the rule of `hyper_parallel.platform.selection` chooses."""
    value = facts.environment.get(HYPER_PARALLEL_PLATFORM, "")
    if value:
        try:
            framework = facts.framework(PlatformType(value.strip().lower()))
        except ValueError:
            return Choice(None, f"{HYPER_PARALLEL_PLATFORM} is {value!r}, which names no framework.")
        obstacle = _obstacle(facts, framework)
        if obstacle is None:
            return Choice(framework.platform, f"{HYPER_PARALLEL_PLATFORM} names it.")
        return Choice(None, f"{HYPER_PARALLEL_PLATFORM} names {framework.platform.display_name}, which {obstacle.why}.")
    passed_over: list[str] = []
    for framework in facts.frameworks:
        obstacle = _obstacle(facts, framework)
        name = framework.platform.display_name
        if obstacle is None:
            reason = "; ".join(passed_over) or f"{name} is tried first"
            return Choice(framework.platform, f"{HYPER_PARALLEL_PLATFORM} is not set, and {reason}.")
        if not obstacle.is_passed_over:
            return Choice(None, f"{name} is tried, and {obstacle.why}.")
        passed_over.append(f"{name} {obstacle.why}")
    return Choice(None, f"{', '.join(passed_over)}.")


@dataclass(frozen=True)
class _Obstacle:
    """Why a framework cannot be chosen, and whether `get_platform()` then goes on to the next or raises."""

    why: str
    is_passed_over: bool


def _obstacle(facts: Facts, framework: Framework) -> _Obstacle | None:
    if not framework.is_installed:
        return _Obstacle("is not installed", is_passed_over=True)
    if not framework.is_importable:
        is_import_error = (framework.error or "").startswith(("ImportError", "ModuleNotFoundError"))
        return _Obstacle(
            "cannot be imported" if is_import_error else "breaks at import", is_passed_over=is_import_error
        )
    if not framework.is_recent_enough:
        return _Obstacle("is too old", is_passed_over=True)
    if framework is facts.mindspore and not framework.is_usable and _has_numpy_2(facts):
        return _Obstacle("does not work with NumPy 2", is_passed_over=False)
    return None


def _any_usable(facts: Facts) -> _Verdict:
    usable = [framework.platform.display_name for framework in (facts.torch, facts.mindspore) if framework.is_usable]
    if usable:
        return _ok(f"{' and '.join(usable)} can be used.")
    if not any(framework.is_installed for framework in facts.frameworks):
        return _problem("Neither PyTorch nor MindSpore is installed.", _INSTALL)
    return _problem("No installed framework can be used.", "See the framework's own line for the reason.")


def _judge(facts: Facts, framework: Framework) -> _Verdict:
    name = framework.platform.display_name
    if not framework.is_installed:
        return _ok("Not installed.")
    if framework.stopped_at is not None:
        return _stopped(facts, framework)
    oldest = ".".join(map(str, OLDEST_VERSIONS[framework.platform]))
    if framework.is_recent_enough:
        return _ok(f"{framework.version} imports and runs ({oldest} or later is needed).")
    what = f"{name} is {framework.version}; {oldest} or later is needed."
    do = f"Run: pip install --upgrade '{framework.platform.value}>={oldest}'"
    other_serves = any(other.is_usable for other in facts.frameworks if other is not framework)
    return _attention(what, do) if other_serves else _problem(what, do)


def _stopped(facts: Facts, framework: Framework) -> _Verdict:
    name = framework.platform.display_name
    what = f"{name} {framework.version or ''}".strip() + f" fails at: {framework.stopped_at}. {framework.error}"
    if framework is facts.mindspore and _has_numpy_2(facts):
        return _problem(what, "First do what the line on NumPy 2 says.")
    again = f"python -m hyper_parallel.platform.{framework.platform.value}.probe"
    return _problem(what, f"See all it says with `{again}`; if it fails at import, reinstall {name}.")


def _torch(facts: Facts) -> _Verdict:
    return _judge(facts, facts.torch)


def _mindspore(facts: Facts) -> _Verdict:
    return _judge(facts, facts.mindspore)


def _platform_variable(facts: Facts) -> _Verdict:
    value = facts.environment.get(HYPER_PARALLEL_PLATFORM, "")
    if not value:
        return _ok("Not set: MindSpore is tried first, then PyTorch.")
    choice = choose(facts)
    if choice.platform is None:
        return _problem(choice.why, f"Set {HYPER_PARALLEL_PLATFORM} to torch or mindspore, as installed, or unset it.")
    return _ok(f"Set to {value!r}.")


def _both_frameworks(facts: Facts) -> _Verdict:
    if not (facts.torch.is_importable and facts.mindspore.is_importable):
        return _ok("At most one framework can be imported.")
    if facts.environment.get(HYPER_PARALLEL_PLATFORM):
        return _ok(f"Both are installed, and {HYPER_PARALLEL_PLATFORM} says which one is meant.")
    return _attention(
        "PyTorch and MindSpore are both installed; get_platform() takes MindSpore first.",
        f"Set {HYPER_PARALLEL_PLATFORM}=torch if you work with PyTorch, =mindspore to say that MindSpore is meant.",
    )


def _torch_without_cuda(facts: Facts) -> _Verdict:
    driver = facts.host.nvidia_driver
    if driver is None:
        return _ok("No NVIDIA driver on this machine.")
    if not facts.torch.is_importable:
        return _ok("PyTorch is not there.")
    if facts.torch.cuda_build or facts.torch.accelerators:
        return _ok(f"PyTorch is built for CUDA {facts.torch.cuda_build}, the driver is {driver}.")
    return _attention(
        f"The NVIDIA driver {driver} is there, but this PyTorch is built for the CPU only.",
        "Install the PyTorch build for CUDA, as its own install page says.",
    )


def _cuda_available(facts: Facts) -> _Verdict:
    driver = facts.host.nvidia_driver
    torch = facts.torch
    if driver is None or not torch.cuda_build:
        return _ok("Not both there.")
    if torch.accelerators:
        return _ok(f"PyTorch sees {counted(len(torch.accelerators), 'accelerator')}.")
    if facts.environment.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1", "NoDevFiles"):
        return _attention("CUDA_VISIBLE_DEVICES hides every GPU from PyTorch.", "Unset CUDA_VISIBLE_DEVICES.")
    reason = f" It says: {torch.accelerator_error}" if torch.accelerator_error else ""
    return _attention(
        f"PyTorch is built for CUDA {torch.cuda_build}, and sees no GPU with the driver {driver}.{reason}",
        "Update the driver, or install a PyTorch built for an older CUDA.",
    )


def _bfloat16(facts: Facts) -> _Verdict:
    cure = f"{ONEDNN_VARIABLE}={ONEDNN_CURE}"
    dies = "A bfloat16 matrix product on this CPU kills PyTorch's process"
    if facts.bfloat16 is Bfloat16.WORKS:
        return _ok("bfloat16 matrix products run on this CPU.")
    if facts.bfloat16 is Bfloat16.CURED:
        return _ok(f"bfloat16 matrix products run because {ONEDNN_VARIABLE} is set; this CPU needs it.")
    if facts.bfloat16 is Bfloat16.NEEDS_CURE:
        return _attention(f"{dies}; with {cure} it runs (tried).", f"Set {cure}.")
    if facts.bfloat16 is Bfloat16.INCURABLE:
        if facts.environment.get(ONEDNN_VARIABLE, ONEDNN_CURE) != ONEDNN_CURE:
            return _problem(
                f"{dies}, with {ONEDNN_VARIABLE}={facts.environment[ONEDNN_VARIABLE]}.",
                f"Set {cure}, then run the doctor again.",
            )
        return _problem(f"{dies}, with {cure} too.", "Use float32 or float16 on this CPU.")
    return _ok("Not tried: PyTorch is not there or does not run.")


def _has_numpy_2(facts: Facts) -> bool:
    numpy = release_of(facts.package("numpy"))
    return numpy is not None and numpy >= (2, 0)


def _numpy_2(facts: Facts) -> _Verdict:
    if not facts.mindspore.is_installed:
        return _ok("MindSpore is not installed; PyTorch works with either.")
    if not _has_numpy_2(facts):
        return _ok(f"NumPy {facts.package('numpy')} suits MindSpore.")
    what = f"MindSpore fails at its first operator with NumPy 2 ({facts.package('numpy')})."
    if facts.mindspore.is_usable:
        return _ok(f"NumPy {facts.package('numpy')}, with which this MindSpore runs.")
    return _problem(what, "Run: pip install 'numpy<2'")


def _mindspore_asynchronous(facts: Facts) -> _Verdict:
    if not facts.mindspore.is_importable:
        return _ok("MindSpore is not there.")
    if facts.mindspore.accelerators:
        return _ok("MindSpore has an accelerator, and runs asynchronously there as it should.")
    return _ok("Its asynchronous mode is many times slower on the CPU; hyper_parallel turns it off there.")


def _cuda_connections(facts: Facts) -> _Verdict:
    value = facts.environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if value != "1":
        return _ok(f"Set to {value}." if value else "Not set.")
    if not any(device.kind == "cuda" for device in facts.torch.accelerators):
        return _ok("Set to 1, without effect: there is no CUDA device.")
    return _attention(
        "CUDA_DEVICE_MAX_CONNECTIONS=1 puts all streams into one queue: copies wait for kernels they do not need.",
        "Unset CUDA_DEVICE_MAX_CONNECTIONS, unless another library of yours asks for it.",
    )


def _omp_threads(facts: Facts) -> _Verdict:
    value = facts.environment.get("OMP_NUM_THREADS", "").strip()
    num_usable = facts.host.num_usable_cores
    if not value:
        return _ok("Not set.")
    # OpenMP takes a list, one entry per nesting level; the first is the one that matters here.
    first = value.split(",")[0].strip()
    if not first.isdigit() or int(first) == 0:
        return _attention(f"OMP_NUM_THREADS is {value!r}, which is not a number.", f"Set OMP_NUM_THREADS={num_usable}.")
    if int(first) > num_usable:
        return _attention(
            f"OMP_NUM_THREADS is {value}, and this process may use {num_usable} cores: threads take turns.",
            f"Set OMP_NUM_THREADS={num_usable}.",
        )
    return _ok(f"Set to {value}, of {num_usable} usable cores.")


def _memory_limit(facts: Facts) -> _Verdict:
    memory = facts.memory
    if memory.limit_bytes is None or memory.total_bytes is None:
        return _ok("No limit below the machine's memory.")
    return _attention(
        f"This process may use {gibibytes(memory.limit_bytes)} of the machine's {gibibytes(memory.total_bytes)}; "
        "beyond it the system ends the process.",
        "Plan host memory by the limit, or start the container with more (docker run --memory=…).",
    )


def _shared_memory(facts: Facts) -> _Verdict:
    shared_bytes = facts.memory.shared_bytes
    if shared_bytes is None:
        return _ok(f"This system has no {SHARED_MEMORY_PATH}.")
    if shared_bytes >= SMALL_SHARED_BYTES:
        return _ok(f"{SHARED_MEMORY_PATH} has {gibibytes(shared_bytes)}.")
    return _attention(
        f"{SHARED_MEMORY_PATH} has only {gibibytes(shared_bytes)}; processes that share data fail with bus errors.",
        "Start the container with more (docker run --shm-size=8g, or --ipc=host).",
    )


CHECKS: dict[str, tuple[str, Callable[[Facts], _Verdict]]] = {
    "usable-framework": ("A usable framework", _any_usable),
    "torch": ("PyTorch", _torch),
    "mindspore": ("MindSpore", _mindspore),
    "platform-variable": (HYPER_PARALLEL_PLATFORM, _platform_variable),
    "both-frameworks": ("Two frameworks", _both_frameworks),
    "numpy-2": ("NumPy 2 and MindSpore", _numpy_2),
    "mindspore-asynchronous": ("MindSpore on the CPU", _mindspore_asynchronous),
    "bfloat16": ("bfloat16 on the CPU", _bfloat16),
    "torch-without-cuda": ("PyTorch built for CUDA", _torch_without_cuda),
    "cuda-available": ("CUDA driver and PyTorch", _cuda_available),
    "cuda-connections": ("CUDA_DEVICE_MAX_CONNECTIONS", _cuda_connections),
    "omp-threads": ("OMP_NUM_THREADS", _omp_threads),
    "memory-limit": ("Memory limit", _memory_limit),
    "shared-memory": ("Shared memory", _shared_memory),
}
