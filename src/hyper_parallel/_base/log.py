"""Loggers: one per layer (`hyper_parallel.platform`, `hyper_parallel.swap`, …), each line prefixed with the rank.

Guarantees: the package adds no handler of its own but a null one, so the application decides what is shown.
`HYPER_PARALLEL_LOG=debug` (or info, warning, error) shows our lines on standard error without any code.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable

ROOT_NAME = "hyper_parallel"
LEVEL_VARIABLE = "HYPER_PARALLEL_LOG"
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def rank_of_environment() -> int:
    """Return the rank that the launcher gave this process (torchrun, msrun), 0 without one."""
    for variable in ("RANK", "RANK_ID", "MS_NODE_ID"):
        value = os.environ.get(variable, "")
        if value.isdigit():
            return int(value)
    return 0


# Replaced while a process group is there, which knows better than the environment.
current_rank: Callable[[], int] = rank_of_environment


class _RankPrefix(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.msg = f"[rank {current_rank()}] {record.msg}"
        return True


def get_logger(layer: str) -> logging.Logger:
    """Return the logger of one layer of the package, for example `get_logger("platform")`."""
    logger = logging.getLogger(f"{ROOT_NAME}.{layer}")
    if not any(isinstance(f, _RankPrefix) for f in logger.filters):
        logger.addFilter(_RankPrefix())
    return logger


def show_logs_from_environment() -> None:
    """Attach a handler on standard error if `HYPER_PARALLEL_LOG` asks for one."""
    root = logging.getLogger(ROOT_NAME)
    if not root.handlers:
        root.addHandler(logging.NullHandler())
    wanted = os.environ.get(LEVEL_VARIABLE, "").strip().lower()
    if not wanted:
        return
    if wanted not in _LEVELS:
        # Not an error: a typing mistake in a variable about logs must not stop a training job at its first import.
        warnings.warn(
            f"{LEVEL_VARIABLE}={wanted!r} names no log level and is ignored; expected one of {', '.join(_LEVELS)}.",
            stacklevel=2,
        )
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    root.addHandler(handler)
    root.setLevel(_LEVELS[wanted])
