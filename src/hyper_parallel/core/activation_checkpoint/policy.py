"""What a policy may answer."""

from __future__ import annotations

from enum import Enum

from hyper_parallel._base.errors import ArgumentTypeError, describe


class CheckpointPolicy(Enum):
    """What happens to a value that backward needs. `MUST_…` is never changed by a plan, `PREFER_…` may be."""

    MUST_SAVE = 0
    PREFER_SAVE = 1
    MUST_RECOMPUTE = 2
    PREFER_RECOMPUTE = 3
    MUST_SWAP = 4

    keeps: bool  # whether the value need not be computed again
    swaps: bool

    def __init__(self, number: int) -> None:
        self.keeps = number in (0, 1, 4)
        self.swaps = number == 4


class ByOutput:
    """A plan's answer about an op with many results: every result has a policy of its own.

    The key is the result's place among those the op made; one that is not named is not kept. No user's policy answers
    this.
    """

    keeps = True
    name = "BY_OUTPUT"

    def __init__(self, policies: dict[int, CheckpointPolicy]) -> None:
        self._policies = policies

    def of_output(self, place: int) -> CheckpointPolicy:
        return self._policies.get(place, CheckpointPolicy.PREFER_RECOMPUTE)


# PyTorch's own enum is recognised by the names of its members: this file knows no framework. It says "offload" for
# swap.
_BY_NAME = {
    **{member.name: member for member in CheckpointPolicy},
    "MUST_CPU_OFFLOAD": CheckpointPolicy.MUST_SWAP,
    "PREFER_CPU_OFFLOAD": CheckpointPolicy.MUST_SWAP,
}


def as_policy(answer: object) -> CheckpointPolicy:
    """Return the policy that a policy function's answer stands for."""
    if isinstance(answer, CheckpointPolicy):
        return answer
    if isinstance(answer, bool):
        return CheckpointPolicy.MUST_SAVE if answer else CheckpointPolicy.PREFER_RECOMPUTE
    if isinstance(answer, Enum) and type(answer).__name__ == "CheckpointPolicy" and answer.name in _BY_NAME:
        return _BY_NAME[answer.name]
    raise ArgumentTypeError(
        "A policy gave an answer that means nothing.",
        expected="a CheckpointPolicy, True or False",
        got=describe(answer),
        do="Return CheckpointPolicy.MUST_SAVE, MUST_RECOMPUTE or MUST_SWAP (or True to save, False for the default).",
    )


def keeps_tensor(answer: object) -> bool:
    """Read the answer of a policy about tensors: `MUST_SAVE`, `PREFER_SAVE` and True keep, all else swaps."""
    return as_policy(answer) in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
