"""What a rank does in a pipeline, one entry of its list at a time.

    2F1                    forward of microbatch 1 at stage 2
    2B1                    backward of it, whole
    2I1, 2W1               the same in two: gradients of the input, gradients of the weights
    (0F3;7B1)OVERLAP_F_B   a pair: a forward and a backward at the same time
    2SEND_F1, 3RECV_F1     the result of a forward, from stage 2 to stage 3
    2SEND_B1, 1RECV_B1     its gradient, from stage 2 to stage 1
    0UNSHARD, 0RESHARD     gather the parameters of stage 0, let go of them
    0REDUCE_GRAD           reduce stage 0's gradients over the ranks that hold the same stage

These are the texts of `torch.distributed.pipelining`, too. A send and a receive each name the stage where they stand.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import NamedTuple

from hyper_parallel._base.errors import ArgumentError, describe

__all__ = ["Action", "Kind", "partner"]


class Kind(str, Enum):
    """What an action does; the value is how it is written."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_GRAD = "I"
    WEIGHT_GRAD = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE = "REDUCE_GRAD"
    OVERLAP = "OVERLAP_F_B"

    # speed: Enum's own hash is a function in Python; checks and simulations hash a kind for each action.
    __hash__ = str.__hash__


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRAD, Kind.WEIGHT_GRAD, Kind.OVERLAP})
SENDS = frozenset({Kind.SEND_F, Kind.SEND_B})
RECEIVES = frozenset({Kind.RECV_F, Kind.RECV_B})
TRANSFERS = SENDS | RECEIVES
OF_A_STAGE = frozenset({Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE})  # of all microbatches: they name none

_WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT_GRAD: "input gradient",
    Kind.WEIGHT_GRAD: "weight gradient",
    Kind.SEND_F: "sending the result",
    Kind.RECV_F: "receiving the input",
    Kind.SEND_B: "sending the gradient",
    Kind.RECV_B: "receiving the gradient",
    Kind.UNSHARD: "unsharding",
    Kind.RESHARD: "resharding",
    Kind.REDUCE: "reducing the gradients",
}


class Action(NamedTuple):
    """One entry of a rank's list. Immutable, compared by value.

    Attributes:
        stage: at which stage of the model. A pair has none of its own: -1.
        kind: what is done.
        microbatch: for which one; None where it is for all of the stage.
        parts: of a pair, its forward and its backward; else empty.

    Example:
        >>> Action.parse("2F1")
        Action(stage=2, kind=<Kind.FORWARD: 'F'>, microbatch=1, parts=())
        >>> str(Action.pair(Action(0, Kind.FORWARD, 3), Action(7, Kind.BACKWARD, 1)))
        '(0F3;7B1)OVERLAP_F_B'
    """

    stage: int
    kind: Kind
    microbatch: int | None = None
    parts: tuple[Action, ...] = ()

    @staticmethod
    def pair(forward: Action, backward: Action) -> Action:
        """A forward and a backward that run at the same time, through a coordinator. Neither may need the other."""
        return Action(-1, Kind.OVERLAP, None, (forward, backward))

    @staticmethod
    def parse(text: str) -> Action:
        """Read what `str` of an action writes.

        Raises:
            ValueError: it is no action.
        """
        stripped = text.strip()
        if pair := _PAIR.fullmatch(stripped):
            return Action.pair(_parse_single(pair[1], text), _parse_single(pair[2], text))
        return _parse_single(stripped, text)

    @property
    def is_compute(self) -> bool:
        """Whether a stage computes in it, alone or in a pair."""
        return self.kind in COMPUTE

    @property
    def words(self) -> str:
        """What it does, for a sentence."""
        if self.parts:
            return " beside ".join(part.words for part in self.parts)
        of = "" if self.microbatch is None else f" of microbatch {self.microbatch}"
        return f"{_WORDS.get(self.kind, self.kind.value)}{of} at stage {self.stage}"

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind.value}"
        return f"{self.stage}{self.kind.value}{'' if self.microbatch is None else self.microbatch}"


_PARTNERS = {
    Kind.SEND_F: (Kind.RECV_F, 1), Kind.RECV_F: (Kind.SEND_F, -1),
    Kind.SEND_B: (Kind.RECV_B, -1), Kind.RECV_B: (Kind.SEND_B, 1),
}  # fmt: skip


def partner(transfer: Action) -> Action:
    """The other end of a transfer: the receive of a send, the send of a receive."""
    kind, step = _PARTNERS[transfer.kind]
    return Action(transfer.stage + step, kind, transfer.microbatch)


# Numbers of at most six digits: a file that names stage 10 ** 20 is no schedule.
_SINGLE = re.compile(
    rf"([0-9]{{1,6}})({'|'.join(kind.value for kind in Kind if kind is not Kind.OVERLAP)})([0-9]{{0,6}})"
)
_PAIR = re.compile(r"\(([^();]+);([^();]+)\)OVERLAP_F_B")


def _parse_single(text: str, whole: str) -> Action:
    match = _SINGLE.fullmatch(text.strip())
    if match is None or (Kind(match[2]) in OF_A_STAGE) != (match[3] == ""):
        raise ArgumentError(
            "This is no action of a pipeline.",
            expected="such as 2F0, 0SEND_F1, 3UNSHARD or (0F1;1B0)OVERLAP_F_B",
            got=describe(whole),
        )
    return Action(int(match[1]), Kind(match[2]), int(match[3]) if match[3] else None)
