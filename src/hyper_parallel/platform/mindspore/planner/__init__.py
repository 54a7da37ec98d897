"""The memory planner's MindSpore part: profiling a real model, and carrying a plan out on it. What it counts: README of this folder."""

from hyper_parallel.platform.mindspore.planner.applying import Applied
from hyper_parallel.platform.mindspore.planner.memory import free_bytes
from hyper_parallel.platform.mindspore.planner.profiling import ProfiledModel
from hyper_parallel.platform.mindspore.planner.signature import (
    batch_bytes,
    check_model,
    forward_of,
    identity,
    look,
)
from hyper_parallel.platform.mindspore.planner.steps import attempt, check_alone, device_of

__all__ = [
    "Applied",
    "ProfiledModel",
    "attempt",
    "batch_bytes",
    "check_alone",
    "check_model",
    "device_of",
    "forward_of",
    "free_bytes",
    "identity",
    "look",
]
