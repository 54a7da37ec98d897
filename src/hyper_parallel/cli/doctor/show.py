"""The doctor's page for a person: facts in short tables, then the findings with what to do, then one line of result."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hyper_parallel.cli.doctor.checks import Choice, Finding, State, worst
from hyper_parallel.cli.doctor.facts import SHARED_MEMORY_PATH, Facts, Framework
from hyper_parallel.cli.doctor.units import counted, gibibytes, gigabytes_per_s

STYLES = {State.OK: "green", State.ATTENTION: "yellow", State.PROBLEM: "bold red"}

# Texts are `Text`, never markup: `pip install '.[torch]'` would lose its brackets.


def show_doctor(console: Console, facts: Facts, choice: Choice, findings: list[Finding]) -> None:
    console.print(Text(f"hyper-parallel {facts.package_version}", style="bold"))
    _section(console, "This machine", _pairs(_machine(facts)))
    _section(console, "Frameworks", _frameworks(facts), _chosen(choice))
    _section(console, "Accelerators", _accelerators(facts))
    _section(console, "Packages", _pairs(_packages(facts)))
    if facts.environment:
        _section(console, "Environment", _pairs((name, repr(value)) for name, value in facts.environment.items()))
    _section(console, "Checks", _findings(findings))
    console.print()
    console.print(_result(findings))


def _section(console: Console, title: str, *parts: RenderableType) -> None:
    console.print()
    console.print(Text(title, style="bold cyan"))
    for part in parts:
        console.print(Padding(part, (0, 0, 0, 2), expand=False))


def _pairs(rows: Iterable[tuple[str, str | Text]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(Text(name, style="dim"), value if isinstance(value, Text) else Text(value))
    return table


def _machine(facts: Facts) -> Iterable[tuple[str, str]]:
    host, memory = facts.host, facts.memory
    yield "Python", f"{host.python} ({host.python_path})"
    yield "System", host.system
    usable = "all usable" if host.num_usable_cores == host.num_cores else f"{host.num_usable_cores} usable here"
    yield "CPU", f"{host.cpu}, {counted(host.num_cores, 'core')}, {usable}"
    if host.nvidia_driver:
        yield "NVIDIA driver", host.nvidia_driver
    limit = f", limited to {gibibytes(memory.limit_bytes)} for this process" if memory.limit_bytes is not None else ""
    yield "Memory", f"{gibibytes(memory.total_bytes)}, {gibibytes(memory.available_bytes)} available{limit}"
    locked = "unlimited" if memory.locked_limit_bytes is None else gibibytes(memory.locked_limit_bytes)
    yield "Locked memory", f"{locked} (limit of this process)"
    yield SHARED_MEMORY_PATH, "none" if memory.shared_bytes is None else gibibytes(memory.shared_bytes)
    yield "Temporary files", f"{gibibytes(memory.temp_free_bytes)} free in {memory.temp_path}"


def _frameworks(facts: Facts) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for title in ("", "Version", "Imports", "Usable", "Communication"):
        table.add_column(title, overflow="fold")
    for framework in (facts.torch, facts.mindspore):
        table.add_row(Text(framework.platform.display_name), *_framework(framework))
    return table


def _framework(framework: Framework) -> list[Text]:
    if not framework.is_installed:
        return [Text("not installed", style="dim"), Text("-"), Text("-"), Text("-")]
    backends = [name for name, is_there in framework.backends.items() if is_there]
    return [
        Text(framework.version or "unknown"),
        _yes_or_no(framework.is_importable),
        _yes_or_no(framework.is_usable),
        Text(", ".join(backends) or "-"),
    ]


def _yes_or_no(value: bool) -> Text:
    return Text("yes", style=STYLES[State.OK]) if value else Text("no", style=STYLES[State.PROBLEM])


def _chosen(choice: Choice) -> Text:
    if choice.platform is None:
        return Text.assemble("get_platform() fails: ", choice.why)
    return Text.assemble("get_platform() chooses ", (choice.platform.display_name, "bold"), f": {choice.why}")


def _accelerators(facts: Facts) -> RenderableType:
    rows: list[tuple[str, str]] = []
    for framework in (facts.torch, facts.mindspore):
        name = framework.platform.display_name
        links = {(link.kind, link.index): link for link in framework.links}
        for device in framework.accelerators:
            where = f"{name} {device.kind}:{device.index}"
            capability = f", compute capability {device.capability}" if device.capability else ""
            memory = f"{gibibytes(device.memory_total_bytes)}, {gibibytes(device.memory_free_bytes)} free"
            rows.append((where, f"{device.name}, {memory}{capability}"))
            link = links.get((device.kind, device.index))
            if link is not None:
                rows.append(
                    (
                        "",
                        f"host to device {gigabytes_per_s(link.host_to_device_bytes_per_s)}, "
                        f"device to host {gigabytes_per_s(link.device_to_host_bytes_per_s)}, "
                        f"each way when both run {gigabytes_per_s(link.both_each_way_bytes_per_s)} "
                        "(pinned, 256 MiB, median)",
                    )
                )
        if framework.link_error:
            rows.append((name, f"The link could not be measured: {framework.link_error}"))
        if framework.accelerator_error:
            rows.append((name, framework.accelerator_error))
    return _pairs(rows) if rows else Text("None that an installed framework can use.")


def _packages(facts: Facts) -> Iterable[tuple[str, Text]]:
    for package in facts.packages:
        version = package.version or "not installed"
        yield package.name, Text.assemble(f"{version:<14}", (package.purpose, "dim"))


def _findings(findings: list[Finding]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for state in (State.PROBLEM, State.ATTENTION, State.OK):
        for finding in findings:
            if finding.state is state:
                table.add_row(Text(state.value, style=STYLES[state]), _finding(finding))
    return table


def _finding(finding: Finding) -> Text:
    if finding.do is None:
        return Text.assemble(f"{finding.title}: ", (finding.what, "dim"))
    return Text.assemble((finding.title, "bold"), f"\n{finding.what}\n", ("To do: ", "bold"), finding.do)


def _result(findings: list[Finding]) -> Text:
    num = {state: sum(finding.state is state for finding in findings) for state in State}
    counts = {
        State.PROBLEM: counted(num[State.PROBLEM], "problem"),
        State.ATTENTION: f"{num[State.ATTENTION]} for your attention",
        State.OK: f"{num[State.OK]} ok",
    }
    text = ", ".join(count for state, count in counts.items() if num[state])
    return Text(f"{len(findings)} checks: {text}.", style=STYLES[worst(findings)])
