"""The doctor's findings as one JSON document, for other programs.

    {
      "schema": 1,                        grows when a key changes its meaning or goes away; new keys may come without
      "result": "ok" | "attention" | "problem",                              the worst state of all findings
      "package_version": str,
      "host": {"python", "python_path", "system", "cpu", "num_cores", "num_usable_cores", "nvidia_driver"},
      "memory": {"total_bytes", "available_bytes", "limit_bytes", "locked_limit_bytes", "shared_bytes",
                 "temp_path", "temp_free_bytes"},
      "frameworks": {"torch": F, "mindspore": F},
      "platform": {"chosen": "torch" | "mindspore" | null, "why": str},      what get_platform() would do
      "bfloat16": str,                    a value of `facts.Bfloat16`
      "packages": {name: version | null},
      "environment": {variable: value},   those that are set
      "findings": [{"name", "title", "state", "what", "do"}]                 `do` is null when there is nothing to do
    }

    F: {"is_installed", "version", "is_importable", "is_usable", "stopped_at", "error", "cuda_build", "device_target",
        "accelerators": [{"kind", "index", "name", "memory_total_bytes", "memory_free_bytes", "capability"}],
        "accelerator_error", "backends": {name: bool},
        "links": [{"kind", "index", "host_to_device_bytes_per_s", "device_to_host_bytes_per_s",
                   "both_each_way_bytes_per_s"}], "link_error"}

What is not known is null. A limit that is null does not limit.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hyper_parallel.cli.doctor.checks import Choice, Finding, worst
from hyper_parallel.cli.doctor.facts import Facts, Framework

SCHEMA = 1


def document_of(facts: Facts, choice: Choice, findings: list[Finding]) -> dict[str, Any]:
    """Make the document described above, of values that `json` writes as they are."""
    return {
        "schema": SCHEMA,
        "result": worst(findings).value,
        "package_version": facts.package_version,
        "host": asdict(facts.host),
        "memory": asdict(facts.memory),
        "frameworks": {framework.platform.value: _framework(framework) for framework in (facts.torch, facts.mindspore)},
        "platform": {"chosen": choice.platform.value if choice.platform else None, "why": choice.why},
        "bfloat16": facts.bfloat16.value,
        "packages": {package.name: package.version for package in facts.packages},
        "environment": dict(facts.environment),
        "findings": [{**asdict(finding), "state": finding.state.value} for finding in findings],
    }


def _framework(framework: Framework) -> dict[str, Any]:
    values = asdict(framework)
    del values["platform"]
    return {**values, "is_importable": framework.is_importable, "is_usable": framework.is_usable}
