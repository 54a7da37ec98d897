"""The table of the platform operations for a person."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hyper_parallel.cli.doctor.outcomes import Cell, CellState, Column, Outcomes
from hyper_parallel.cli.doctor.units import counted
from hyper_parallel.platform.contract import OPERATIONS, Section

_STYLES = {
    CellState.TESTED: "green",
    CellState.COMES_WITH: "dim",
    CellState.ERROR: "bold red",
    CellState.NOT_TESTED: "yellow",
}


def show_outcomes(console: Console, outcomes: Outcomes) -> None:
    console.print(Text(f"The {len(OPERATIONS)} platform operations", style="bold"))
    if not outcomes.columns:
        console.print(Text("No test run left its outcomes in this copy of hyper-parallel: nothing is shown as tested."))
    notes = _Notes()
    console.print()
    console.print(_table(outcomes.columns, notes))
    if notes.lines:
        console.print()
        for line in notes.lines:
            console.print(Text(line))
    for column in outcomes.columns:
        console.print()
        console.print(Text(_summary(column)))
        console.print(Text(_caption(column), style="dim"))


class _Notes:
    """Texts that are too long for a cell: each is written once, below the table, under a number."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers) + 1)

    @property
    def lines(self) -> list[str]:
        return [f"({number}) {text}" for text, number in self._numbers.items()]


def _table(columns: tuple[Column, ...], notes: _Notes) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column.title, overflow="fold")
    for section in Section:
        table.add_row(Text(section.value, style="bold cyan"))
        for operation in OPERATIONS:
            if operation.section is section:
                cells = [_cell(column.cell(operation.name), notes) for column in columns]
                table.add_row(Text(f"  {operation.name}"), *cells)
    return table


def _cell(cell: Cell, notes: _Notes) -> Text:
    if cell.state is CellState.TESTED:
        text = f"tested ({cell.num_tests})" if cell.num_tests else "tested"
    elif cell.state is CellState.COMES_WITH:
        text = f"later ({notes.number(f'comes with {cell.text}')})"
    elif cell.state is CellState.ERROR:
        text = f"error ({notes.number(cell.text)})"
    else:
        text = cell.state.value
    return Text(text, style=_STYLES[cell.state])


def _summary(column: Column) -> str:
    counts = [
        f"{column.num(CellState.TESTED)} tested",
        f"{column.num(CellState.COMES_WITH)} come later",
        counted(column.num(CellState.ERROR), "error"),
        f"{column.num(CellState.NOT_TESTED)} not tested",
    ]
    return f"{column.title}: {', '.join(counts)}."


def _caption(column: Column) -> str:
    return f"Run on {column.date} with {column.framework} on Python {column.python}, device {column.device}."
