"""Ctrl-C at a chosen place of a step, and what it must not leave behind."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.utils._python_dispatch as dispatch

import hyper_parallel
from hyper_parallel.platform.torch.regions import leaving, surroundings
from hyper_parallel.platform.torch.regions.random_state import drawing

_OURS = str(Path(hyper_parallel.__file__).parent)
_STACKS = (
    "autograd/graph",
    "autograd/grad_mode",
    "utils/_python_dispatch",
    "utils/_device",
    "utils/_contextlib",
    "amp/autocast_mode",
    "overrides",
)
_FILES = (_OURS, "/contextlib.py", *(f"{Path(torch.__file__).parent}/{name}.py" for name in _STACKS))
_BLOCKS = {"__enter__", "__exit__", "change", "put_back", "_put_back"}
Place = tuple[str, int, str]


class Interrupt:
    """Within: Ctrl-C comes at the n-th moment at which Python looks for it, in this package or at a stack of PyTorch's.

    Python looks when a function of its own begins, and when one of C's has returned: that is where a profile function is called. `places` has
    what was met; in a thread of autograd's `here` must be called first.
    """

    def __init__(self, at: int = 0, kind: type[BaseException] = KeyboardInterrupt) -> None:
        self.at, self.kind = at, kind
        self.places: list[Place] = []
        self.is_in_block: list[bool] = []
        self._is_open = True

    @property
    def is_over(self) -> bool:
        return 0 < self.at <= len(self.places)

    @property
    def where(self) -> str:
        file, line, event = self.places[self.at - 1]
        return f"interrupt {self.at}, at the {'begin of' if event == 'call' else 'call in'} {file}:{line}"

    def __enter__(self) -> Interrupt:
        self.here()
        return self

    def __exit__(self, *_error: object) -> None:
        self._is_open = False
        sys.setprofile(None)

    def here(self) -> None:
        sys.setprofile(self._note)

    def _note(self, frame: Any, event: str, _arg: Any) -> None:
        if not self._is_open:
            sys.setprofile(None)
            return
        code = frame.f_code
        if (
            (event != "call" and event != "c_return")
            or not code.co_filename.startswith(_FILES)
            or not _is_for_us(frame)
        ):
            return
        self.places.append((code.co_filename, frame.f_lineno, event))
        if not self.at:
            caller = frame.f_back  # None where a thread of autograd's calls a hook
            is_called_by_one = caller is not None and caller.f_code.co_name in _BLOCKS
            self.is_in_block.append(code.co_name in _BLOCKS or is_called_by_one)
        if len(self.places) == self.at:
            sys.setprofile(None)
            raise self.kind

    def moments(self, all_moments: int | None = None) -> list[int]:
        """Where to interrupt: once at each place that puts something on a stack or takes it away; and at so many moments, evenly spread."""
        places = [place for place, is_in_block in zip(self.places, self.is_in_block, strict=True) if is_in_block]
        found = {self.places.index(place) + 1 for place in set(places)}
        if all_moments is not None:
            found.update(range(1, len(self.places) + 1, max(1, len(self.places) // all_moments)))
        return sorted(found)


def _is_for_us(frame: Any) -> bool:
    """Whether this package has called it, and not the test."""
    for _ in range(4):
        if frame is None or frame.f_code.co_filename.startswith(_OURS):
            return frame is not None
        frame = frame.f_back
    return False


def thread_state() -> dict[str, Any]:
    """Everything that a region puts on its thread."""
    return {
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "dispatch modes": dispatch._get_current_dispatch_mode_stack(),
        "flags": [value for name, value in vars(dispatch).items() if name.startswith("_is_in_") and isinstance(value, bool)],
        "function modes": torch.overrides._get_current_function_mode_stack(),
        "saved-tensor hooks": torch._C._autograd._top_saved_tensors_default_hooks(True),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()),
        "depth of autocast": (torch.autocast_increment_nesting(), torch.autocast_decrement_nesting()),
        "keys": (str(torch._C._dispatch_tls_local_include_set()), str(torch._C._dispatch_tls_local_exclude_set())),
        "device": str(torch.empty(0).device),
        "second runs": surroundings.num_replays(),
        "generators are taken": drawing.is_mine(),
        "waiting": len(leaving._waiting.launches),
        "profiler": torch.autograd._profiler_enabled(),
    }  # fmt: skip


def generators() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate()]


def differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in before if before[name] != after[name]]


def interrupted(step: Callable[[Interrupt], Any], at: int) -> Interrupt | None:
    """One step with Ctrl-C in it; None if the step has fewer moments by now, or if a finaliser had it, which Python ignores."""
    interrupt = Interrupt(at)
    try:
        with interrupt:
            step(interrupt)
    except KeyboardInterrupt:
        return interrupt
    return interrupt if interrupt.is_over else None
