"""What decides while Python runs cannot be part of a compiled graph: the refusal, in words."""

from __future__ import annotations

import mindspore

from hyper_parallel._base.errors import StateError

_SAVED = "what is saved for backward is decided while Python runs"


def refusal(what: str, reason: str = _SAVED) -> StateError:
    return StateError(
        f"{what} cannot be part of a graph: {reason}.",
        expected="PyNative mode",
        got="GRAPH_MODE, or mindspore.jit around the call",
        do="Call mindspore.set_context(mode=mindspore.PYNATIVE_MODE), or compile the model without this.",
    )


def refuse_graph_mode(what: str, reason: str = _SAVED) -> None:
    if mindspore.get_context("mode") != mindspore.PYNATIVE_MODE:
        raise refusal(what, reason)
