"""Who this process is. The rest of communication comes with its own part."""

from __future__ import annotations

from mindspore import communication
from mindspore.communication import GlobalComm
from mindspore.communication._comm_helper import _is_initialized


class Communication:
    # The group is named in every call: its default was fixed to Ascend's when MindSpore was imported.

    @staticmethod
    def get_rank() -> int:
        return communication.get_rank(GlobalComm.WORLD_COMM_GROUP) if _is_initialized() else 0

    @staticmethod
    def get_world_size() -> int:
        return communication.get_group_size(GlobalComm.WORLD_COMM_GROUP) if _is_initialized() else 1
