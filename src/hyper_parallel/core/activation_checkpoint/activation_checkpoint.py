"""Recomputation: the call, the wrapper, and what a policy may answer."""

from hyper_parallel.core.activation_checkpoint.policy import CheckpointPolicy
from hyper_parallel.core.activation_checkpoint.region import checkpoint
from hyper_parallel.core.activation_checkpoint.wrap import checkpoint_wrapper

__all__ = ["CheckpointPolicy", "checkpoint", "checkpoint_wrapper"]
