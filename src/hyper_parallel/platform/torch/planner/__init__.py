"""The memory planner's PyTorch part: profiling a real model, and carrying a plan out on it."""

from hyper_parallel.platform.torch.planner.applying import Applied
from hyper_parallel.platform.torch.planner.memory import free_bytes
from hyper_parallel.platform.torch.planner.profiling import ProfiledModel
from hyper_parallel.platform.torch.planner.signature import all_facts, model_facts

__all__ = ["Applied", "ProfiledModel", "all_facts", "free_bytes", "model_facts"]
