"""Ctrl-C at a chosen place of the swap engine; no framework is needed."""

from __future__ import annotations

import dis
import functools
import sys
from pathlib import Path
from typing import Any

import hyper_parallel

_ENGINE = f"{Path(hyper_parallel.__file__).parent}/core/swap/"
_BELOW = ("/threading.py", "/queue.py", "/contextlib.py", "/heapq.py", "/weakref.py", "/_weakrefset.py")


class CtrlC:
    """Within: Ctrl-C comes at the n-th place at which Python looks for it, in the swap engine and in what it uses of Python's own modules.

    Finer than `support.interrupts`, and slower: where a function begins, after each call (of a class, too), and at each jump backward.
    `places` has what was met.
    """

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self.places: list[tuple[str, int, str]] = []
        self._last: dict[Any, int] = {}  # frame -> its last instruction

    @property
    def is_over(self) -> bool:
        return 0 < self.at <= len(self.places)

    @property
    def where(self) -> str:
        file, line, event = self.places[self.at - 1]
        return f"interrupt {self.at}, at {event} {file}:{line}"

    def __enter__(self) -> CtrlC:
        sys.settrace(self._note_call)
        return self

    def __exit__(self, *_error: object) -> None:
        sys.settrace(None)
        self._last.clear()

    def _note_call(self, frame: Any, event: str, _arg: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(_ENGINE) and not (name.endswith(_BELOW) and _is_below(frame)):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._note(frame, "the begin of")
        return self._note_instruction

    def _note_instruction(self, frame: Any, event: str, _arg: Any) -> Any:
        if event == "opcode":
            last, self._last[frame] = self._last.get(frame, -1), frame.f_lasti
            if frame.f_lasti in _looks(frame.f_code).get(last, ()):
                self._note(frame, "a call or a jump in")
        elif event == "exception":
            self._last[frame] = -1  # a call that raises is no such place
        elif event == "return":
            self._last.pop(frame, None)
        return self._note_instruction

    def _note(self, frame: Any, event: str) -> None:
        self.places.append((frame.f_code.co_filename, frame.f_lineno, event))
        if len(self.places) == self.at:
            sys.settrace(None)
            raise KeyboardInterrupt


def _is_below(frame: Any) -> bool:
    """Whether the engine has called it."""
    for _ in range(4):
        if frame is None or frame.f_code.co_filename.startswith(_ENGINE):
            return frame is not None
        frame = frame.f_back
    return False


@functools.cache
def _looks(code: Any) -> dict[int, tuple[int, ...]]:
    """The instructions of a function after which Python looks for Ctrl-C, and where the next one may be.

    A trace function raises at the next instruction, Python at the one before. Where a `with` or `try` ends in between, that would be a lock
    that Python itself gives back: those are left out.
    """
    instructions = list(dis.get_instructions(code))
    offsets = [each.offset for each in instructions]
    found: dict[int, tuple[int, ...]] = {}
    for each, following in zip(instructions, [*offsets[1:], -1], strict=True):
        if each.opname.startswith("CALL"):
            found[each.offset] = (following,)
        elif "JUMP_BACKWARD" in each.opname or each.opname == "JUMP_ABSOLUTE":
            found[each.offset] = (following, each.argval)
    return {
        last: tuple(each for each in then if _handler(code, each) == _handler(code, last))
        for last, then in found.items()
    }


def _handler(code: Any, offset: int) -> int | None:
    """Where an exception at an instruction goes; None: out of the function."""
    parse = getattr(dis, "_parse_exception_table", None)  # before Python 3.11 there is no table
    entries = [] if parse is None else parse(code)
    return next((each.target for each in entries if each.start <= offset < each.end), None)
