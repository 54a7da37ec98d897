"""Communication of MindSpore: the common part on its own (hccl on Ascend, mccl on the CPU)."""

from __future__ import annotations

from mindspore.common._grad_function import _Function

from hyper_parallel.platform.communication.collectives import Collectives
from hyper_parallel.platform.communication.differentiable import Differentiable
from hyper_parallel.platform.communication.functions import Functions
from hyper_parallel.platform.communication.groups import Groups
from hyper_parallel.platform.communication.point_to_point import PointToPoint
from hyper_parallel.platform.mindspore.communication.transport import MindSporeTransport

_transport = MindSporeTransport()


class Communication(Groups, Collectives, PointToPoint, Differentiable):
    transport = _transport
    functions = Functions(_Function, _transport)
