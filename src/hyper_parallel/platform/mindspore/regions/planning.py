"""What a recomputation must run, take and leave out."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.regions.rerun_plan import plan_replay
from hyper_parallel.platform.mindspore.regions.recording import Node, Record, RecordedOp, Saves


class _Entry:
    """An op, or the moment before it, as `plan_replay` sees them."""

    __slots__ = ("makes", "must_run", "reads")

    def __init__(self, op: RecordedOp, makes: list[Any]) -> None:
        self.reads = [node for node in (*op.reads, *op.depends_on) if node is not None]
        self.makes = makes
        self.must_run = op.must_run


class ReplayEntries:
    """The plan for one set of wanted values.

    Where autograd is above the dispatch mode, it saves the arguments of an op, or copies of them, whether the op runs or not: what it saves
    after an op needs what the op reads and not the op. So each op has two entries there.

    Fields:
        runs: ops to run, by index
        takes: results that are taken from where they are kept
    """

    def __init__(self, record: Record, wanted: dict[Any, int], stops: bool) -> None:
        """`wanted`: values, and the op after which autograd saved each; `stops`: whether the recomputation ends after the last of those."""
        self.wanted = set(wanted)
        if record.runs_everything:
            kept = {node for op in record.ops for node in op.nodes if node.kept is not None}
            self.runs = frozenset(
                op.index for op in record.ops if op.must_run or (op.nodes and not kept.issuperset(op.nodes))
            )
            self.takes = frozenset(kept)
            return
        entries: list[_Entry] = []
        indices: list[int] = []
        ops = record.ops[: max(wanted.values(), default=-1) + 1] if stops else record.ops
        for op in ops:
            saves = Saves(op.index)
            if op.is_primitive:
                entries.append(_Entry(op, [*op.nodes, saves]))
                indices.append(op.index)
            else:
                entries += (_Entry(op, [saves]), _Entry(op, list(op.nodes)))
                indices += (-1, op.index)
        values = {value if isinstance(value, Node) else value[0] for value in wanted}
        plan = plan_replay(entries, values, _is_available)
        self.runs = frozenset(indices[entry] for entry in plan.runs if indices[entry] >= 0)
        self.takes = frozenset(value for value in plan.takes if isinstance(value, Node) and value.kept is not None)


def _is_available(value: object) -> bool:
    return isinstance(value, Node) and (value.op < 0 or value.kept is not None)
