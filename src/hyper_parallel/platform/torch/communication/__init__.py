"""Communication of PyTorch: the common part on `torch.distributed` (gloo, nccl, hccl)."""

from __future__ import annotations

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
