"""Training that fits in memory and scales out, on PyTorch and on MindSpore, without changes to the model.

Importing this package imports no framework: each public name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import Any

from hyper_parallel._base.log import show_logs_from_environment
from hyper_parallel._version import __version__

# public name -> the module it lives in
_PUBLIC = {
    "get_platform": "hyper_parallel.platform",
    "get_torch_platform": "hyper_parallel.platform",
    "get_mindspore_platform": "hyper_parallel.platform",
    "platform_of": "hyper_parallel.platform",
    "Platform": "hyper_parallel.platform",
    "PlatformType": "hyper_parallel.platform",
    "HyperParallelError": "hyper_parallel._base.errors",
    "CheckpointPolicy": "hyper_parallel.core.activation_checkpoint.policy",
    "checkpoint": "hyper_parallel.core.activation_checkpoint.region",
    "checkpoint_wrapper": "hyper_parallel.core.activation_checkpoint.wrap",
    "apply_activation_checkpointing": "hyper_parallel.core.activation_checkpoint.wrap",
    "swap_wrapper": "hyper_parallel.core.activation_checkpoint.wrap",
    "offload_wrapper": "hyper_parallel.core.activation_checkpoint.wrap",
    "wrappers": "hyper_parallel.core.activation_checkpoint.wrappers",
    "policies": "hyper_parallel.core.activation_checkpoint",
    "SwapManager": "hyper_parallel.core.activation_checkpoint.swap",
    "SwapTensor": "hyper_parallel.core.activation_checkpoint.swap",
    "Storage": "hyper_parallel.core.activation_checkpoint.swap",
    "configure_swap": "hyper_parallel.core.swap.config",
    "plan_memory": "hyper_parallel.core.planner.planning",
    "explain": "hyper_parallel.core.planner.planning",
    "largest": "hyper_parallel.core.planner.plan.largest",
    "Largest": "hyper_parallel.core.planner.plan.largest",
    "MemoryPlan": "hyper_parallel.core.planner.plan.plan",
    "BudgetError": "hyper_parallel.core.planner.solve.solver",
    "DeviceMesh": "hyper_parallel.core.dtensor.mesh",
    "init_device_mesh": "hyper_parallel.core.dtensor.mesh",
    "Layout": "hyper_parallel.core.dtensor.layout",
    "layout": "hyper_parallel.core.dtensor.layout",
    "Shard": "hyper_parallel.core.dtensor.placements",
    "Replicate": "hyper_parallel.core.dtensor.placements",
    "Partial": "hyper_parallel.core.dtensor.placements",
    "DTensor": "hyper_parallel.core.dtensor.dtensor",
    "distribute_tensor": "hyper_parallel.core.dtensor.dtensor",
    "ones": "hyper_parallel.core.shard.factories",
    "zeros": "hyper_parallel.core.shard.factories",
    "empty": "hyper_parallel.core.shard.factories",
    "full": "hyper_parallel.core.shard.factories",
    "rand": "hyper_parallel.core.shard.factories",
    "randn": "hyper_parallel.core.shard.factories",
    "DistributedOp": "hyper_parallel.core.shard.ops.parallel_ops",
    "EinsumRule": "hyper_parallel.core.shard.ops.short_rules",
    "StrategyRule": "hyper_parallel.core.shard.ops.short_rules",
    "DFunction": "hyper_parallel.core.shard.dfunction",
    "shard_module": "hyper_parallel.core.shard.shard_module",
    "ShardPlan": "hyper_parallel.core.shard.shard_module",
    "custom_shard": "hyper_parallel.core.shard.shard_module",
    "comm_debug": "hyper_parallel.core.shard.communication_log",
    "explicit_communication": "hyper_parallel.core.shard.communication_log",
    "unknown_ops": "hyper_parallel.core.shard._op_dispatch",
    "NoRuleError": "hyper_parallel.core.shard._op_dispatch",
    "Schedule": "hyper_parallel.core.parallel.pipeline.schedule",
    "ScheduleError": "hyper_parallel.core.parallel.pipeline.verdict",
    "schedules": "hyper_parallel.core.parallel.pipeline",
    "PipelineStage": "hyper_parallel.core.parallel.pipeline.stage",
    "split_stages": "hyper_parallel.core.parallel.pipeline.splitting",
    "fully_shard": "hyper_parallel.core.parallel.sharding.fully_shard",
    "accumulate": "hyper_parallel.core.parallel.sharding.fully_shard",
    "MixedPrecision": "hyper_parallel.core.parallel.sharding.precision",
    "Pipeline": "hyper_parallel.core.parallel.pipeline.running",
    "Microbatch": "hyper_parallel.core.parallel.pipeline.running",
    "HookCoordinator": "hyper_parallel.core.parallel.pipeline.coordinator",
    "overlap_forward_backward": "hyper_parallel.core.parallel.pipeline.coordinator",
    "manual_seed": "hyper_parallel.core.parallel.seeds",
    "init_on_device": "hyper_parallel.core.parallel.materializing",
    "materialize": "hyper_parallel.core.parallel.materializing",
    "value_and_grad": "hyper_parallel.core.parallel.gradients",
    "clip_grad_norm_": "hyper_parallel.core.parallel.norms",
}

# Of these a framework has its own: they are asked for each time, as `get_platform` is.
_OF_THE_FRAMEWORK = {"hyper_parallel.core.dtensor.dtensor", "hyper_parallel.core.shard.dfunction"}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(module)
    # As `from home import name` does: what the module has, or else its submodule.
    value = getattr(home, name) if hasattr(home, name) else importlib.import_module(f"{module}.{name}")
    if module not in _OF_THE_FRAMEWORK:
        globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


show_logs_from_environment()
