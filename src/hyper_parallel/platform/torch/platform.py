"""`TorchPlatform`, put together from its parts."""

from __future__ import annotations

import torch

from hyper_parallel._base.errors import FrameworkMissingError
from hyper_parallel.platform.interface import Platform, PlatformType
from hyper_parallel.platform.torch.activations import Activations
from hyper_parallel.platform.torch.checkpoint_files import CheckpointFiles
from hyper_parallel.platform.torch.communication import Communication
from hyper_parallel.platform.torch.devices import Devices
from hyper_parallel.platform.torch.execution import Execution
from hyper_parallel.platform.torch.gradients import Gradients
from hyper_parallel.platform.torch.modules import Modules
from hyper_parallel.platform.torch.parameters import Parameters
from hyper_parallel.platform.torch.tensors import Tensors

OLDEST_TORCH = (2, 8)


class TorchPlatform(
    Devices,
    Tensors,
    Modules,
    Parameters,
    Gradients,
    CheckpointFiles,
    Execution,
    Activations,
    Communication,
    Platform,
):
    """PyTorch, on the CPU and on any accelerator that has streams (`cuda`, `npu`, `xpu`)."""

    platform_type = PlatformType.PYTORCH
    Tensor = torch.Tensor
    Parameter = torch.nn.Parameter
    Module = torch.nn.Module
    Function = torch.autograd.Function

    def __init__(self) -> None:
        version = tuple(int(part) for part in torch.__version__.split(".")[:2])
        if version < OLDEST_TORCH:
            raise FrameworkMissingError(
                "This PyTorch is too old.",
                expected="2.8 or later",
                got=torch.__version__,
                do="Run `pip install --upgrade 'torch>=2.8'`.",
            )
