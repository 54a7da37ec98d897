"""What is chosen for the ops and inputs of a region, when it can be carried out, and what it puts where.

The rules are those of the README ("How a choice is carried out"); `check` raises where one is broken.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias

from hyper_parallel._base.errors import ArgumentError

if TYPE_CHECKING:
    from hyper_parallel.core.planner.model.profile import ProfiledOp, Region


class Choice(str, Enum):
    """What is done with the results of an op, or with an input of a region, between forward and backward.

    A choice is its word: it is equal to it, and files, tables and messages have the word.
    """

    SAVE = "save"  # it stays on the device
    SWAP = "swap"  # it is copied to the host, and back for backward
    RECOMPUTE = "recompute"  # it is let go of, and the op runs again in backward

    # Else it depends on the version of Python whether an f-string has the word or "Choice.SAVE".
    __str__ = str.__str__
    __repr__ = str.__repr__

    def __format__(self, spec: str) -> str:
        return str.__format__(self, spec)


SAVE, SWAP, RECOMPUTE = Choice.SAVE, Choice.SWAP, Choice.RECOMPUTE
_WORDS = {choice.value: choice for choice in Choice}


def choices_of(words: Iterable[Any]) -> tuple[Any, ...]:
    """Turn the words of a file into choices; None stays None.

    A word that is no choice is given back as it is: whoever checks the file knows where it stands, and says so.
    """
    return tuple(_WORDS.get(word, word) if isinstance(word, str) else word for word in words)


def words_of(choices: Iterable[Choice | None]) -> list[str | None]:
    """Turn choices into the words that a file has."""
    return [None if choice is None else str(choice) for choice in choices]


@dataclass(frozen=True)
class RegionDecision:
    """A choice for each op and each input of one region; None: its result is not needed again, so nothing is done.

    A plain region is not wrapped: it has no choices, and all its entries are None.
    """

    is_plain: bool
    ops: tuple[Choice | None, ...]
    inputs: tuple[Choice | None, ...]

    @property
    def swaps(self) -> bool:
        return SWAP in self.ops or SWAP in self.inputs

    @property
    def is_whole(self) -> bool:
        """Say whether the region keeps its inputs and runs again, and no more: the framework's own checkpoint does
        that.
        """
        return not (self.is_plain or self.swaps or SAVE in self.ops)

    @property
    def is_managed(self) -> bool:
        """Say whether a policy is asked about the region's ops."""
        return not (self.is_plain or self.is_whole)


Decision: TypeAlias = tuple[RegionDecision, ...]


@dataclass(frozen=True)
class RegionBytes:
    """What one region under a decision puts on the device, on the link and on the clock: all that a step's cost depends
    on.
    """

    kept_bytes: int  # on the device between its forward and its backward
    swapped_bytes: int
    extra_bytes: int  # saved or swapped, and no residual of the plain step
    recompute_ms: float
    is_managed: bool


def allowed(op: ProfiledOp) -> tuple[Choice, ...]:
    """Give those of an op's choices that do something.

    A view makes no storage: saving it would hold the storage that it is a view of, which nobody counts. So it runs
    again where it can.
    """
    if not op.makes and RECOMPUTE in op.choices:
        return (RECOMPUTE,)
    return op.choices


def plain(region: Region) -> RegionDecision:
    """Decide that the region is not wrapped."""
    return RegionDecision(True, (None,) * len(region.ops), (None,) * len(region.inputs))


def save_all(region: Region) -> RegionDecision:
    """Decide to run the region as one and to save what backward needs, as much as a plain one keeps.

    Where saving is no choice of such an op, the region stays plain.
    """
    if any(op.is_needed and SAVE not in allowed(op) for op in region.ops):
        return plain(region)
    ops = tuple(SAVE if op.is_needed else None for op in region.ops)
    return RegionDecision(False, ops, tuple(SAVE if given.value.is_residual else None for given in region.inputs))


def recompute_all(region: Region) -> RegionDecision:
    """Decide as `checkpoint` does without a policy.

    The inputs are kept, and all that backward needs and that can run again runs again.
    """
    ops: list[Choice | None] = [None] * len(region.ops)
    wanted = {index for index, op in enumerate(region.ops) if op.is_needed}
    for index in reversed(range(len(region.ops))):
        if index not in wanted:
            continue
        choices = allowed(region.ops[index])
        ops[index] = next(choice for choice in (RECOMPUTE, SAVE, SWAP) if choice in choices)
        if ops[index] == RECOMPUTE:
            wanted.update(region.ops[index].reads)
    runs_again = RECOMPUTE in ops
    inputs = tuple(SAVE if runs_again or given.value.is_residual else None for given in region.inputs)
    return RegionDecision(False, tuple(ops), inputs)


def kept_bytes(region: Region, decision: RegionDecision) -> int:
    """Count what is on the device between the region's forward and its backward."""
    return region.residual_bytes if decision.is_plain else _chosen_bytes(region, decision, SAVE)


