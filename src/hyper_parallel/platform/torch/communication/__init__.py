"""Communication of PyTorch: the common part on `torch.distributed` (gloo, nccl, hccl)."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.platform.communication.collectives import Collectives
from hyper_parallel.platform.communication.differentiable import Differentiable
from hyper_parallel.platform.communication.functions import Functions
from hyper_parallel.platform.communication.groups import Groups
from hyper_parallel.platform.communication.point_to_point import PointToPoint
from hyper_parallel.platform.torch.communication.transport import TorchTransport

_transport = TorchTransport()


class Communication(Groups, Collectives, PointToPoint, Differentiable):
    transport = _transport
    functions = Functions(torch.autograd.Function, _transport)


def _keep_out_of_compiled_code(function: Any) -> None:
    """Let compiled code end before a call of this function, and go on after it; what it calls is not compiled either.

    `torch.compiler.disable` says the same, and takes seconds to import.
    """
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = "a hook waits for another thread"
    compiler = torch._C._dynamo.eval_frame
    leave_alone = compiler._FrameExecStrategy(compiler._FrameAction.SKIP, compiler._FrameAction.SKIP)
    compiler.set_code_exec_strategy(function.__code__, leave_alone)


# A compiler that looked into a hook would keep of it what holds meanwhile: a coordinator that is disabled.
_keep_out_of_compiled_code(Differentiable.differentiable_sync_hook.__func__)  # type: ignore[attr-defined]
