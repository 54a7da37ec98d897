"""What a policy is asked about an op."""

from __future__ import annotations


class PolicyContext:
    """What a policy is told about an op beside its arguments.

    Attributes:
        is_recompute: False in forward, True when the function runs again.
        module: path of the innermost module that runs, from the outermost one; "" outside of modules.
        occurrence: how often this op ran before in this module in this call of the region.
        call: how many calls of this module came before the one that runs, in this call of the region. Calls in which no op ran but those of
            modules inside it do not count.
        occurrence_in_call: how often this op ran before in this call of the module.
        op_output: its result. When the function runs again there may be no memory behind it, only shape and dtype.
    """

    __slots__ = ("call", "is_recompute", "module", "occurrence", "occurrence_in_call", "op_output")

    def __init__(
        self,
        is_recompute: bool,
        module: str,
        occurrence: int,
        op_output: object,
        call: int = 0,
        occurrence_in_call: int = 0,
    ) -> None:
        self.is_recompute = is_recompute
        self.module = module
        self.occurrence = occurrence
        self.op_output = op_output
        self.call = call
        self.occurrence_in_call = occurrence_in_call

    def __repr__(self) -> str:
        when = "recompute" if self.is_recompute else "forward"
        return f"<{when}, module {self.module!r}, call {self.call}, occurrence {self.occurrence}>"
