"""The memory planner's PyTorch part: profiling a real model, and carrying a plan out on it."""

from torch import OutOfMemoryError

from hyper_parallel.platform.torch.planner.applying import Applied
from hyper_parallel.platform.torch.planner.memory import free_bytes
from hyper_parallel.platform.torch.planner.out_of_memory import attempt, said_in_backward
from hyper_parallel.platform.torch.planner.profiling import ProfiledModel
from hyper_parallel.platform.torch.planner.signature import (
    batch_bytes,
    check_model,
    forward_of,
    identity,
    look,
)
from hyper_parallel.platform.torch.planner.step_state import StepState
from hyper_parallel.platform.torch.planner.steps import (
    PatchedForward,
    batch_of,
    check_alone,
    device_of,
    is_first_forward,
    some_loss,
    surroundings_of,
)

__all__ = [
    "Applied",
    "OutOfMemoryError",
    "PatchedForward",
    "ProfiledModel",
    "StepState",
    "attempt",
    "batch_bytes",
    "batch_of",
    "check_alone",
    "check_model",
    "device_of",
    "forward_of",
    "free_bytes",
    "identity",
    "is_first_forward",
    "look",
    "said_in_backward",
    "some_loss",
    "surroundings_of",
]
