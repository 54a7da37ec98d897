"""From one layout to another: plans (pure), and their execution on local tensors of any framework."""

from hyper_parallel.core.dtensor.redistribution.cost import CostModel
from hyper_parallel.core.dtensor.redistribution.executor import redistribute
from hyper_parallel.core.dtensor.redistribution.plan import PeakMemoryError, Plan, plan_redistribution
from hyper_parallel.core.dtensor.redistribution.transport import Transport

__all__ = ["CostModel", "PeakMemoryError", "Plan", "Transport", "plan_redistribution", "redistribute"]
