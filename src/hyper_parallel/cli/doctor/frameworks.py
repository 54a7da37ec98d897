"""Both frameworks, each asked in a process of its own: one that crashes is a finding, not the end of the doctor."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from dataclasses import fields
from typing import Any

from hyper_parallel.cli.doctor.facts import ONEDNN_CURE, ONEDNN_VARIABLE, Accelerator, Bfloat16, Framework, Link
from hyper_parallel.cli.doctor.processes import Answer, Run, module_command, run_all
from hyper_parallel.platform import PlatformType

_PROBES = {
    PlatformType.PYTORCH: "hyper_parallel.platform.torch.probe",
    PlatformType.MINDSPORE: "hyper_parallel.platform.mindspore.probe",
}
_AS_IS, _OTHERWISE = "bfloat16 as is", "bfloat16 otherwise"


def ask_frameworks() -> tuple[Framework, Framework, Bfloat16]:
    """Ask PyTorch and MindSpore what they are, and PyTorch whether bfloat16 works on this CPU."""
    installed = {platform: is_installed(platform.value) for platform in PlatformType}
    runs = [
        Run(platform.value, module_command(_PROBES[platform]), {}) for platform in PlatformType if installed[platform]
    ]
    is_set = bool(os.environ.get(ONEDNN_VARIABLE))
    if installed[PlatformType.PYTORCH]:
        runs.append(_bfloat16_run(_AS_IS, {}))
        if is_set:
            runs.append(_bfloat16_run(_OTHERWISE, {ONEDNN_VARIABLE: None}))
    answers = run_all(runs)
    if _AS_IS in answers and answers[_AS_IS].died and not is_set:
        answers |= run_all([_bfloat16_run(_OTHERWISE, {ONEDNN_VARIABLE: ONEDNN_CURE})])
    torch, mindspore = (
        framework_of(platform, installed[platform], answers.get(platform.value))
        for platform in (PlatformType.PYTORCH, PlatformType.MINDSPORE)
    )
    return torch, mindspore, judge_bfloat16(is_set, answers.get(_AS_IS), answers.get(_OTHERWISE))


def is_installed(package: str) -> bool:
    """Say whether `import` would find a package; a mere folder of that name on the path does not count."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def framework_of(platform: PlatformType, is_installed: bool, answer: Answer | None) -> Framework:
    """Describe a framework by its probe's answer, whatever is left of it."""
    if not is_installed or answer is None:
        return Framework(platform)
    report = answer.last_object or {}
    reason = answer.reason()
    return Framework(
        platform,
        is_installed=True,
        version=report.get("version") or version_of(platform.value),
        stopped_at=None if reason is None else str(report.get("stage", "import")),
        error=reason,
        cuda_build=report.get("cuda_build"),
        device_target=report.get("device_target"),
        accelerators=tuple(_fill(Accelerator, row) for row in report.get("accelerators", ())),
        accelerator_error=report.get("accelerator_error"),
        backends=report.get("backends", {}),
        links=tuple(_fill(Link, row) for row in report.get("links", ())),
        link_error=report.get("link_error"),
    )


def judge_bfloat16(is_set: bool, as_is: Answer | None, otherwise: Answer | None) -> Bfloat16:
    """Judge by two runs whether bfloat16 works.

    `as_is` ran with our environment; `otherwise` without the variable if it `is_set`, else with the cure.
    """
    if as_is is None or not (as_is.died or _multiplied(as_is)):
        return Bfloat16.UNKNOWN
    if _multiplied(as_is):
        return Bfloat16.CURED if is_set and otherwise is not None and otherwise.died else Bfloat16.WORKS
    if is_set or otherwise is None or not _multiplied(otherwise):
        return Bfloat16.INCURABLE
    return Bfloat16.NEEDS_CURE


def _multiplied(answer: Answer) -> bool:
    return answer.is_good and answer.last_object is not None and bool(answer.last_object.get("is_right"))


def _bfloat16_run(name: str, variables: dict[str, str | None]) -> Run:
    return Run(name, module_command(_PROBES[PlatformType.PYTORCH], "--bfloat16"), variables)


def _fill(cls: Any, row: dict[str, Any]) -> Any:
    return cls(**{field.name: row.get(field.name) for field in fields(cls)})
