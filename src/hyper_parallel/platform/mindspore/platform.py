"""`MindSporePlatform`, put together from its parts."""

from __future__ import annotations

import mindspore
import numpy as np
from mindspore.common._grad_function import _Function

from hyper_parallel._base.errors import FrameworkMissingError, StateError
from hyper_parallel.platform.interface import Platform, PlatformType
from hyper_parallel.platform.mindspore.activations import Activations
from hyper_parallel.platform.mindspore.checkpoint_files import CheckpointFiles
from hyper_parallel.platform.mindspore.communication import Communication
from hyper_parallel.platform.mindspore.devices import Devices
from hyper_parallel.platform.mindspore.execution import Execution
from hyper_parallel.platform.mindspore.gradients import Gradients
from hyper_parallel.platform.mindspore.modules import Modules
from hyper_parallel.platform.mindspore.parameters import Parameters
from hyper_parallel.platform.mindspore.tensors import Tensors

OLDEST_MINDSPORE = (2, 10)


class MindSporePlatform(
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
    """MindSpore, on the CPU and on Ascend."""

    platform_type = PlatformType.MINDSPORE
    Tensor = mindspore.Tensor
    Parameter = mindspore.Parameter
    Module = mindspore.nn.Cell
    Function = _Function

    def __init__(self) -> None:
        version = tuple(int(part) for part in mindspore.__version__.split(".")[:2])
        if version < OLDEST_MINDSPORE:
            raise FrameworkMissingError(
                "This MindSpore is too old.",
                expected="2.10",
                got=mindspore.__version__,
                do="Run `pip install --upgrade 'mindspore>=2.10,<2.11'`.",
            )
        if Devices.device_type() == "cpu":
            # Without this each operator is handed to threads that spin while they wait: 10 to 60 times slower on few
            # cores, and an error surfaces at a later, unrelated operator. Our streams of the CPU rest on it as well: an
            # operation has finished when its call returns.
            mindspore.runtime.launch_blocking()
        if int(np.__version__.partition(".")[0]) >= 2:
            _check_numpy()


def _check_numpy() -> None:
    # MindSpore 2.10 says it works with NumPy 2, and then fails in the first operator, and for ever where a NumPy number
    # meets a tensor. Both are tried here, so that it is said once and clearly.
    try:
        _ = mindspore.Tensor([1.0]) * np.float32(2)
    except (SystemError, ImportError, TypeError) as error:
        raise StateError(
            "This MindSpore does not work with this NumPy.",
            expected="NumPy below 2",
            got=f"NumPy {np.__version__} with MindSpore {mindspore.__version__}",
            do="Run `pip install 'numpy<2'`, or set HYPER_PARALLEL_PLATFORM=torch to work on PyTorch.",
        ) from error
