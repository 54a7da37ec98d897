"""Where a model does not do what it did when it was planned."""

from __future__ import annotations

from collections import Counter

from hyper_parallel._base.errors import StateError


class MismatchError(StateError):
    """A model does something else than it did when it was planned."""


class Mismatches:
    """What was met that the plan does not know, or knows otherwise; counted for `plan.stats()`."""

    def __init__(self, on_mismatch: str) -> None:
        self.raises = on_mismatch == "error"
        self.counts: Counter[str] = Counter()
        self.is_in_another_mode = False  # planned in eval mode, and trained in train mode

    def note(self, what: str, *, expected: str, got: str, where: str, may_raise: bool = True) -> None:
        """Count what was met, and raise where the user has asked for that."""
        self.counts[what] += 1
        if self.raises and may_raise:
            raise MismatchError(
                "The model does not do what it did when it was planned.",
                expected=expected,
                got=got,
                where=where,
                do="The plan was made in eval mode: switch the model to train mode, and plan again."
                if self.is_in_another_mode
                else 'Plan again with a batch like this one, or apply with on_mismatch="recompute".',
            )