def swapped_bytes(region: Region, decision: RegionDecision) -> int:
    """Count what is copied to the host in forward, and back for backward."""
    return _chosen_bytes(region, decision, SWAP)


def extra_bytes(region: Region, decision: RegionDecision) -> int:
    """Count what is saved or swapped though plain autograd would not keep it.

    `backward_peak_bytes` does not have it.
    """
    ops = sum(
        op.num_bytes - op.residual_bytes
        for op, choice in zip(region.ops, decision.ops, strict=True)
        if choice in (SAVE, SWAP)
    )
    inputs = sum(
        given.value.num_bytes
        for given, choice in zip(region.inputs, decision.inputs, strict=True)
        if choice in (SAVE, SWAP) and not given.value.is_residual
    )
    return ops + inputs


def recompute_ms(region: Region, decision: RegionDecision) -> float:
    """Add up the time of the ops that run again, without what it costs to run anything again at all."""
    return sum(op.forward_ms for op, choice in zip(region.ops, decision.ops, strict=True) if choice == RECOMPUTE)


def recomputed_bytes(region: Region, decision: RegionDecision) -> int:
    """Count the residuals that are made again."""
    return sum(op.residual_bytes for op, choice in zip(region.ops, decision.ops, strict=True) if choice == RECOMPUTE)


def bytes_of(region: Region, decision: RegionDecision) -> RegionBytes:
    """Count all four at once."""
    return RegionBytes(
        kept_bytes=kept_bytes(region, decision),
        swapped_bytes=swapped_bytes(region, decision),
        extra_bytes=extra_bytes(region, decision),
        recompute_ms=recompute_ms(region, decision),
        is_managed=decision.is_managed,
    )


def check(region: Region, decision: RegionDecision) -> None:
    """Raise where the decision cannot be carried out.

    Raises:
        ArgumentError: a choice that the op or input does not have, a residual that nobody provides, or an op that would
            run again without what it reads.
    """
    if (len(decision.ops), len(decision.inputs)) != (len(region.ops), len(region.inputs)):
        raise ArgumentError(
            "A decision has one entry for each op and each input of its region.",
            expected=f"{len(region.ops)} ops and {len(region.inputs)} inputs",
            got=f"{len(decision.ops)} and {len(decision.inputs)}",
            where=region.path,
        )
    if decision.is_plain:
        _check_plain(region, decision)
        return
    _check_ops(region, decision)
    _check_inputs(region, decision)


def _check_plain(region: Region, decision: RegionDecision) -> None:
    if not region.may_be_plain:
        raise ArgumentError("This region must be managed, and the decision leaves it plain.", where=region.path)
    if any(choice is not None for choice in (*decision.ops, *decision.inputs)):
        raise ArgumentError("A plain region has no choices: nothing of it is wrapped.", where=region.path)


def _check_ops(region: Region, decision: RegionDecision) -> None:
    for index, (op, choice) in enumerate(zip(region.ops, decision.ops, strict=True)):
        where = f"{region.path}, op {index} ({op.name})"
        if choice is None:
            if op.is_needed:
                raise ArgumentError(
                    "Backward needs a result that is neither saved, swapped nor recomputed.", where=where
                )
        elif choice not in allowed(op):
            raise ArgumentError(
                "This op does not have this choice.",
                expected=" or ".join(allowed(op)),
                got=choice,
                where=where,
            )
        elif choice != RECOMPUTE:
            if op.part is not None and decision.ops[region.made_with(index)] == RECOMPUTE:
                raise ArgumentError(
                    "A part would be kept of an op that runs again, and makes it again.",
                    expected=RECOMPUTE,
                    got=choice,
                    where=where,
                )
        else:
            for read in op.reads:
                if decision.ops[read] is None:
                    raise ArgumentError(
                        "An op would run again without what it reads.",
                        expected=f"op {read} ({region.ops[read].name}) saved, swapped or recomputed",
                        got="nothing chosen for it",
                        where=where,
                    )


def _check_inputs(region: Region, decision: RegionDecision) -> None:
    runs_again = RECOMPUTE in decision.ops
    for index, (given, choice) in enumerate(zip(region.inputs, decision.inputs, strict=True)):
        where = f"{region.path}, input {index}"
        if choice is None:
            if runs_again:
                raise ArgumentError("A region that runs again needs all its inputs saved or swapped.", where=where)
            if given.value.is_residual:
                raise ArgumentError("Backward needs an input that is neither saved nor swapped.", where=where)
        elif choice != SAVE and not (choice == SWAP and given.may_swap):
            raise ArgumentError(
                "This input does not have this choice.",
                expected="save or swap" if given.may_swap else "save",
                got=choice,
                where=where,
            )


def _chosen_bytes(region: Region, decision: RegionDecision, wanted: Choice) -> int:
    ops = sum(op.num_bytes for op, choice in zip(region.ops, decision.ops, strict=True) if choice == wanted)
    inputs = sum(
        given.value.num_bytes for given, choice in zip(region.inputs, decision.inputs, strict=True) if choice == wanted
    )
    return ops + inputs
