"""What a policy is asked about an op."""

from __future__ import annotations

from typing import Any

from hyper_parallel._base.errors import ArgumentError, describe
from hyper_parallel.core.activation_checkpoint.policy import ByOutput, as_policy


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
        op_output: Any,
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


def asked(policy: Any, context: PolicyContext, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the policy says about an op, as a CheckpointPolicy; a plan's may also say it for each result."""
    # Not as a TypeError: PyTorch's binary operators take one for "the other operand may know", and forget it.
    try:
        answer = policy(context, op, *args, **kwargs)
    except TypeError as error:
        raise ArgumentError(
            "A policy raised an error.",
            got=f"{type(error).__name__}: {error}",
            where=f"{context.module or 'region'}, {op}",
            do="A policy is called as policy_fn(ctx, op, *args, **kwargs).",
        ) from error
    if isinstance(answer, ByOutput):
        return answer
    try:
        return as_policy(answer)
    except TypeError:
        raise ArgumentError(
            "A policy gave an answer that means nothing.",
            expected="a CheckpointPolicy, True or False",
            got=describe(answer),
            where=f"{context.module or 'region'}, {op}",
            do="Return CheckpointPolicy.MUST_SAVE, MUST_RECOMPUTE or MUST_SWAP (or True to save, False for the default).",
        ) from None
